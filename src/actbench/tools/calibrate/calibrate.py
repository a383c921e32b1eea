"""Measures the speed of this machine, for the cost model of simulated steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.errors import MeasurementError, is_out_of_memory, told
from actbench.machine import machine, memory_bytes, now, versions
from actbench.measuring.meters.cudameter import check_cuda
from actbench.simulator.cost.work import OperatorWork, idle, idle_work, work_of
from actbench.simulator.profiles import DeviceTable
from actbench.tools.calibrate.profile import Sample, found_in, profile_of
from actbench.tools.calibrate.subjects import PACKING, step_of, subjects
from actbench.units import GIB

Clock = Callable[[], float]
DeviceName = Literal["cpu", "cuda"]

_SECONDS, _LEAST_CALLS, _MOST_CALLS = 0.05, 2, 10
"""Time for the calls of an operator of one size, and their number."""
_LONGEST_SUBJECT = 5.0
"""Seconds after which a subject is not run at larger sizes."""
_LEAST_SECONDS = 2e-7
_AHEAD_CYCLES, _MOST_CYCLES = 2_000_000, 2_000_000_000
_CACHE_BYTES = 2**26
"""More than the caches of most processors."""
_LARGEST_KEPT = 31 << 20

_ROUNDS, _VIEWS = 5, 2000
_LISTED_SECONDS = 4e-7
"""Of the host for each tensor of a list: too short to measure beside the rest."""


class Operators(TorchDispatchMode):
    """Lists what each operator that runs inside does, and times it if ``seconds_of`` is given.

    Attributes:
        works: The operators in their order; those that move no bytes have no kind.
        samples: Their times.
    """

    def __init__(self, seconds_of: Callable[..., float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seconds_of = seconds_of
        self.works: list[OperatorWork] = []
        self.samples: list[Sample] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        result = call()
        work = idle_work(func) if idle(func) else work_of(func, args, kwargs or {}, result)
        self.works += [work] if work else []
        if self._seconds_of and work and work.kind:
            self.samples.append(Sample(work, self._seconds_of(call, is_backward="backward" in work.name)))
        return result


def seconds_of(
    call: Callable[[], object], clock: Clock, *, is_cuda: bool, is_backward: bool = False, is_step: bool = False
) -> float:
    """Return the median seconds of a call that has run before.

    Args:
        call: Runs one operator.
        clock: Seconds of a processor; on CUDA, the time is that between two events.
        is_cuda: Where it runs.
        is_backward: Whether it is of a backward pass: outside the step of a small model, the caches of the processor
            are emptied then, since the arguments were made long ago.
        is_step: Whether it is of such a step.
    """
    taken: list[float] = []
    end = time.monotonic() + _SECONDS
    while len(taken) < _LEAST_CALLS or (len(taken) < _MOST_CALLS and time.monotonic() < end):
        if is_backward and not (is_step or is_cuda):
            torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
        taken.append(_seconds_on_cuda(call) if is_cuda else _seconds(call, clock))
    return max(median(taken), _LEAST_SECONDS)


def _seconds(call: Callable[[], object], clock: Clock) -> float:
    begin = clock()
    call()
    return clock() - begin


def _seconds_on_cuda(call: Callable[[], object]) -> float:
    """Return the seconds between two events; the device waits first, so that the host runs ahead of it."""
    cycles = _AHEAD_CYCLES
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        # where the wait has ended already, the time is that of the host
        is_late = begin.query() and cycles < _MOST_CYCLES  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        if not is_late:
            return float(begin.elapsed_time(end)) / 1000
        cycles = min(4 * cycles, _MOST_CYCLES)


def settle_heap() -> None:
    """Bring the heap of the C library into the state of a process that has trained for a while.

    The C library maps each tensor larger than any freed before, and a mapping costs page faults: 3 ms for 6 MiB, more
    than a layer takes. A freed tensor of up to 32 MiB raises this limit (``DEFAULT_MMAP_THRESHOLD_MAX``).
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)  # freed at once


