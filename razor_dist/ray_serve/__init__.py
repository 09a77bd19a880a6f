"""Several engines behind one endpoint, as a Ray Serve application: see recipe 12 in ``docs/``."""
