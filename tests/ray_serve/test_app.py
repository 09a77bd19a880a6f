"""Arguments of the application, and the file that deploys it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray.serve")
import ray
from ray.serve.schema import ServeDeploySchema

from razor_dist.config.errors import ConfigError
from razor_dist.ray_serve.app import app

FILE = Path(__file__).parents[2] / "deploy/ray-serve/razor.yaml"


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0, "GPU": 8.0})


def engine_of(args: dict[str, Any]) -> Any:
    """Return the deployment of engines."""
    built: Any = app(args)
    return built._bound_deployment.init_args[1]._bound_deployment


def test_the_file_that_is_deployed() -> None:
    [described] = ServeDeploySchema(**yaml.safe_load(FILE.read_text())).applications
    assert described.import_path == f"{app.__module__}:{app.__name__}"
    assert [deployment.name for deployment in described.deployments] == ["Engine"]
    engine = engine_of({**described.args, "model": "smollm2"})
    assert engine._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 1}] * 8


def test_arguments_of_a_command_line_are_text() -> None:
    engine = engine_of(
        {"model": "smollm2", "device": "cpu", "engines": "2", "cpus_per_rank": "0.5"}
    )
    assert engine.num_replicas == 2
    assert engine._replica_config.placement_group_bundles == [{"CPU": 0.5}]
    assert engine.init_args[0].threads == 1


def test_a_file_may_have_the_settings_of_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("device: cpu\nengines: 3\ncpus_per_rank: 2\nmax_queue: 5\n")
    engine = engine_of({"config": str(file), "cpus_per_rank": 4})
    assert engine.num_replicas == 3
    assert engine._replica_config.placement_group_bundles == [{"CPU": 4}]
    assert engine.init_args[0].max_queue == 5
    assert "passed over" not in caplog.text
    file.write_text("device: cpu\nattempts: 9\n")
    engine_of({"config": str(file)})
    assert "passed over: attempts" in caplog.text


def test_the_environment_counts_as_for_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "k" * 32
    told = {"RAZOR_API_KEY": key, "RAZOR_MAX_QUEUE": "7", "RAZOR_ENGINES": "2"}
    in_a_pod = {"RAZOR_PORT": "8000", "RAZOR_URL_FILE": "a", "RAZOR_SVC_SERVICE_HOST": "10.0.0.1"}
    for name, value in (told | in_a_pod).items():
        monkeypatch.setenv(name, value)
    built: Any = app({"device": "cpu", "max_queue": 5})
    config, engine = built._bound_deployment.init_args
    assert (config.api_key, config.max_queue) == ((key,), 5)
    assert engine._bound_deployment.num_replicas == 2
    monkeypatch.setenv("RAZOR_SSL_CERTFILE", "a")
    monkeypatch.setenv("RAZOR_SSL_KEYFILE", "b")
    with pytest.raises(ConfigError, match="ssl_certfile is not the application's"):
        app({"device": "cpu"})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"ssl_certfile": "a", "ssl_keyfile": "b"}, "ssl_certfile is not the application's"),
        ({"port": "80"}, "port is not the application's"),
        ({"world_sise": 2}, "world_sise"),
        ({"engines": 0}, "engines"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        app(args)
