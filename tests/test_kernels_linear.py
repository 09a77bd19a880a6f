"""Linear layers by other ways than torch's default are the same products."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from razor_dist.kernels import compiled
from razor_dist.kernels.compiled import SWITCH, operations
from razor_dist.kernels.linear import (
    _MOST,
    Int8Linear,
    Linear,
    Way,
    by_blocks,
    by_compiled,
    by_onednn,
    fastest_way,
    linear,
    use_fast_linear,
    use_int8_linear,
    use_joined_linear,
)
from tests.partials import threads

COMPILER = os.environ.get("CXX", "c++")
needs_compiler = pytest.mark.skipif(operations() is None, reason="needs a C++ compiler")


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 40).flatmap(lambda n: st.sampled_from((n, 16 * n))),
    bias=st.booleans(),
    offset=st.integers(0, 15),
    seed=st.integers(0, 2**16),
)
def test_products_are_those_of_float64(
    leading: list[int], inputs: int, outputs: int, bias: bool, offset: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, inputs, generator=generator)
    # Weights mapped from a file stand at any address.
    stored = torch.randn(outputs * inputs + offset, generator=generator)
    weight = stored[offset:].view(outputs, inputs)
    b = torch.randn(outputs, generator=generator) if bias else None
    expected = functional.linear(x.double(), weight.double(), None if b is None else b.double())
    with torch.inference_mode():
        results = [linear(x, weight, b)]
        if x.numel():
            results.append(by_onednn(x, weight, b))
        if x.numel() == inputs:
            results.append(by_blocks(x, weight, b))
        if x.numel() and operations() is not None:
            results.append(by_compiled(x, weight, b))
    for got in results:
        assert got.shape == expected.shape
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, atol=1e-5 * inputs**0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("times", "ways"),
    [
        ((2.0, 3.0, 1.0), ["by_compiled", "by_compiled", "linear"]),
        ((0.9, 0.85, 1.0), ["by_compiled", "by_compiled", "linear"]),
        ((0.6, 0.4, 1.0), ["by_blocks", "by_onednn", "by_onednn"]),
        ((0.9, 0.7, 2.0), ["by_blocks", "by_onednn", "linear"]),
        ((0.9, 0.85, None), ["linear", "linear", "linear"]),
        ((0.6, 2.0, None), ["by_onednn", "by_onednn", "by_onednn"]),
    ],
)
def test_a_way_that_is_much_faster_is_taken(
    times: tuple[float, float, float | None], ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = dict(zip(("by_onednn", "by_blocks", "by_compiled"), times, strict=True))
    busy = itertools.chain([30.0] * 2, itertools.repeat(1.0))  # a machine slow at first

    def seconds(way: Way, x: Tensor, matrices: Tensor) -> float:
        if way is not by_compiled:  # there may be no compiler
            assert (way(x, matrices[0], None) == x.shape[-1]).all()
        return next(busy) * (by_name.get(way.__name__) or 1.0)

    monkeypatch.setattr("razor_dist.kernels.linear._seconds", seconds)
    compiled = None if times[2] is None else object()
    monkeypatch.setattr("razor_dist.kernels.linear.operations", lambda: compiled)
    found = [fastest_way.__wrapped__(rows).__name__ for rows in (1, 24, 64)]
    assert found == ways


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch's own way is kept")
@pytest.mark.parametrize(
    ("rows", "most", "way", "op"),
    [
        (1, 1, by_blocks, "aten::bmm"),
        (1, 1, by_onednn, "mkldnn::_linear_pointwise"),
        (5, 8, by_onednn, "mkldnn::_linear_pointwise"),
        (900, 256, functional.linear, "aten::linear"),
    ],
)
def test_the_way_of_its_rows_is_taken(
    rows: int, most: int, way: Way, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "razor_dist.kernels.linear.fastest_way", lambda most: asked.append(most) or way
    )
    x, weight = torch.randn(rows, 64), torch.randn(32, 64)
    with torch.inference_mode(), torch.profiler.profile() as profile:
        linear(x, weight)
    names = {event.key for event in profile.key_averages()}
    assert op in names and ("aten::linear" in names) == (op == "aten::linear")
    assert asked == [most]


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    inputs=st.integers(1, 1300),
    outputs=st.integers(1, 120),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_a_row_has_the_same_product_in_any_company(
    rows: int, inputs: int, outputs: int, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    with threads(count):
        together = by_compiled(x, weight, bias)
    alone = torch.cat([by_compiled(row, weight, bias) for row in x.split(1)])
    assert torch.equal(together, alone)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(together.double(), expected, atol=1e-5 * inputs**0.5, rtol=1e-5)


def compile_with(compiler: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Have a new process compile ahead and ask for the operations; it prints if it has them."""
    code = (
        "from razor_dist.kernels.compiled import compile_ahead, operations; "
        "compile_ahead(); print(operations() is not None)"
    )
    env = {**os.environ, SWITCH: "1", "CXX": compiler, "XDG_CACHE_HOME": str(cache), **more}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


