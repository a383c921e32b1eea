"""Measures the speed of this machine, for the cost model of simulated steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from actbench.errors import ActbenchError, MeasurementError, is_out_of_memory, told
from actbench.machine import machine, now, provenance
from actbench.simulator.profiles import DeviceTable
from actbench.tools.calibrate.device import DeviceName, device_named, settle_heap
from actbench.tools.calibrate.host import host_of
from actbench.tools.calibrate.profile import Key, by_kind, found_in, peaks, profile_of
from actbench.tools.calibrate.records import CalibrationReport
from actbench.tools.calibrate.stopwatch import Clock, Sample, Stopwatch
from actbench.tools.calibrate.subjects import Subject, single, specs_of_schemes, steps

_LONGEST_CALL = 0.6
"""Seconds: a subject whose call takes longer is not run at larger sizes."""
_SPENT = 0.12
"""Seconds of timed calls of one size."""
_MOST_CALLS = 12
_LEAST_CALLS = 3


@dataclass(frozen=True)
class Calibrated:
    """A device profile of this machine, and the report behind it."""

    profile: DeviceTable
    report: CalibrationReport


@dataclass
class _Bench:
    """Runs subjects and collects the times of their operators."""

    device: torch.device
    clock: Clock
    end: float
    progress: Callable[[str], None]
    samples: list[Sample] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    known: set[Key] = field(default_factory=set)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.end

    def run(self, subject: Subject, most_sizes: int | None, *, of_scheme: bool = False) -> bool:
        """Run a subject at its sizes; the subject of a scheme stops at a size without a new operator.

        A scheme that fails, because a device lacks an operator or a kernel cannot be compiled, is noted.

        Returns:
            Whether the subject ran at least once, or time ran out.
        """
        self.progress(subject.name)
        for place, size in enumerate(subject.sizes[:most_sizes]):
            if self.is_late:
                self.left_out.append(subject.name)
                return True
            before = len(self.known)
            try:
                samples, seconds = self._timed(subject.make(size))
            except Exception as error:
                if not isinstance(error, ActbenchError) and not is_out_of_memory(error):
                    if not of_scheme:
                        raise
                    self.failed.append(f"{subject.name}: {told(error)}")
                return place > 0  # the scheme finds nothing in the model, or the size does not fit in memory
            self.samples += samples
            self.known.update((sample.work.label, sample.work.precision) for sample in samples)
            if seconds > _LONGEST_CALL or (of_scheme and len(self.known) == before):
                break
        return True

    def run_all(self, specs: Sequence[str], most_sizes: int | None) -> None:
        """Run every subject, the most important first."""
        halves = list(single(self.device, torch.bfloat16))
        on_cuda = self.device.type == "cuda"  # a processor may take minutes for them
        for subject in (*single(self.device, torch.float32), *(halves if on_cuda else ())):
            self.run(subject, most_sizes)
        for spec in dict.fromkeys(("exact", *specs)):
            encoder, network, decoder = steps(self.device, spec)
            is_exact = spec == "exact"
            found = self.run(encoder, most_sizes, of_scheme=not is_exact)
            self.run(network, most_sizes, of_scheme=not is_exact)
            if is_exact or not found:
                self.run(decoder, most_sizes, of_scheme=not is_exact)
        for subject in () if on_cuda else halves:
            self.run(subject, most_sizes)

    def _timed(self, call: Callable[[], object]) -> tuple[list[Sample], float]:
        """Return the operators of some calls, after one to warm up, and the seconds of a call."""
        call()
        watch = Stopwatch(self.device, self.clock)
        found: list[Sample] = []
        begin, calls, spent = time.monotonic(), 0, 0.0
        while calls < 1 or (spent < _SPENT and calls < _MOST_CALLS) or (spent < _LONGEST_CALL and calls < _LEAST_CALLS):
            with watch:
                call()
            if watch.is_late:
                continue
            found += watch.samples
            calls, spent = calls + 1, time.monotonic() - begin
        gc.collect()
        return found, spent / calls


def calibrate(
    device: DeviceName = "cpu",
    *,
    schemes: Sequence[str] | None = None,
    most_sizes: int | None = None,
    budget_seconds: float = 100.0,
    clock: Clock = time.perf_counter,
    command: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Calibrated:
    """Measure the operators of this machine and return its device profile.

    Args:
        device: The device to measure.
        schemes: The schemes whose operators are measured in steps of small models; None for every scheme.
        most_sizes: How many sizes of each operator, from the smallest; None for all.
        budget_seconds: Time after which nothing new begins; notes of the report say what is left out.
        clock: Seconds of a processor: wall time, or time of this process if other programs also run.
        command: The command line of the user.
        progress: Receives the name of what is measured next.

    Raises:
        MeasurementError: The device is missing, or the time was too short to find its rates and the host's times.
    """
    where = device_named(device)
    if device == "cpu":
        settle_heap()
    begin = time.monotonic()
    bench = _Bench(where, clock, begin + budget_seconds, progress)
    bench.run_all(specs_of_schemes() if schemes is None else schemes, most_sizes)
    found = found_in(bench.samples)
    if missing := [name for name in ("mm", "copy_") if (name, "fp32") not in found]:
        raise MeasurementError(
            f"the rates of this machine are unknown: {', '.join(missing)} was not measured in {budget_seconds:g} s; "
            "give a larger --budget"
        )
    progress("the host")
    host = host_of(where, found, clock, bench.left_out, bench.failed)
    flops, copied = peaks(found), max(found["copy_", "fp32"].rates)
    to_host = found.get(("to_host", "fp32"))
    facts = machine()
    launch = median(each.points[0][2] for each in found.values() if each.kind == "elementwise")
    report = CalibrationReport(
        device=torch.cuda.get_device_name(where) if device == "cuda" else facts.processor,
        threads=torch.get_num_threads(),
        flops_per_second={**flops},
        bandwidth=copied,
        # a copy counts bytes twice, as read and as written
        link=(max(to_host.rates) if to_host else copied) / 2,
        launch_seconds=launch,
        host=host,
        kinds=by_kind(found, flops, copied, launch if device == "cuda" else 0.0),
        timed=len(bench.samples),
        seconds=time.monotonic() - begin,
        notes=_notes(bench),
        recorded_at=now(),
        **provenance(command),
    )
    return Calibrated(profile_of(report, found, where), report)


def _notes(bench: _Bench) -> tuple[str, ...]:
    left_out, failed = ", ".join(bench.left_out), "; ".join(bench.failed)
    notes = [f"The time ended before these were measured at every size: {left_out}."] if left_out else []
    return (*notes, f"Not measured, because they failed: {failed}.") if failed else tuple(notes)
