"""Measures operators over dtypes, bits and sizes, each beside a copy and beside the exact operator.

All calls run once in each round, so that they meet the same disturbances. A copy of the same size runs before each:
otherwise a layer that runs twice in a row would find its own data in the caches, not its neighbours'.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from actbench.errors import MeasurementError, first_line
from actbench.measuring.bench import failure_of
from actbench.measuring.kernels.choices import BYTES, OF_BYTES, ONE_WIDTH, Plan
from actbench.measuring.kernels.subjects import SUBJECTS, Call, Place, Subject
from actbench.results.kernels import DeviceName, KernelCase, KernelTimes
from actbench.results.records import Failure

LEAST_ROUNDS = 5
_WARM_UP = 3
_WARM_UP_SHARE = 4
_LARGEST_KEPT = 31 << 20
_ANY_BITS = 3  # for operators that ignore them


def interleaved(calls: Sequence[Call], between: Call, seconds: float, device: torch.device) -> list[tuple[float, ...]]:
    """Return the seconds of each run of each call.

    Args:
        calls: Calls to run in turn; each round reverses the order of the one before.
        between: Runs before each call, and is not timed.
        seconds: New rounds begin until so much time has passed, at least 5; the warm-up takes a quarter of it.
        device: The device that computes; on CUDA, the time is that between two events.
    """
    warm = time.perf_counter() + seconds / _WARM_UP_SHARE
    warmed = 0
    while warmed < _WARM_UP or time.perf_counter() < warm:
        for call in calls:
            call()
        warmed += 1
    timed = _timed_cuda if device.type == "cuda" else _timed
    found: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(found[0]) < LEAST_ROUNDS or time.perf_counter() < end:
        order = range(len(calls)) if len(found[0]) % 2 else reversed(range(len(calls)))
        for place in order:
            between()
            found[place].append(timed(calls[place]))
    return [tuple(runs) for runs in found]


def _timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed_cuda(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def device_named(name: DeviceName) -> torch.device:
    """Return the device of this name; a MeasurementError if it is missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise MeasurementError(
            "--device cuda: torch finds no CUDA device here; 'actbench doctor' says what is missing, and --device cpu "
            "measures the processor"
        )
    return torch.device(name)


def cases(plan: Plan) -> tuple[KernelCase, ...]:
    """Return the cases of a plan, each once; bits apply only to operators with a choice of bits."""
    found = (
        KernelCase(
            operator=operator,
            device=plan.device,
            dtype=dtype,
            bits=bits,
            rows=size.rows,
            columns=size.columns,
            threads=torch.get_num_threads(),
            compiled=plan.compiled,
        )
        for operator in plan.operators
        for size in plan.sizes
        for dtype in (plan.dtypes if operator not in OF_BYTES else BYTES)
        for bits in (plan.bits if operator not in ONE_WIDTH else (None,))
    )
    return tuple(dict.fromkeys(found))


def outcomes(todo: Iterable[KernelCase], seconds: float) -> Iterator[tuple[KernelCase, KernelTimes | Failure]]:
    """Measure each case for so many seconds, and yield its outcome at once."""
    for case in todo:
        if case.device == "cpu":
            settle_heap()
        try:
            outcome: KernelTimes | Failure = measured(case, seconds)
        except Exception as error:  # a kernel that cannot be compiled is a row too
            outcome = failure_of(error)
            if outcome.reason == "out-of-memory":
                why = f"{case.size} does not fit in the memory of {case.device}; give a smaller --size"
                outcome = outcome.model_copy(update={"message": why})
        yield case, outcome
        gc.collect()


def settle_heap() -> None:
    """Bring the heap of the C library into the state of a process that has trained for a while.

    The C library maps each tensor larger than any freed before, and a mapping costs page faults: 3 ms for 6 MiB, more
    than a layer takes. A freed tensor of up to 32 MiB raises this limit (``DEFAULT_MMAP_THRESHOLD_MAX``).
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)  # freed at once


def measured(case: KernelCase, seconds: float) -> KernelTimes:
    """Measure one case; a KernelError if a kernel cannot be compiled or launched."""
    bits = _ANY_BITS if case.bits is None else case.bits
    place = Place(case.rows, case.columns, getattr(torch, case.dtype), torch.device(case.device), bits)
    subject = SUBJECTS[case.operator](place)
    source, target, other, another = torch.zeros(4, place.rows, place.columns, dtype=place.dtype, device=place.device)
    compiled, note = _compiled(subject) if case.compiled else (None, None)
    calls = {"ours": subject.call, "copy": lambda: target.copy_(source)}
    calls |= {"exact": subject.exact_call} if subject.exact_call else {}
    calls |= {"compiled": compiled} if compiled else {}
    runs = interleaved(list(calls.values()), lambda: another.copy_(other), seconds, place.device)
    found = dict(zip(calls, runs, strict=True))
    return KernelTimes(
        bits=subject.bits,
        moved_bytes=subject.moved_bytes,
        floor_bytes=subject.floor_bytes,
        copied_bytes=2 * place.bytes,
        seconds=found["ours"],
        copy_seconds=found["copy"],
        exact=subject.exact,
        exact_seconds=found.get("exact"),
        compiled_seconds=found.get("compiled"),
        note=note,
    )


def _compiled(subject: Subject) -> tuple[Call | None, str | None]:
    """Return the exact layer's step under torch.compile, after one run, or the reason why it fails."""
    if subject.compilable is None:
        return None, None
    layer, step = subject.compilable
    call = step(torch.compile(layer))
    try:
        call()
    except Exception as error:  # a compiler may raise anything on a machine where it does not work
        reason = first_line(error)[:200]
        return None, f"torch.compile does not work here, so its columns are empty: {reason}"
    return call, None
