"""What `razor_dist.evals.bench_shape` measured: as JSON, and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from razor_dist.config.sizes import tokens
from razor_dist.evals.bench import machine
from razor_dist.evals.ceilings import Ceilings
from razor_dist.evals.markdown import markdown
from razor_dist.evals.timing import Timing

if TYPE_CHECKING:
    from razor_dist.evals.bench_shape import ShapeSettings

HEAD = (
    "tokens",
    "attention",
    "prefill, s",
    "of the matmul ceiling",
    "decode, ms/token",
    "of the bandwidth",
    "peak memory, GB",
    "planned, GB",
    "KV, GB",
)


@dataclass(frozen=True)
class Measured:
    """One engine at one length.

    Attributes
    ----------
    runs : Timing
    kv_bytes : int
        Of keys and values held at most.
    before_bytes, peak_bytes : int
        Memory with the weights loaded and no engine, and at most with it (`peak.Peak`).
    planned_bytes : int
        What the planner says of that peak; on CPU it knows nothing of Python and its libraries.
    operations : int
        Of the prefill, as the planner counts them.
    step_bytes : int
        Weights, keys and values that a decode step reads, as the planner counts them.
    in_graphs : bool
        Whether decode steps were replayed from CUDA graphs.
    """

    runs: Timing
    kv_bytes: int
    before_bytes: int
    peak_bytes: int
    planned_bytes: int
    operations: int
    step_bytes: int
    in_graphs: bool

    def of_matmul(self, ceilings: Ceilings) -> float:
        """Operations per second of the prefill, as a fraction of a matrix product's."""
        return self.operations / self.runs.prefill / ceilings.matmul

    def of_bandwidth(self, ceilings: Ceilings) -> float:
        """Bytes per second that decoding reads, as a fraction of what can be read."""
        return self.step_bytes / self.runs.decode / ceilings.bandwidth

    def as_json(self, ceilings: Ceilings) -> dict[str, Any]:
        """All numbers, with the fractions."""
        numbers = {k: v for k, v in vars(self).items() if k != "runs"}
        fractions = {
            "prefill_of_matmul_ceiling": self.of_matmul(ceilings),
            "decode_of_bandwidth": self.of_bandwidth(ceilings),
        }
        timing = self.runs.as_json()
        return {"heads": timing.pop("name"), **timing, **numbers, **fractions}

    def cells(self, ceilings: Ceilings) -> list[str]:
        """The columns of `HEAD` after the second."""
        return [
            f"{self.runs.prefill:.2f}",
            f"{self.of_matmul(ceilings):.2f}",
            f"{1000 * self.runs.decode:.2f}",
            f"{self.of_bandwidth(ceilings):.2f}",
            f"{self.peak_bytes / 1e9:.2f}",
            f"{self.planned_bytes / 1e9:.2f}",
            f"{self.kv_bytes / 1e9:.3f}",
        ]


@dataclass(frozen=True)
class Length:
    """Razor and full attention at one length.

    Attributes
    ----------
    tokens : int
        Of the prompt.
    engines : mapping
        By ``razor`` and ``full``: what was measured, or why it does not fit.
    """

    tokens: int
    engines: Mapping[str, Measured | str]

    @property
    def ratios(self) -> dict[str, float]:
        """Razor's numbers over full attention's; empty without both."""
        razor, full = self.engines["razor"], self.engines["full"]
        if isinstance(razor, str) or isinstance(full, str):
            return {}
        return {
            "prefill": razor.runs.prefill / full.runs.prefill,
            "decode": razor.runs.decode / full.runs.decode,
            "peak_memory": razor.peak_bytes / full.peak_bytes,
            "kv": razor.kv_bytes / full.kv_bytes,
        }

    def notes(self, device: str) -> list[str]:
        """Sentences for the foot of the table: what does not fit and why, what ran otherwise."""
        said = []
        for name, found in self.engines.items():
            which = f"{tokens(self.tokens)} tokens, {name}"
            if isinstance(found, str):
                said.append(f"{which}: does not fit: {found}")
            elif device == "cuda" and not found.in_graphs:
                said.append(f"{which}: decoded without CUDA graphs")
        return said

    def rows(self, ceilings: Ceilings) -> list[list[str]]:
        """Rows of the table, of as many cells as `HEAD`."""
        rows = []
        for name, found in self.engines.items():
            absent = ["does not fit", *[""] * (len(HEAD) - 3)]
            cells = absent if isinstance(found, str) else found.cells(ceilings)
            rows.append([tokens(self.tokens), name, *cells])
        if ratios := self.ratios:
            prefill, decode, memory, kv = (f"{ratio:.2f}" for ratio in ratios.values())
            ratio = ["razor / full", prefill, "", decode, "", memory, "", kv]
            rows.append([tokens(self.tokens), *ratio])
        return rows


@dataclass(frozen=True)
class ShapeResults:
    """All that was measured.

    Attributes
    ----------
    settings : ShapeSettings
    device : str
        ``cpu`` or ``cuda``.
    dtype : str
        Of weights, keys and values.
    threads, parameters : int
    ceilings : Ceilings
        Of the device, in this dtype and with these threads.
    lengths : list of Length
    """

    settings: ShapeSettings
    device: str
    dtype: str
    threads: int
    parameters: int
    ceilings: Ceilings
    lengths: list[Length]

    def as_json(self) -> dict[str, Any]:
        """Everything, the machine included."""
        return {
            "command": self.settings.command,
            "machine": machine() | {"device": self.device, "threads": self.threads},
            "settings": asdict(self.settings),
            "weights": f"{self.parameters} random parameters, {self.dtype}",
            "prompt": "random token ids",
            "ceilings": {
                "bytes_read_per_second": self.ceilings.bandwidth,
                "matmul_operations_per_second": self.ceilings.matmul,
            },
            "lengths": [
                {
                    "tokens": length.tokens,
                    "engines": {
                        name: {"does_not_fit": found}
                        if isinstance(found, str)
                        else found.as_json(self.ceilings)
                        for name, found in length.engines.items()
                    },
                    "razor_over_full": length.ratios,
                }
                for length in self.lengths
            ],
        }

    def markdown(self) -> str:
        """A page: the command, the machine and its ceilings, the table."""
        settings, place = self.settings, machine()
        on = place["gpu"] if self.device == "cuda" else f"{place['cpu']}, {self.threads} threads"
        about = (
            f"{on}, torch {place['torch']}; {self.parameters:,} random weights in {self.dtype}, "
            f"{settings.kept:.0%} of the KV heads kept, window at most "
            f"{tokens(settings.window_max)}. Ceilings measured in the same run: "
            f"{self.ceilings.bandwidth / 1e9:,.1f} GB/s read, "
            f"{self.ceilings.matmul / 1e12:,.3f} TFLOP/s in a matrix product."
        )
        rows = [row for length in self.lengths for row in length.rows(self.ceilings)]
        parts = [f"`{settings.command}`", about, markdown([HEAD, *rows], "numbers")]
        parts += [note for length in self.lengths for note in length.notes(self.device)]
        return "\n\n".join(parts) + "\n"