def calibrate(
    device: DeviceName = "cpu",
    *,
    schemes: Sequence[str] = PACKING,
    most_sizes: int | None = None,
    budget_seconds: float = 100.0,
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[DeviceTable, tuple[str, ...]]:
    """Measure the operators of this machine.

    Args:
        device: The device to measure.
        schemes: Schemes whose operators are measured in steps of a small model.
        most_sizes: How many sizes of each operator, from the smallest; None for all.
        budget_seconds: Time after which nothing new begins.
        clock: Seconds of a processor: wall time, or time of this process if other programs also run.
        progress: Receives the name of what is measured next.

    Returns:
        The device profile, and notes on what was not measured.

    Raises:
        MeasurementError: The device is missing, or the time was too short to find its rates.
    """
    where, is_cuda, end = torch.device(device), device == "cuda", time.monotonic() + budget_seconds
    if is_cuda:
        check_cuda("--device", "cpu")
    settle_heap()
    samples: list[Sample] = []
    left_out: list[str] = []
    for subject in subjects(where, schemes):
        progress(subject.name)
        for size in subject.sizes[:most_sizes]:
            begin = time.monotonic()
            if begin > end:
                left_out.append(f"{subject.name} (the time ended)")
                break
            try:
                with Operators(partial(seconds_of, clock=clock, is_cuda=is_cuda, is_step=subject.is_step)) as operators:
                    subject.run(*size)
            except Exception as error:
                if not subject.is_step and not is_out_of_memory(error):
                    raise
                left_out.append(f"{subject.name} ({told(error)})")
                break
            samples += operators.samples
            if time.monotonic() - begin > _LONGEST_SUBJECT:
                break
    found = found_in(samples)
    missing = [name for name in ("mm", "copy_", "to_host", "add") if (name, "fp32") not in found]
    if missing:
        raise MeasurementError(
            f"the rates of this machine are unknown: {', '.join(missing)} was not measured in {budget_seconds:g} s; "
            "give a larger --budget"
        )
    progress("the host")
    host = host_seconds(where, schemes, clock, 0.0 if is_cuda else found["add", "fp32"].points[0][2])
    here, card = machine(), torch.cuda.get_device_properties(where) if is_cuda else None
    profile = profile_of(
        found,
        host,
        gib=round((card.total_memory if card else memory_bytes()) / GIB, 3),
        compute_capability=(card.major, card.minor) if card else None,
        processors=card.multi_processor_count if card else None,
        source=f"actbench calibrate: {card.name if card else here.processor}, {torch.get_num_threads()} threads of "
        f"{here.name}, {here.system}, actbench {versions().actbench}, torch {versions().torch}, "
        f"Python {versions().python}, {now()}",
    )
    return profile, (f"Not measured at every size: {'; '.join(left_out)}.",) if left_out else ()


def host_seconds(device: torch.device, schemes: Sequence[str], clock: Clock, launch: float) -> dict[str, float]:
    """Return the seconds of the host for an operator, from steps in which each takes ``launch`` seconds on the CPU."""
    x = torch.zeros(4, 4, requires_grad=True)
    view = _seconds(lambda: [x.view(16) for _ in range(_VIEWS)], clock) / _VIEWS
    each: dict[str, list[float]] = defaultdict(list)
    for spec in ("exact", *schemes):
        try:
            phases = _phases(device, spec, clock)
        except Exception:
            if spec == "exact":
                raise
            continue  # a note says already that its operators were not measured
        for name, (seconds, kinds) in phases.items():
            views, packed = kinds.count(None), kinds.count("packing")
            plain = len(kinds) - views - packed
            left = seconds - view * views - launch * (plain + packed)
            if spec == "exact":
                each[name].append(left / plain)
            elif packed:
                each["packing"].append((left - each[name][0] * plain) / packed)
    host = {name: max(median(seconds), _LEAST_SECONDS) for name, seconds in each.items()}
    return {"packing": host["forward"], **host, "view": view, "listed": _LISTED_SECONDS}


def _phases(device: torch.device, spec: str, clock: Clock) -> dict[str, tuple[float, list[str | None]]]:
    """Return the seconds of each phase of a small step, and the kinds of its operators."""
    step, loss = step_of(device, spec, 1), list[torch.Tensor]()
    phases: dict[str, Callable[[], object]] = {
        "forward": lambda: loss.append(step.forward()),
        "backward": lambda: step.backward(loss.pop()),
        "optimizer": step.update,
    }
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):
        for name, run in phases.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken[name].append(_seconds(run, clock))
    found = {}
    for name, run in phases.items():
        with Operators() as operators:
            run()
        found[name] = (median(taken[name]), [work.kind for work in operators.works])
    return found
