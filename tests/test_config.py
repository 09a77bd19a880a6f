"""Settings: precedence, and one readable sentence for each mistake."""

from __future__ import annotations

import inspect
import pickle
import re
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from packaging.requirements import Requirement
from pydantic import Field
from typer.testing import CliRunner

import razor_dist
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.commands.options import with_config_flags
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig, JobConfig, ServerConfig
from razor_dist.config.sizes import Size
from razor_dist.config.sources import build_config, load_config
from razor_dist.config.speculative import SpeculativeConfig
from razor_dist.config.validation import SettingError
from razor_dist.evals.needle.config import NeedleConfig


def test_each_source_outranks_the_next(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("window_min: 300\nblock: 16\nseed: 1\nworld_size: 2\n")
    env = {"RAZOR_BLOCK": "32", "RAZOR_SEED": "2", "HOME": "/"}
    config = load_config(ServerConfig, {"seed": "3", "port": None}, env, file)
    assert config.seed == 3  # flag
    assert config.block == 32  # environment
    assert config.window_min == 300  # file
    assert config.world_size == 2
    assert config.port == 8000  # class; a flag of None was not given
    model = load_config(EngineConfig, {}, {"RAZOR_BLOCK": "32"})
    assert (model.block, model.window_min) == (32, shipped("window_min"))


def shipped(name: str) -> Any:
    return getattr(load_config(EngineConfig), name)


def test_the_shipped_defaults_are_the_models_alone() -> None:
    paper = StreamingPolicy(window_min=4000, window_ratio=5, window_max=None, sinks=4, block=128)
    assert StreamingPolicy.of(EngineConfig()) == paper
    assert StreamingPolicy.of(load_config(EngineConfig, {"model": "other"})) == paper
    assert StreamingPolicy.of(load_config(EngineConfig, {"model": "../models/smollm2"})) == paper
    assert StreamingPolicy.of(load_config(EngineConfig)) != paper
    assert StreamingPolicy.of(build_config(EngineConfig)) == StreamingPolicy.of(
        load_config(EngineConfig)
    )


def test_none_is_a_value_where_a_setting_may_be_none(tmp_path: Path) -> None:
    assert EngineConfig().default_max_tokens == 32768
    assert load_config(EngineConfig, {"default_max_tokens": "none"}).default_max_tokens is None
    file = tmp_path / "settings.yaml"
    file.write_text("window_ratio: null\n")
    assert load_config(EngineConfig, yaml_path=file).window_ratio is None
    assert load_config(EngineConfig, {"window_ratio": "none"}).window_ratio is None
    assert load_config(EngineConfig, {}, {"RAZOR_WINDOW_RATIO": "None"}).window_ratio is None
    assert build_config(EngineConfig, window_ratio=None).window_ratio is None
    assert build_config(EngineConfig, speculative_config="none").speculative_config is None
    assert load_config(ServerConfig, {"api_key": "none"}).api_key == ()
    assert load_config(ServerConfig, {}, {"RAZOR_ALLOWED_HOSTS": "none"}).allowed_hosts == ()
    assert load_config(ServerConfig, {}, {"RAZOR_ALLOWED_HOSTS": ""}).allowed_hosts == ()
    # A comma too many is no name.
    with pytest.raises(ConfigError, match="allowed_hosts must be a non-empty string"):
        load_config(ServerConfig, {"allowed_hosts": "a,,b"})
    # An empty variable must not open a server that was meant to have keys.
    with pytest.raises(ConfigError, match="api_key must be a list of keys"):
        load_config(ServerConfig, {}, {"RAZOR_API_KEY": ""})
    with pytest.raises(ConfigError, match="world_size must be an integer, got 'none'"):
        load_config(EngineConfig, {"world_size": "none"})


@pytest.mark.parametrize(
    ("cli", "env", "text", "message"),
    [
        ({"world_size": 0}, {}, "", "world_size must be at least 1, got 0 (from --world-size)"),
        ({}, {"RAZOR_PORT": "x"}, "", "port must be an integer, got 'x' (from RAZOR_PORT)"),
        ({}, {}, "attention: half", "attention must be one of razor, full, streaming, got 'half'"),
        ({}, {}, "max_num_seqs: yes", "max_num_seqs must be an integer, got True"),
        ({}, {}, "attention: on", "attention must be one of razor, full, streaming, got True"),
        ({}, {}, "seed: 2024-99-99", "'2024-99-99' cannot be read as timestamp: month must be"),
        ({}, {}, "seed: 0x_", "'0x_' cannot be read as int: invalid literal"),
        ({}, {}, "ray: !!bool x", "'x' cannot be read as bool"),
        ({}, {}, "compensation: perhaps", "compensation must be true or false, got 'perhaps'"),
        ({}, {}, "collective_timeout: .nan", "collective_timeout must be a finite number"),
        ({}, {}, "collective_timeout: 0", "collective_timeout must be greater than 0, got 0"),
        ({}, {}, "window_min: 1.5", "window_min must be an integer such as 8192 or 8K, got 1.5"),
        ({}, {}, "window_min: 1:30", "an integer such as 8192 or 8K, got '1:30'"),
        ({}, {}, "max_step_ms: 1:30.5", "got '1:30.5'"),
        ({}, {}, "window_max: 1", "window_max (1) must not be below window_min"),
        ({}, {}, "otlp_endpoint: a:4318", "must be an address such as http://HOST:4318, got"),
        ({}, {}, "rope_scaling: yes", "rope_scaling must be an object or none, got True"),
        ({}, {}, "speculative_config: off", "must be an object or auto or none, got False"),
        ({}, {}, "retrieval_share: 1", "retrieval_share must be a number between 0 and 1, such as"),
        ({}, {}, "window-min: 1", "unknown setting 'window-min'; did you mean 'window_min'?"),
        ({}, {}, "modell: x", "unknown setting 'modell'; did you mean 'model'?"),
        ({}, {"RAZOR_WORLDSIZE": "1"}, "", "did you mean 'RAZOR_WORLD_SIZE'?"),
        ({"wurld": 1}, {}, "", "unknown setting 'wurld'"),
        ({}, {}, "- a\n- b", "must hold a mapping of settings, not ['a', 'b']"),
        ({}, {}, "a: [", "is not valid YAML"),
        ({}, {}, "block: 1\nblock: 2", "'block' is given twice"),
        (
            *({}, {}, "wave_tokens: 1\nchunked_prefill_size: 2"),
            "wave_tokens and chunked_prefill_size are the same setting; give one of them (in ",
        ),
        (
            *({"window_max": "100"}, {}, ""),
            "(window_max from --window-max, window_min from configs/models/smollm2.yaml)",
        ),
        (
            *({"speculative_config": "off"}, {}, ""),
            "speculative_config must be a JSON object or auto or none: ",
        ),
        ({}, {}, "a: " + "[" * 100_000, "is nested too deeply for a mapping of settings"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, cli: dict[str, Any], env: dict[str, str], text: str, message: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(ServerConfig, cli, env, file)
    assert message in str(raised.value)
    assert "pydantic" not in str(raised.value)
    assert "\n" not in str(raised.value)
    if text:
        assert str(file) in str(raised.value)


def test_a_setting_by_two_names_is_refused_as_keyword_too() -> None:
    both = {"wave_tokens": 1024, "chunked_prefill_size": 2048}
    with pytest.raises(ConfigError, match=r"are the same setting; give one of them$"):
        build_config(EngineConfig, **both)


def test_a_mistake_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(SettingError("a is below b", "a", "b")))
    assert (str(error), error.names) == ("a is below b", ("a", "b"))


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("'off'", "off")])
def test_on_and_off_need_no_quotes_in_yaml(tmp_path: Path, written: str, meant: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"repetition_detection: {written}\n")
    assert load_config(EngineConfig, yaml_path=file).repetition_detection == meant


def test_an_integer_is_decimal_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 010\nspeculative_config: {num_speculative_tokens: 007}\nseed: 0x1F\n")
    config = load_config(ServerConfig, {"window_min": "010"}, {"RAZOR_MAX_QUEUE": "010"}, file)
    assert (config.port, config.window_min, config.max_queue, config.seed) == (10, 10, 10, 31)
    assert config.speculative_config == SpeculativeConfig(num_speculative_tokens=7)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (EngineConfig, "head_map"),
        (JobConfig, "prefix_store"),
        (NeedleConfig, "duo_head_map"),
        (ServerConfig, "url_file"),
        (ServerConfig, "api_key_file"),
    ],
)
@pytest.mark.parametrize("source", ["cli", "env", "yaml"])
def test_a_path_may_begin_at_home(
    cls: type[EngineConfig], name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: ~/x\n")
    cli = {name: "~/x"} if source == "cli" else {}
    env = {f"RAZOR_{name.upper()}": "~/x"} if source == "env" else {}
    if cls is NeedleConfig:
        cli["methods"] = "full,duo"
    config = load_config(cls, cli, env, file if source == "yaml" else None)
    assert getattr(config, name) == "/home/me/x"


def test_every_variable_of_the_code_may_be_set() -> None:
    """All that a module reads from the environment is a setting, or known not to be one."""
    folders = [Path(razor_dist.__file__).parent / name for name in ("", "evals", "kernels")]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    names = {name for text in texts for name in re.findall(r'"(RAZOR_[A-Z_]+)"', text)}
    assert {"RAZOR_DIST_CPU_KERNELS", "RAZOR_RENDEZVOUS", "RAZOR_API_KEY"} <= names
    for name in sorted(names):
        assert load_config(EngineConfig, {}, {name: "0"}) == load_config(EngineConfig)


@pytest.mark.parametrize("service", ["RAZOR", "RAZOR_HEAD_SVC", "RAZOR_DIST", "RAZOR_DIST_HTTP"])
def test_what_kubernetes_tells_of_a_service_is_no_setting(service: str) -> None:
    told = """SERVICE_HOST=10.96.0.7 SERVICE_PORT=8000 SERVICE_PORT_HTTP=8000
        PORT=tcp://10.96.0.7:8000 PORT_8000_TCP=tcp://10.96.0.7:8000 PORT_8000_TCP_PROTO=tcp
        PORT_8000_TCP_PORT=8000 PORT_8000_TCP_ADDR=10.96.0.7"""
    env = dict(f"{service}_{pair}".split("=") for pair in told.split())
    assert load_config(ServerConfig, {}, env) == load_config(ServerConfig)
    with pytest.raises(ConfigError, match="unknown environment variable 'RAZOR_DIST_MODEL'"):
        load_config(ServerConfig, {}, {**env, "RAZOR_DIST_MODEL": "smollm2"})


def test_a_value_that_looks_like_a_service_is_a_setting() -> None:
    key = "A_SERVICE_PORT_8_PORT=tcp://" + "x" * 32
    assert load_config(ServerConfig, {}, {"RAZOR_API_KEY": key}).api_key == (key,)


def test_a_name_of_a_file_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(EngineConfig, yaml_path="x" * 300)


def test_an_old_name_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("wave_tokens: 64k\n")
    configs = [
        load_config(EngineConfig, yaml_path=file),
        load_config(EngineConfig, {}, {"RAZOR_WAVE_TOKENS": "64k"}),
        load_config(EngineConfig, {"wave_tokens": "64k"}),
        build_config(EngineConfig, wave_tokens="64k"),
    ]
    assert [config.chunked_prefill_size for config in configs] == [64000] * 4
    warned = "wave_tokens is deprecated: the setting is named chunked_prefill_size now"
    assert [record.message for record in caplog.records] == [warned] * 4
    assert CliRunner().invoke(_command(), ["--wave-tokens", "64k"]).output == "64k\n"
    assert "wave" not in CliRunner().invoke(_command(), ["--help"]).output


def test_a_second_file_is_refused() -> None:
    result = CliRunner().invoke(_command(), ["--config", "a.yaml", "--config", "b.yaml"])
    assert str(result.exception) == "--config: give one file, not a.yaml and b.yaml"
    assert CliRunner().invoke(_command(), ["--config", "a.yaml"]).exit_code == 0


def _command() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_config_flags(EngineConfig)
    def show(config_file: str | None, flags: dict[str, Any]) -> None:
        typer.echo(flags["wave_tokens"])

    return app


def test_flags_are_grouped_and_say_what_they_take() -> None:
    class Derived(ServerConfig):
        group: ClassVar[str] = "Derived"
        seed: int = Field(default=3)
        lengths: tuple[Size, ...] = Field(default=(1, 2))

    options = {
        name: parameter.default
        for name, parameter in inspect.signature(
            with_config_flags(Derived)(lambda config_file, flags: None)
        ).parameters.items()
    }
    panels = {name: options[name].rich_help_panel for name in ("seed", "port", "lengths", "config")}
    assert panels == {"seed": "Model", "port": "HTTP server", "lengths": "Derived", "config": None}
    assert [options[n].metavar for n in ("lengths", "window_max", "seed")] == [
        *("SIZE", "SIZE", "INTEGER")
    ]
    assert options["lengths"].help.endswith("[default: 1,2]")


def test_the_class_itself_raises_our_error() -> None:
    with pytest.raises(ConfigError, match=r"^world_size must be at least 1, got -1$"):
        EngineConfig(world_size=-1)
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        build_config(EngineConfig, atention="full")


def test_the_servers_settings_are_unknown_to_the_engine_on_its_command_line_alone() -> None:
    assert load_config(EngineConfig, {}, {"RAZOR_PORT": "80"}) == load_config(EngineConfig)
    with pytest.raises(ConfigError, match="unknown setting 'port'"):
        load_config(EngineConfig, {"port": 80})


@pytest.mark.parametrize("cls", [EngineConfig, JobConfig])
def test_the_servers_file_is_for_other_commands_too(
    cls: type[EngineConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = Path(__file__).parents[1] / "deploy/kubernetes/base/serve.yaml"
    assert load_config(cls, {}, {}, served).max_num_seqs == 8
    assert "settings of other commands are passed over: " in caplog.text
    assert "shutdown_timeout" in caplog.text and "max_num_seqs" not in caplog.text
    caplog.clear()
    load_config(ServerConfig, {}, {}, served)
    assert not caplog.text
    served = tmp_path / "serve.yaml"
    served.write_text("max_num_seqs: 3\nshutdown_timeuot: 1\n")
    with pytest.raises(ConfigError, match="did you mean 'shutdown_timeout'"):
        load_config(cls, {}, {}, served)


def test_a_rank_reads_back_the_engines_settings() -> None:
    config = ServerConfig(world_size=3, window_ratio=None, port=1)
    assert EngineConfig.from_json(config.engine_json()) == EngineConfig(
        world_size=3, window_ratio=None
    )


def test_threads_are_shared_by_the_ranks_of_a_host() -> None:
    assert EngineConfig(threads=3).threads_per_rank(8) == 3
    assert EngineConfig().threads_per_rank(10**6) == 1


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().world_size = 2


def test_the_cuda_extra_goes_with_every_torch_that_is_supported() -> None:
    """torch 2.11 pins Triton 3.6.0; flash-attn, without a wheel, compiles for an hour."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    cuda = {one.name: one.specifier for one in map(Requirement, extras["cuda"])}
    assert "3.6.0" in cuda["triton"] and "3.7.1" in cuda["triton"]
    assert not {"flash-attn", "ring-flash-attn", "deepspeed"} & cuda.keys()
    [torch] = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
    assert "2.11.0" in torch.specifier and "2.13.0" in torch.specifier
