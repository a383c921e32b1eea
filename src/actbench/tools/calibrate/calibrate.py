"""Measures the speed of this machine, for the cost model of simulated steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.benchmark import Timer

from actbench.errors import ActbenchError, MeasurementError, is_out_of_memory, told
from actbench.machine import machine, memory_bytes, now, versions
from actbench.ops import hostmemory
from actbench.scheme.setup import TrainStep
from actbench.simulator.profiles import DeviceTable
from actbench.tools.calibrate.host import host_of
from actbench.tools.calibrate.profile import Found, Key, found_in, peaks, rounded, shares
from actbench.tools.calibrate.stopwatch import Clock, Sample, Stopwatch, settle_heap
from actbench.tools.calibrate.subjects import SMALL, Subject, of_halves, of_models, specs_of_schemes, stepping
from actbench.units import GIB

_LONGEST_STEP = 0.6
"""Seconds: a model whose step takes longer is not run at larger sizes."""
_SPENT = 0.12
"""Seconds of timed steps of one size."""
_MOST_STEPS = 12
_LEAST_STEPS = 3
_COPIED, _SENT = 2**26, 2**24
"""Bytes of a copy that no cache holds, and of one to memory that the C library keeps, as in steps."""
_PACKING = ("fewbit:3", "actnn:L2", "gact:L1", "randomized:0.2")
"""Schemes by whose steps the host's time for packing is found."""
_GIGA, _MICRO = 1e9, 1e-6


class Calibrated(NamedTuple):
    """A device profile of this machine, the name of the device, and what was not measured, with the reason."""

    profile: DeviceTable
    device: str
    notes: tuple[str, ...]


@dataclass
class _Bench:
    """Runs training steps and collects the times of their operators."""

    device: torch.device
    clock: Clock
    end: float
    progress: Callable[[str], None]
    samples: list[Sample] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    known: set[Key] = field(default_factory=set)

    def run(self, subject: Subject, most_sizes: int | None, *, of_scheme: bool = False) -> bool:
        """Run a subject at its sizes; the subject of a scheme stops at a size without a new operator.

        A scheme that fails, because a device lacks an operator or a kernel cannot be compiled, is noted.

        Returns:
            Whether the subject ran at least once, or time ran out.
        """
        self.progress(subject.name)
        for place, size in enumerate(subject.sizes[:most_sizes]):
            if time.monotonic() > self.end:
                self.left_out.append(subject.name)
                return True
            before = len(self.known)
            try:
                samples, seconds = self._timed(subject.step(size))
            except Exception as error:
                if not isinstance(error, ActbenchError) and not is_out_of_memory(error):
                    if not of_scheme:
                        raise
                    self.failed.append(f"{subject.name}: {told(error)}")
                return place > 0  # the scheme finds nothing in the model, or the size does not fit in memory
            self.samples += samples
            self.known.update((sample.work.label, sample.work.precision) for sample in samples)
            if seconds > _LONGEST_STEP or (of_scheme and len(self.known) == before):
                break
        return True

    def run_all(self, specs: Sequence[str], most_sizes: int | None) -> None:
        """Run every subject, the most important first."""
        on_cuda = self.device.type == "cuda"
        for subject in chain(of_models(self.device), of_halves(self.device) if on_cuda else ()):
            self.run(subject, most_sizes)
        for spec in specs:
            encoder, network, decoder = (stepping(self.device, model, spec) for model in SMALL)
            found = self.run(encoder, most_sizes, of_scheme=True)
            self.run(network, most_sizes, of_scheme=True)
            if not found:
                self.run(decoder, most_sizes, of_scheme=True)
        for subject in () if on_cuda else of_halves(self.device):
            self.run(subject, most_sizes, of_scheme=True)

    def _timed(self, step: TrainStep) -> tuple[list[Sample], float]:
        """Return the operators of some steps, after one to warm up, and the seconds of a step."""
        step()
        watch = Stopwatch(self.device, self.clock)
        found: list[Sample] = []
        begin, steps, spent = time.monotonic(), 0, 0.0
        while steps < 1 or (spent < _SPENT and steps < _MOST_STEPS) or (spent < _LONGEST_STEP and steps < _LEAST_STEPS):
            with watch:
                step()
            if watch.is_late:
                continue
            found += watch.samples
            steps, spent = steps + 1, time.monotonic() - begin
        gc.collect()
        return found, spent / steps


