"""The cores and the memory that a process may use, and how its threads wait."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.config.cores import set_library_defaults, usable_cores
from razor_dist.config.memory import free_bytes
from razor_dist.engine.decode_threads import DecodeThreads

SEEN = len(os.sched_getaffinity(0))


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("quota", "cores"), [("50000 100000", 1), ("100000 100000", 1), ("150000 100000", 2)]
)
def test_a_quota_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    membership = tmp_path / "cgroup"
    membership.write_text("0::/user/app\n")
    write(tmp_path / "two" / "user" / "app", cpu__max="max 100000\n")
    write(tmp_path / "two" / "user", cpu__max=f"{quota}\n")  # the parent's counts too
    assert usable_cores(tmp_path / "two", membership) == cores

    # Version 1, in a container that sees its own cgroup as the root.
    membership.write_text("3:cpuset:/x\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    quota_us, period_us = quota.split()
    root = tmp_path / "one" / "cpu,cpuacct"
    write(root, **{"cpu.cfs_quota_us": quota_us, "cpu.cfs_period_us": period_us})
    assert usable_cores(tmp_path / "one", membership) == cores


def test_without_a_quota_the_processors_count(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert usable_cores(tmp_path, membership) == SEEN  # no such file
    membership.write_text("1:cpu:/app\n0::/app\n")
    write(tmp_path / "cpu" / "app", **{"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"})
    write(tmp_path / "app", cpu__max="unreadable")
    assert usable_cores(tmp_path, membership) == SEEN


def test_limits_of_memory_bound_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    membership = tmp_path / "cgroup"
    assert free_bytes(tmp_path, membership) == 5000  # no such file
    membership.write_text("0::/user/app\n")
    of = {"memory__current": "700\n", "memory__stat": "file 300\ninactive_file 200\n"}
    write(tmp_path / "two" / "user" / "app", memory__max="max\n", **of)
    assert free_bytes(tmp_path / "two", membership) == 5000
    write(tmp_path / "two" / "user", memory__max="1000\n", **of)
    assert free_bytes(tmp_path / "two", membership) == 1000 - 700 + 200
    # Version 1, whose folder has two numbers of files.
    membership.write_text("5:cpu:/x\n4:memory:/docker/abc\n")
    stat = "inactive_file 1\ntotal_inactive_file 200\n"
    files = {"memory.usage_in_bytes": "700", "memory.stat": stat}
    write(tmp_path / "one" / "memory", **files, **{"memory.limit_in_bytes": "800"})
    assert free_bytes(tmp_path / "one", membership) == 800 - 700 + 200


OWN = [
    {"OMP_WAIT_POLICY": "ACTIVE"},
    {"GOMP_SPINCOUNT": "7"},
    {"LRU_CACHE_CAPACITY": "9"},
    {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"},
]


@pytest.mark.parametrize("own", OWN)
def test_the_users_own_settings_of_libraries_are_kept(own: dict[str, str]) -> None:
    env = dict(own)
    set_library_defaults(env)
    assert env.items() >= own.items()
    assert ("GOMP_SPINCOUNT" in env) == ("OMP_WAIT_POLICY" not in own)


@pytest.mark.long
def test_products_of_any_number_of_rows_take_little_memory() -> None:
    """After 1,200 numbers of rows, which took 500 MB, since oneDNN kept a product for each."""
    code = """
