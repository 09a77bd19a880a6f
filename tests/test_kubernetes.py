"""The manifests in deploy/kubernetes: what they render to fits this server, and itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from razor_dist.commands.serve import serve
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.client import EngineClient
from razor_dist.server.app import build_app
from razor_dist.server.service import Service
from tests.server.process import ROOT
from tests.test_cli import options

FOLDER = ROOT / "deploy/kubernetes"


def rendered(folder: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a kustomization by their kind."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("there is no kubectl")
    command = [kubectl, "kustomize", str(FOLDER / folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def pods(objects: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The pods' templates, the one with HTTP first."""
    if "Deployment" in objects:
        return [objects["Deployment"]["spec"]["template"]]
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


@pytest.mark.parametrize("folder", ["base", "hosts"])
def test_what_is_rendered_fits_the_server(folder: str, tmp_path: Path) -> None:
    objects = rendered(folder)
    config = ServerConfig(**yaml.safe_load(objects["ConfigMap"]["data"]["serve.yaml"]))
    assert config.metrics_prefix == "vllm"
    paths = {
        getattr(r, "path", "") for r in build_app(Service(config, EngineClient(tmp_path))).routes
    }
    first, *_ = templates = pods(objects)
    for template in templates:
        pod = template["spec"]
        assert pod["enableServiceLinks"] is False
        assert pod["terminationGracePeriodSeconds"] > config.shutdown_timeout
        [container] = pod["containers"]
        given = [*container.get("command", ()), *container["args"]]
        flags = re.findall(
            r"--[\w-]+",
            " ".join(given[given.index("--no-python") :] if "--no-python" in given else given),
        )
        assert set(flags) - {"--no-python"} <= options(serve)
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts.keys() == volumes.keys()
        assert volumes["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
        assert any(f"{mounts['config']}/serve.yaml" in part for part in given)
        assert any(f"{mounts['keys']}/keys" in part for part in given)
    [container] = first["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == config.port
    for kind in ("startupProbe", "readinessProbe", *(["livenessProbe"] * (folder == "base"))):
        asked = container[kind]["httpGet"]
        assert asked["path"] in paths and asked["port"] in ports
    service, monitor = objects["Service"]["spec"], objects["PodMonitor"]["spec"]
    assert service["selector"].items() <= first["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] in ports
    assert monitor["selector"]["matchLabels"].items() <= first["metadata"]["labels"].items()
    [endpoint] = monitor["podMetricsEndpoints"]
    assert endpoint["path"] in paths and endpoint["port"] in ports
    secret = endpoint["authorization"]["credentials"]["name"]
    assert secret in {v["secret"]["secretName"] for v in first["spec"]["volumes"] if "secret" in v}


def test_the_hosts_ranks_are_all_of_the_server() -> None:
    """One server: the first host alone has HTTP, and all have the same command."""
    objects = rendered("hosts")
    # It makes a Service of its own name, unless there is one, by which pods find the leader.
    service, group = (objects[kind]["metadata"]["name"] for kind in ("Service", "LeaderWorkerSet"))
    assert service != group
    leader, worker = (template["spec"]["containers"][0] for template in pods(objects))
    assert leader["command"] == worker["command"] and leader["args"] == worker["args"]
    assert "ports" not in worker and "readinessProbe" not in worker
    flags = dict(re.findall(r"--([\w-]+)=(\d+)", " ".join([*leader["command"], *leader["args"]])))
    size = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    assert int(flags["world-size"]) == size * int(flags["nproc-per-node"])
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == flags["nproc-per-node"]


@pytest.mark.long
def test_before_a_host_stops_its_server_ends() -> None:
    """Whatever else there is: a process that nobody has waited for has no command line."""
    text = (FOLDER / "hosts/leaderworkerset.yaml").read_text()
    pod = yaml.safe_load(text)["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    [_, _, script] = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    name = "razor_dist.server.main"
    sleeping = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", f"{name}.mock"]
    )
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    time.sleep(1)
    assert name in script
    stop = subprocess.run([sys.executable, "-c", script.replace(name, f"{name}.mock")], timeout=60)
    assert stop.returncode == 0 and sleeping.wait(10) == -15 and zombie.wait() == 0


def test_triton_may_write_where_nothing_else_is_writable() -> None:
    deploy = ROOT / "deploy"
    variable = re.compile(r"\bTRITON_HOME=(\S+)")
    [home] = variable.findall((deploy / "Dockerfile").read_text())
    read_only = [
        text
        for file in deploy.rglob("*.yaml")
        if "readOnlyRootFilesystem: true" in (text := file.read_text())
    ]
    assert len(read_only) >= 2
    for text in read_only:
        assert text.count("readOnlyRootFilesystem: true") == text.count(f"mountPath: {home}}}")
    for unit in deploy.glob("*.service"):
        text = unit.read_text()
        [folder] = re.findall(r"^CacheDirectory=(\S+)$", text, re.MULTILINE)
        assert variable.findall(text) == [f"/var/cache/{folder}"]
