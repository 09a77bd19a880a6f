"""The application: ``import_path: razor_dist.ray_serve.app:app`` in a file for ``serve deploy``."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve import Application

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import JobConfig, ServerConfig
from razor_dist.config.sources import ENV_PREFIX, load_config
from razor_dist.jobs.cluster import Demand
from razor_dist.ray_serve.engine import Engine
from razor_dist.ray_serve.ingress import Ingress

# Settings of the listening sockets, which here are Serve's proxies'.
_OF_PROXIES = (
    *("port", "url_file", "ssl_certfile", "ssl_keyfile", "header_timeout", "max_connections"),
)
_OF_JOBS = ("cpus_per_rank", "placement", "engines")
# What a container sets for its `razor-dist serve`.
_OF_SERVE = ("RAZOR_PORT", "RAZOR_URL_FILE")


def app(args: dict[str, Any]) -> Application:
    """Return engines behind an endpoint.

    ``args`` are the settings of `ServerConfig`, ``config`` a file with more of them, and of
    `JobConfig` ``cpus_per_rank``, ``placement`` and ``engines`` (1 by default). What they do not
    say may be in the environment, as of `razor-dist serve`. Raises `ConfigError` if one is unknown,
    wrong, or Serve's.
    """
    args = dict(args)
    file = args.pop("config", None)
    given = {name: args.pop(name) for name in _OF_JOBS if name in args}
    env = {name: value for name, value in os.environ.items() if name not in _OF_SERVE}
    of_jobs = [ENV_PREFIX + name.upper() for name in _OF_JOBS]
    for_jobs = {name: env[name] for name in of_jobs if name in env}
    job = load_config(JobConfig, given, for_jobs, file, also=ServerConfig.model_fields)
    config = load_config(ServerConfig, args, env, file, also=_OF_JOBS)
    unset = ServerConfig()
    for name in _OF_PROXIES:
        if getattr(config, name) != getattr(unset, name):
            raise ConfigError(f"{name} is not the application's: set it in Serve's http_options")
    if config.threads is None:
        # As many as are reserved: other engines' ranks may be on the same node.
        config = config.model_copy(update={"threads": max(1, int(job.cpus_per_rank))})
    demand = Demand.of(config, job)
    deployment: Any = serve.deployment  # its declared types are those of a decorator with arguments
    engines = deployment(Engine).options(
        name="Engine",
        num_replicas=job.engines or 1,
        ray_actor_options={"num_cpus": 0},  # the bundles are the ranks'
        placement_group_bundles=[dict(demand.bundle)] * demand.ranks,
        placement_group_strategy=demand.strategy,
        # The engine refuses by max_queue; scrapes pass all the same.
        max_ongoing_requests=2 * config.max_queue,
        request_router_config={"request_router_class": "razor_dist.ray_serve.router.PrefixRouter"},
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    )
    ingress = deployment(Ingress).options(
        name="Ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10 * config.max_queue,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    )
    application: Application = ingress.bind(config, engines.bind(config, demand.bundle))
    return application
