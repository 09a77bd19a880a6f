"""Load a model for serving, with our attention, shared weights, and no gradients."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from razor_dist.config.errors import ModelError
from razor_dist.config.rope_scaling import RopeScaling
from razor_dist.kernels.decode import available
from razor_dist.kernels.fused import use_fused_layers
from razor_dist.kernels.linear import joins, use_fast_linear, use_joined_linear
from razor_dist.models.adapters import adapter, register_configs
from razor_dist.models.bridge import NAME as RAZOR_ATTENTION
from razor_dist.models.dual_chunk import count_within_chunks
from razor_dist.models.longrope import mark_long_positions
from razor_dist.models.shape import ModelShape
from razor_dist.models.support import (
    QUANTISED,
    check_class,
    check_supported,
    read_as_meant,
    scale_rope,
    without_idle_window,
)

# By their names in safetensors files.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FLOATS = {*_DTYPES, "F64"}  # of weights that transformers casts to a model's dtype
# Ends of the names of quantised weights' scales and offsets.
_SCALES = ("_scale", "_scale_inv", "_zero_point", ".scales", ".qzeros")

# Numbers of each weight that enter `weights_fingerprint`.
_SAMPLES = 256
# Fields of a configuration that do not change keys and values.
_IDLE = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "max_length"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_config(
    path: str | Path, *, trust_remote_code: bool = False, rope_scaling: RopeScaling | None = None
) -> PretrainedConfig:
    """Read a model folder's configuration; `ModelError` if `check_supported` refuses it.

    ``rope_scaling`` is applied as if it stood in ``config.json`` (`scale_rope`).
    """
    register_configs()
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ModelError(f"cannot read the configuration in {path}: {error}") from error
    read_as_meant(config)
    if rope_scaling is not None:
        scale_rope(config, rope_scaling)
    check_supported(config)
    return config


def load_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    rope_scaling: RopeScaling | None = None,
) -> PreTrainedModel:
    """Load the causal language model in a local folder, its attention replaced by ours.

    All safetensors files are mapped. On CPU, if ``dtype`` is the stored one, parameters are views
    of the files: ranks of one host share those pages, and nothing is read before it is used. The
    experts of a mixture are an exception: transformers reads and stacks them, so that every rank
    has its own copy. To another device or dtype weights are moved one by one.

    ``dtype`` is float32, bfloat16 or float16; ``trust_remote_code`` runs Python code that comes
    with the weights. The model is in eval mode, without gradients and without transformers' own
    cache; its forward needs ``attention_context=`` (see `razor_dist.models.bridge`). Raise
    `ModelError` if the model is not supported, or its files lack a weight or are quantised.
    """
    if dtype not in _DTYPES.values():
        names = ", ".join(map(dtype_name, _DTYPES.values()))
        raise ModelError(f"dtype must be one of {names}, got {dtype_name(dtype)}")
    config = read_config(path, trust_remote_code=trust_remote_code, rope_scaling=rope_scaling)
    model_class = adapter(config)
    # Any: its type has no second result, which output_loading_info adds.
    from_pretrained: Any = (model_class or AutoModelForCausalLM).from_pretrained
    config = without_idle_window(config)
    with quiet_transformers(), _reading_weights(path):
        _check_floats(path)
        model, report = from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=RAZOR_ATTENTION,
            # Without it, every rank would first have all weights that change dtype on the CPU.
            device_map={"": device},
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
        )
    check_class(type(model))
    _check_report(path, config, report)
    return _made_ready(model)


def _check_floats(path: str | Path) -> None:
    """Raise `ModelError` for weights that are quantised codes."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in sorted(weights.keys()):
                dtype = weights.get_slice(name).get_dtype()
                # Other tensors may be masks, as GPT-2's; 8-bit and 4-bit floats are always codes.
                if dtype not in _FLOATS and (dtype.startswith("F") or name.endswith(".weight")):
                    raise ModelError(
                        f"the weight {name} in {file} is of dtype {dtype}: {QUANTISED}"
                    )