from razor_dist.cli import main
main(["--version"])
import psutil, torch
weight, process = torch.ones(96, 96), psutil.Process()
before = process.memory_full_info().uss
for rows in range(300, 1500):
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 96), weight, None, "none", [], "")
print("grown", process.memory_full_info().uss - before)
"""
    caches = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}
    env = {name: value for name, value in os.environ.items() if name not in caches}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("grown")[1]) < 250e6


@pytest.mark.long
def test_threads_of_ranks_wait_briefly() -> None:
    """OpenMP has read the setting by the time torch is loaded by the command line."""
    code = (
        "import sys; from razor_dist.cli import main; main(['--version']); import torch; "
        "print([m for m in open('/proc/self/maps') if 'gomp' in m][0].split()[-1])"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    env["OMP_DISPLAY_ENV"] = "verbose"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "GOMP_SPINCOUNT = '5000'" in done.stderr


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counted by Linux")
def test_threads_that_share_a_core_wait_for_it() -> None:
    code = (
        "import os, sys\n"
        "from razor_dist.engine.decode_threads import seconds_waited\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "child = os.fork()\n"
        "while not child: pass\n"
        "before = max(seconds_waited().values())\n"
        "while max(seconds_waited().values()) < before + 0.05: pass\n"
        "os.kill(child, 9)\n"
        "print('waited')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "waited\n", done.stderr


WARNING = "threads wait for cores, which other programs or a CPU quota take: requests take longer"


class Machine:
    """A simulated machine: seconds of a decode step by number of threads, and waiting."""

    def __init__(self, threads: int = 2, *, crowded: bool = False, chooses: bool = True) -> None:
        self.now = self.waited = 0.0
        self.in_use = self.every = threads
        self.quiet()
        self.threads = DecodeThreads(
            threads,
            chooses=chooses,
            crowded=crowded,
            clock=lambda: self.now,
            waited=lambda: {"idle": 0.0, "one": self.waited},
            use=self.use,
        )

    def use(self, count: int) -> None:
        assert count != self.in_use  # OpenMP ends and starts threads at each call
        self.in_use = count

    def quiet(self) -> None:
        self.seconds, self.waits = (lambda n: 0.04 / n**0.5), 0.0

    def busy(self, seconds: dict[int, float]) -> None:
        self.seconds, self.waits = seconds.__getitem__, 0.25

    def run(self, steps: int, decoded: int = 1) -> list[int]:
        """Return the number of threads of each step."""
        counts = []
        for _ in range(steps):
            with self.threads.step(decoded):
                counts.append(self.in_use)
                self.now += self.seconds(self.in_use)
                # One thread alone finds a core.
                self.waited += self.waits * self.seconds(self.in_use) * (self.in_use > 1)
        return counts


def test_on_a_quiet_machine_all_threads_compute() -> None:
    machine = Machine()
    assert set(machine.run(2000)) == {2}
    assert machine.threads.slowdown == 1.0


@pytest.mark.parametrize(
    ("waits", "crowded", "slowdown"), [(0.25, False, 4 / 3), (1.0, False, 8), (0.25, True, 1)]
)
def test_waiting_for_cores_is_told_as_a_slowdown(
    waits: float, crowded: bool, slowdown: float
) -> None:
    machine = Machine(crowded=crowded)
    machine.busy({2: 0.10, 1: 1.0})
    machine.waits = waits
    machine.run(20, decoded=0)
    assert machine.threads.slowdown == pytest.approx(slowdown)
    machine.quiet()
    machine.run(40, decoded=0)  # two looks
    assert machine.threads.slowdown == 1.0


def test_beside_others_the_fastest_number_of_threads_computes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine()
    machine.busy({2: 0.10, 1: 0.03})
    machine.run(100)
    counts = machine.run(1000)
    assert counts.count(2) == 7 * 2  # compared again every 15 s
    fewer = "; tokens are computed by 1 of 2 threads, which is faster"
    assert [record.message for record in caplog.records] == [WARNING + fewer]
    assert machine.run(1, decoded=0) == [2]  # a chunk of a prompt has all threads
    assert machine.run(1) == [1]
    machine.threads.use_all()
    assert machine.in_use == 2
    machine.quiet()
    machine.run(600)  # 24 s with one thread
    assert set(machine.run(2000)) == {2}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({16: 0.10, 15: 0.053, 12: 0.066, 8: 0.1, 1: 0.8}, 15),
        ({16: 0.10, 15: 0.10, 12: 0.066, 8: 0.1, 1: 0.8}, 12),
        ({16: 0.05, 15: 0.049, 12: 0.055, 8: 0.06, 1: 0.3}, 16),
        ({16: 0.20, 15: 0.15, 12: 0.10, 8: 0.05, 1: 0.03}, 1),
    ],
)
def test_the_fastest_of_many_threads_is_found(seconds: dict[int, float], best: int) -> None:
    machine = Machine(16)
    machine.busy(seconds)
    machine.run(1000)
    counts = machine.run(1000)
    assert counts.count(best) >= 0.8 * len(counts)


@settings(max_examples=50, deadline=None)
@given(chance=st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0]), seed=st.integers(0, 2**32))
def test_looking_for_a_faster_number_costs_little(chance: float, seed: int) -> None:
    """All threads are the fastest, and the batch changes with some probability at each step."""
    machine, random = Machine(16), Random(seed)
    machine.busy({16: 0.05, 15: 0.053, 12: 0.065, 8: 0.08, 1: 0.4})
    machine.run(400)
    began, decoded, steps = machine.now, 1, 4000
    for _ in range(steps):
        if random.random() < chance:
            decoded = random.randint(1, 8)
        machine.run(1, decoded)
    assert machine.now - began <= 1.03 * steps * 0.05


def test_a_short_burst_of_others_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.busy({2: 0.1, 1: 0.1})
    machine.run(15)
    machine.quiet()
    machine.run(1000)
    assert not caplog.records


def test_ranks_that_wait_for_each_other_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(4, crowded=True, chooses=False)
    machine.busy({4: 0.1, 3: 0.01, 2: 0.01, 1: 0.01})
    assert set(machine.run(1000)) == {4}
    assert not caplog.records


def test_steps_of_different_batches_are_not_compared() -> None:
    machine = Machine()
    machine.busy({2: 0.05, 1: 0.06})
    while 1 not in machine.run(1):  # until a comparison has begun
        pass
    for decoded in (2, 3) * 20:
        assert machine.run(1, decoded) == [2]  # begun anew each time
    assert machine.run(14, decoded=4) == [2, 1] * 7
    assert set(machine.run(100, decoded=4)) == {2}