def calibrate(
    device: Literal["cpu", "cuda"] = "cpu",
    *,
    schemes: Sequence[str] | None = None,
    most_sizes: int | None = None,
    budget_seconds: float = 100.0,
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibrated:
    """Measure the operators of this machine and return its device profile.

    Args:
        device: The device to measure.
        schemes: The schemes whose operators are measured in steps of small models; None for every scheme.
        most_sizes: How many sizes of each model's batch, from the smallest; None for all.
        budget_seconds: Time after which nothing new begins; notes say what is left out.
        clock: Seconds of a processor: wall time, or time of this process if other programs also run.
        progress: Receives the name of what is measured next.

    Raises:
        MeasurementError: The device is missing, or the time was too short to find its rates.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise MeasurementError(
            "--device cuda: torch finds no CUDA device here; 'actbench doctor' says what is missing, and --device cpu "
            "measures the processor"
        )
    where = torch.device(device)
    if device == "cpu":
        settle_heap()
    bench = _Bench(where, clock, time.monotonic() + budget_seconds, progress)
    specs = specs_of_schemes() if schemes is None else schemes
    bench.run_all(specs, most_sizes)
    found = found_in(bench.samples)
    if "fp32" not in peaks(found):
        raise MeasurementError(
            f"the rates of this machine are unknown: no matrix product was measured in {budget_seconds:g} s; give a "
            "larger --budget"
        )
    progress("the host")
    host = host_of(where, _PACKING if specs else (), clock, bench.failed)
    name = torch.cuda.get_device_name(where) if device == "cuda" else machine().processor
    return Calibrated(_profile(name, where, found, host, clock), name, _notes(bench))


def _profile(
    name: str, device: torch.device, found: dict[Key, Found], host: dict[str, float], clock: Clock
) -> DeviceTable:
    """Return the device profile of measured operators, of what the host takes, and of copies that run here."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    flops, (bandwidth, link) = peaks(found), _copying(device, clock)
    launch = median(each.points[0][-1] for each in found.values() if each.kind == "elementwise")
    operators: dict[str, dict[str, Any]] = {}
    for (label, precision), each in found.items():
        operators.setdefault(label, {})[precision] = each.points
    facts, installed = machine(), versions()
    return DeviceTable.model_validate(
        {
            "gib": rounded((properties.total_memory if properties else memory_bytes()) / GIB, 6),
            "compute_capability": (properties.major, properties.minor) if properties else None,
            "processors": properties.multi_processor_count if properties else None,
            **flops,
            "bandwidth": bandwidth,
            "link": link,
            "launch": launch,
            "source": f"actbench calibrate: {name}, {torch.get_num_threads()} threads of {facts.name}, {facts.system}, "
            f"actbench {installed.actbench}, torch {installed.torch}, Python {installed.python}, {now()}",
            "host": {**{part: rounded(seconds / _MICRO) for part, seconds in host.items()}, "bandwidth": bandwidth},
            "efficiencies": shares(found, flops, bandwidth, launch, on_cuda=properties is not None),
            "operators": operators,
        }
    )


def _copying(device: torch.device, clock: Clock) -> tuple[float, float]:
    """Return the GB/s that a copy reads and writes, and those that come to host memory."""
    source = torch.ones(_COPIED // 4, device=device)
    some = source[: _SENT // 4]
    names = {"source": source, "target": torch.ones_like(source), "some": some, "to_host": hostmemory.to_host}
    timing: dict[str, Any] = {} if device.type == "cuda" else {"timer": clock}  # torch's own waits for the device
    copies = {"target.copy_(source)": 2 * _COPIED, "to_host(some)": _SENT}
    threads = torch.get_num_threads()
    within, across = (
        rounded(moved / Timer(line, globals=names, num_threads=threads, **timing).blocked_autorange().median / _GIGA)
        for line, moved in copies.items()
    )
    return within, across


def _notes(bench: _Bench) -> tuple[str, ...]:
    left_out, failed = ", ".join(bench.left_out), "; ".join(bench.failed)
    notes = [f"The time ended before these were measured at every size: {left_out}."] if left_out else []
    return (*notes, f"Not measured, because they failed: {failed}.") if failed else tuple(notes)