def _check_report(path: str | Path, config: PretrainedConfig, report: dict[str, Any]) -> None:
    """Raise `ModelError` for mismatched, missing or quantised weights in transformers' report."""
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"the weight {name} in {path} is {list(found)}, but by config.json {list(wanted)}"
        )
    # transformers fills missing weights with random numbers and only warns.
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelError(f"the weights in {path} lack {len(report['missing_keys'])}: {missing}")
    unexpected = sorted(report["unexpected_keys"])
    for name in unexpected:
        if name.endswith(_SCALES):
            raise ModelError(f"the weights in {path} have {name}: {QUANTISED}")
    # Weights that an adapter does not know may mean a kind of model that no field tells.
    if unexpected and adapter(config) is not None:
        raise ModelError(
            f"the weights in {path} have {len(unexpected)} that a model of type "
            f"{config.model_type!r} does not use: {', '.join(unexpected[:3])}"
        )


@contextlib.contextmanager
def _reading_weights(path: str | Path) -> Iterator[None]:
    """Raise `ModelError` if files of a model folder cannot be read."""
    try:
        yield
    except SafetensorError as error:
        raise ModelError(
            f"cannot load the weights in {path}: {error}; a file is cut off, or a Git LFS pointer"
        ) from error
    except (OSError, ValueError, TypeError) as error:  # the last two are of JSON files
        raise ModelError(f"cannot load the weights in {path}: {error}") from error


def stored_dtype(path: str | Path) -> torch.dtype:
    """The dtype of a model folder's weights, in which loading on CPU copies nothing.

    It is that of the first weight in the first ``*.safetensors`` file. Raise `ModelError` if there
    is none, or its dtype is not served.
    """
    file = min(Path(path).glob("*.safetensors"), default=None)
    if file is None:
        raise ModelError(f"the model folder {path} has no *.safetensors weights")
    with _reading_weights(path), safe_open(file, framework="pt") as weights:
        name = weights.get_slice(min(weights.keys())).get_dtype()
    if name not in _DTYPES:
        served = ", ".join(_DTYPES)
        raise ModelError(f"the weights in {file} are of dtype {name}; only {served} are served")
    return _DTYPES[name]


def layer_classes(model: PreTrainedModel) -> set[type[nn.Module]]:
    """The classes of a model's decoder layers, also after `use_fused_layers`."""
    names = set(model._no_split_modules or ())
    kinds = {type(module) for module in model.modules()}
    return {kind for kind in kinds if any(base.__name__ in names for base in kind.__mro__)}