@pytest.mark.long
def test_without_a_compiler_or_with_a_failing_one_a_reason_is_given(tmp_path: Path) -> None:
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho x.h:1: error: this compiler is too old >&2\nexit 1\n")
    failing.chmod(0o755)
    for compiler, reason in (("none-such", "no C++ compiler"), (f"{failing} -x", "too old")):
        found = compile_with(compiler, tmp_path)
        assert found.stdout.strip() == "False"
        assert reason in found.stderr
    found = compile_with(f"{failing} -x", tmp_path)
    assert "too old" in found.stderr and "compiling" not in found.stderr  # once is enough
    off = compile_with("none-such", tmp_path, **{SWITCH: "0"})
    assert (off.stdout.strip(), off.stderr) == ("False", "")


@pytest.mark.parametrize(
    ("does", "remembered"),
    [
        ("echo x.cpp:1: error: too old >&2; exit 1", True),
        ("echo '/tmp/x.s:12: Error: no such instruction: vpdpbusd' >&2; exit 1", True),
        ("echo ld: cannot find -lgomp: No such file or directory >&2; exit 1", True),
        ("echo fatal error: Killed signal terminated program cc1plus >&2; exit 1", False),
        ("echo '{standard input}:9: Error: unknown; fatal error: Killed' >&2; exit 1", False),
        ("echo fatal error: x.s: No space left on device >&2; exit 1", False),
        ("echo x.cpp:9:1: fatal error: error writing to x.s: No space left >&2; exit 1", False),
        ('echo "as: Fatal error: can\'t close x.o: Disk quota exceeded" >&2; exit 1', False),
        ("echo 'ld: final link failed: Disk quota exceeded; error: ld' >&2; exit 1", False),
        ("echo c++: fatal error: vfork: Resource temporarily unavailable >&2; exit 1", False),
        ("echo c++: fatal error: vfork: Cannot allocate memory >&2; exit 1", False),
        ("echo cannot fork >&2; exit 1", False),
        ("exec sleep 9", False),
    ],
)
def test_what_may_not_fail_again_is_tried_again(
    does: str, remembered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "c++"
    failing.write_text(f"#!/bin/sh\n{does}\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "_PATIENCE", 1 if "sleep" in does else 100)
    assert operations.__wrapped__() is None
    assert len(list(tmp_path.rglob("*.failed"))) == remembered
    assert list(tmp_path.rglob("*.lock")) and not list(tmp_path.rglob("*.objects"))


def test_a_library_that_cannot_be_loaded_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As from a file system that is mounted noexec; it stays, for hosts that can load it."""
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    last = 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"'
    compiler.write_text(f"#!/bin/sh\necho >> {calls}\n{last}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    folder = tmp_path / "razor_dist"
    killed = compiled._library().with_suffix(".abc.objects")
    killed.mkdir(parents=True)
    (killed / "left.o").touch()
    one = len(list(Path(compiled.__file__).with_name("cpu").glob("*.cpp"))) + 1  # with the linker
    # Another compiler may make one that can be loaded.
    for command, wanted in ((compiler, one), (compiler, one), (f"{compiler} -x", 2 * one)):
        monkeypatch.setenv("CXX", str(command))
        caplog.clear()
        assert operations.__wrapped__() is None
        assert calls.read_text().count("\n") == wanted
        assert "file too short" in caplog.messages[-1]
        assert "XDG_CACHE_HOME" in caplog.messages[-1]
        assert len(list(folder.glob("*.so"))) == 1 and not killed.exists()


def test_an_empty_name_of_a_compiler_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert operations.__wrapped__() is None and "there is no C++ compiler c++" in caplog.text


@pytest.mark.long
@needs_compiler
def test_it_is_compiled_once_and_then_needs_no_compiler(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: compile_with(COMPILER, tmp_path), range(2)))
    assert [found.stdout.strip() for found in both] == ["True", "True"]
    assert sum("compiling kernels" in found.stderr for found in both) == 1
    again = compile_with("none-such", tmp_path)
    assert (again.stdout.strip(), again.stderr) == ("True", "")
    [library] = (tmp_path / "razor_dist").glob("*.so")
    library.write_bytes(b"no library")
    lost = compile_with("none-such", tmp_path)
    assert lost.stdout.strip() == "False" and "cannot be loaded" in lost.stderr
    assert library.exists()  # until there is another


def test_rows_that_are_not_contiguous() -> None:
    x, weight = torch.randn(64, 7, 2)[..., 0].T, torch.randn(32, 64)
    with torch.inference_mode():
        for rows in (slice(0, 7), slice(0, 1), slice(3, 4)):
            torch.testing.assert_close(
                linear(x[rows], weight), functional.linear(x[rows], weight), atol=1e-4, rtol=1e-5
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(1, 64, dtype=dtype), torch.randn(32, 64, dtype=dtype)
    assert torch.equal(linear(x, weight), functional.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 5])
def test_gradients_are_torchs(rows: int) -> None:
    layer, stock = Linear(64, 32), nn.Linear(64, 32)
    stock.load_state_dict(layer.state_dict())
    grads = []
    for module in (layer, stock):
        x = torch.linspace(-1, 1, rows * 64).view(rows, 64).requires_grad_()
        module(x).square().sum().backward()
        assert x.grad is not None
        grads.append((x.grad, module.weight.grad, module.bias.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


def test_a_models_layers_keep_their_weights() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Own(64, 64), nn.Linear(64, 16, bias=False))
    x = torch.randn(3, 64)
    expected, weights = model(x), [id(p) for p in model.parameters()]
    use_fast_linear(model)
    assert [type(layer) for layer in model] == [Linear, nn.ReLU, Own, Linear]
    assert [id(p) for p in model.parameters()] == weights
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


def test_joined_layers_are_those_apart() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(24, 32), nn.Linear(24, 8, bias=False)
            self.v_proj = nn.Linear(24, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    model, x = Attention(), torch.randn(1, 5, 24, requires_grad=True)
    with torch.no_grad():
        want = model(x)
    parameters = sum(p.numel() for p in model.parameters())
    use_fast_linear(model)
    use_joined_linear(model)
    model.requires_grad_(False)
    weights = [layer.weight for layer in (model.q_proj, model.k_proj, model.v_proj)]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert sum(p.numel() for p in model.parameters()) == parameters
    for _ in range(2):  # nothing is left of the first call
        found = model(x)
        for got, of in zip(found, want, strict=True):
            torch.testing.assert_close(got, of)
    # Gradients of the input alone: those of frozen weights would cost as much again.
    visited, queue = set[str](), [part.grad_fn for part in found]
    while queue:
        node = queue.pop()
        visited.add(type(node).__name__)
        queue += [following for following, _ in node.next_functions if following is not None]
    assert "CatBackward0" not in visited and "AccumulateGrad" in visited
    torch.stack([part.sum() for part in found]).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    # Of many rows each result has memory of its own, which is free when it is.
    rows = torch.randn(1, 100, 24)
    with torch.inference_mode():
        each = model(rows)
    for layer, got in zip((model.q_proj, model.k_proj, model.v_proj), each, strict=True):
        torch.testing.assert_close(got, functional.linear(rows, layer.weight, layer.bias))
        assert got.untyped_storage().nbytes() == got.nbytes


@pytest.mark.parametrize("slow", [False, True])
def test_8_bit_weights_that_nothing_reads_are_not_kept(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("razor_dist.kernels.linear.operations", lambda: None)
    monkeypatch.setattr("razor_dist.kernels.linear._onednn_is_slow", lambda: slow)
    monkeypatch.setattr("razor_dist.kernels.linear.fastest_way", lambda rows: functional.linear)
    model, x = nn.Sequential(nn.Linear(64, 32)), torch.randn(5, 64)
    with torch.inference_mode():
        want = model(x)
        use_int8_linear(model)
        assert isinstance(model[0], Int8Linear)
        assert (model[0]._codes is None, model[0]._packed is None) == (not slow, slow)
        torch.testing.assert_close(model(x), want, atol=0.1, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    inputs=st.integers(2, 200),
    outputs=st.integers(1, 80),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_8_bit_products_are_near_and_no_rows_company_changes_it(
    rows: int, inputs: int, outputs: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    # Rows and outputs of very different sizes, as models have them; one row is nothing.
    x = torch.randn(rows, inputs) * torch.logspace(-4, 4, rows).view(-1, 1)
    x[0] = 0 if rows > 1 else x[0]
    with torch.inference_mode():
        model[0].weight *= torch.logspace(-3, 3, outputs).view(-1, 1)
        want = model.double()(x.double())
        model.float()
        use_int8_linear(model)
        assert isinstance(model[0], Int8Linear)
        got = model(x)
        assert got.dtype == torch.float32 and got.isfinite().all()
        for row in range(rows):
            assert torch.equal(model(x[row : row + 1]), got[row : row + 1])
    # The definition, in float64.
    w, x = model[0].weight.detach(), x
    s_w, s_x = w.abs().amax(1, keepdim=True) / 127, x.abs().amax(1, keepdim=True) / _MOST
    q_w, q_x = (w / s_w).round().double(), (x / s_x.clamp_min(1e-36)).round().double()
    exact = s_x * (q_x @ q_w.T) * s_w.T + (0 if model[0].bias is None else model[0].bias)
    # A number halfway between two integers may be rounded either way.
    most = s_x * s_w.T * (q_x.abs().amax(1, keepdim=True) + q_w.abs().amax(1)) * 2
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=float(most.max()))
    assert ((got - exact).abs() > 1e-5 * exact.abs().amax(1, keepdim=True)).sum() <= 2
    # As large as independent roundings make it, up to four standard deviations.
    variance = (s_x * w.norm(dim=1)).square() + (s_w.T * x.norm(dim=1, keepdim=True)).square()
    assert (got - want).square().sum() <= 16 * variance.sum() / 12 + 1e-12 * want.square().sum()
