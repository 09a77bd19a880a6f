"""``serve run launch.ray_serve:app model=smollm2 engines=2``: engines behind one endpoint."""

from razor_dist.ray_serve.app import app

__all__ = ["app"]