def model_from_config(
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Make a model with our attention and random weights from a configuration.

    On the meta device it has no weights and takes no time. ``config`` is from `read_config`, which
    refuses models that cannot be served. Raise `ModelError` if the model's class, which may be
    remote code, does not use the attention interface.
    """
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": RAZOR_ATTENTION}
    model_class = adapter(config)
    config = without_idle_window(config)
    model: PreTrainedModel
    with device:
        if model_class is not None:
            model = model_class._from_config(config, **settings)
        else:
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code, **settings
            )
    check_class(type(model))
    return _made_ready(model)


def _made_ready(model: PreTrainedModel) -> PreTrainedModel:
    module: Any
    for module in model.modules():
        # Frequencies are constant here (`check_supported`), but transformers would read the
        # positions of each call.
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"
    mark_long_positions(model)
    count_within_chunks(model)
    use_fast_linear(model)
    if joins(model.device.type):
        use_joined_linear(model)
    if available(model.device):
        use_fused_layers(model)
    model.config.use_cache = False
    return model.eval().requires_grad_(False)


def eos_token_ids(source: str | Path | PretrainedConfig) -> tuple[int, ...]:
    """Token ids that end a text, from a configuration or a model folder; empty if it names none.

    In a folder ``generation_config.json`` precedes ``config.json``.
    """
    if isinstance(source, PretrainedConfig):
        found = [getattr(source, "eos_token_id", None)]
    else:
        files = [Path(source) / name for name in ("generation_config.json", "config.json")]
        try:
            texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
            found = [json.loads(text).get("eos_token_id") for text in texts]
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"cannot read eos_token_id in {source}: {error}") from error
    ids = next((value for value in found if value not in (None, [])), ())
    ids = (ids,) if isinstance(ids, int) else tuple(ids)
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"eos_token_id of {source} must be token ids, got {list(ids)}")
    return ids


def weights_fingerprint(model: PreTrainedModel, samples: int = _SAMPLES) -> str:
    """Hash of all weights' names, shapes and samples, which differs between models.

    Reading all weights would take longer than the cached work often saves. The hash includes rotary
    frequencies, which releases of transformers may change, to three digits, since processors round
    differently; and code that comes with the weights.
    """
    found = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // samples)].float().cpu()
        found.update(f"{name} {list(weight.shape)}".encode() + sample.numpy().tobytes())
    for name, module in model.named_modules():
        frequencies = [b for key, b in module.named_buffers(recurse=False) if "inv_freq" in key]
        for value in (*frequencies, getattr(module, "attention_scaling", None)):
            if value is not None:
                numbers = torch.as_tensor(value).flatten().tolist()
                found.update(" ".join([name, *(f"{x:.3g}" for x in numbers)]).encode())
    kinds = {type(module).__module__ for module in model.modules()}
    remote = [kind for kind in kinds if kind.startswith("transformers_modules.")]
    folders = {Path(str(sys.modules[kind].__file__)).parent for kind in remote}
    code = [path.read_bytes() for folder in folders for path in folder.glob("*.py")]
    for digest in sorted(hashlib.sha256(text).digest() for text in code):
        found.update(digest)
    return found.hexdigest()


def settings_of(config: PretrainedConfig) -> dict[str, Any]:
    """A model's configuration without fields that do not change its keys and values."""
    fields = config.to_dict()
    return {name: value for name, value in sorted(fields.items()) if name not in _IDLE}


def model_fingerprint(config: PretrainedConfig) -> str:
    """Hash (``sha256:...``) of the fields that decide a model's heads and their attention.

    Fine-tunes of one model share it, and so do copies saved by other releases of transformers,
    whose spellings of the rotary fields are brought to one form. Other fields (dtype, names, cache
    switches, token ids) are left out.
    """
    c: Any = config
    shape = ModelShape.from_config(config)
    fields = {
        "model_type": c.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": getattr(c, "intermediate_size", None),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": bool(getattr(c, "attention_bias", False)),
        "rope": _rope_fields(c),
    }
    if shape.alibi:  # MPT's settings that change the scores
        names = ("alibi_bias_max", "clip_qkv", "softmax_scale")
        attention = getattr(c, "attn_config", None)
        fields["alibi"] = {name: getattr(attention, name, None) for name in names}
    # 10000 and 10000.0 are spelt alike.
    plain = json.loads(json.dumps(fields), parse_float=_whole)
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _whole(number: str) -> int | float:
    value = float(number)
    return int(value) if value.is_integer() else value


def _rope_fields(config: Any) -> dict[str, Any]:
    """Rotary parameters as transformers 5 keeps them, with its defaults spelt out."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None))
    rope.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if rope["partial_rotary_factor"] is None:
        rope["partial_rotary_factor"] = 1.0
    rope.pop("type", None)  # the old name of rope_type, kept beside it by some files
    return rope


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, and its warnings about flags of ``generate``.

    Bars of eight ranks would overlap, and only `razor_dist.protocol.sampling_params` reads flags.
    """
    flags = logging.getLogger("transformers.generation.configuration_utils")
    level = flags.level
    flags.setLevel(logging.ERROR)
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    # This module has a bar of tqdm's own, which the switch does not reach.
    modeling_gguf_pytorch_utils.tqdm = transformers_logging.tqdm  # type: ignore[assignment]
    try:
        yield
    finally:
        flags.setLevel(level)
        if enabled:
            transformers_logging.enable_progress_bar()


def save_model(model: PreTrainedModel, folder: str | Path) -> None:
    # accelerate imports DeepSpeed now if it is installed, which would print its guess.
    from razor_dist.parallel.zero import name_accelerator

    name_accelerator()
    with quiet_transformers():
        model.save_pretrained(folder)
    # safetensors writes files that only their owner may read, whatever the umask.
    for weights in Path(folder).glob("*.safetensors"):
        shutil.copymode(Path(folder) / "config.json", weights)
