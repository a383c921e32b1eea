"""Measuring operators over types, bits and sizes, each beside a copy and beside the exact operator.

All calls run once in each round, so that they meet the same disturbances. A copy of the same size runs before each: run
twice in a row, a layer would find its own data in the caches, not its neighbours'.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from actbench.errors import MeasurementError, is_out_of_memory
from actbench.measuring.kernels.choices import BYTES, OF_BYTES, ONE_WIDTH, Plan, Size
from actbench.measuring.kernels.subjects import SUBJECTS, Call, Place, Subject
from actbench.results.kernels import DeviceName, ElementType, KernelReport, KernelResult
from actbench.results.machine import machine, now, provenance

LEAST_ROUNDS = 5
_WARM_UP = 3
_WARM_UP_SHARE = 4


def interleaved(calls: Sequence[Call], between: Call, seconds: float, device: torch.device) -> list[tuple[float, ...]]:
    """Return the seconds of each run of each call.

    Args:
        calls: Run in turn, each round in the opposite order of the one before.
        between: Run before each of them, and not timed.
        seconds: Rounds are begun until so much time has passed, and at least 5, after a quarter of it to warm up.
        device: What computes; on CUDA, the time is that between two events.
    """
    warm = time.perf_counter() + seconds / _WARM_UP_SHARE
    for _ in range(_WARM_UP):
        _each_once(calls)
    while time.perf_counter() < warm:
        _each_once(calls)
    timed = _timed_cuda if device.type == "cuda" else _timed
    found: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(found[0]) < LEAST_ROUNDS or time.perf_counter() < end:
        order = range(len(calls)) if len(found[0]) % 2 else reversed(range(len(calls)))
        for place in order:
            between()
            found[place].append(timed(calls[place]))
    return [tuple(runs) for runs in found]


def _each_once(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


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


_LARGEST_KEPT = 31 << 20


def run(plan: Plan, command: str, progress: Callable[[str], None] = lambda text: None) -> KernelReport:
    """Measure every point of a plan; ``progress`` is told what is next.

    Raises:
        MeasurementError: The device is not there, or a size does not fit in its memory.
        KernelError: A kernel cannot be compiled or launched.
    """
    device = device_named(plan.device)
    if device.type == "cpu":
        settle_heap()
    results, notes = [], []
    for operator, size, dtype, bits in _points(plan):
        width = "" if operator in ONE_WIDTH else f" {bits} bits"
        progress(f"{operator} {dtype}{width} {size.rows}x{size.columns}")
        place = Place(size.rows, size.columns, getattr(torch, dtype), device, bits)
        try:
            result, note = _result(operator, place, plan)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MeasurementError(
                f"{operator} at --size {size.rows}x{size.columns} in {dtype} does not fit in the memory of "
                f"{plan.device}; give a smaller --size"
            ) from None
        results.append(result)
        notes.extend([note] if note and note not in notes else [])
        gc.collect()
    return KernelReport(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else machine().processor,
        threads=torch.get_num_threads(),
        results=tuple(results),
        notes=tuple(notes),
        recorded_at=now(),
        **provenance(command),
    )


def settle_heap() -> None:
    """Bring the C library to where it is in a process that has trained for a while.

    It maps tensors larger than any that was freed before, and each mapping costs page faults: 3 ms on 6 MiB, more than
    a layer computes. The largest size that moves this limit is 32 MiB (``DEFAULT_MMAP_THRESHOLD_MAX``).
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)  # freed at once


def device_named(name: DeviceName) -> torch.device:
    """Return the device of this name.

    Raises:
        MeasurementError: It is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise MeasurementError(
            "--device cuda: torch finds no CUDA device here; 'actbench doctor' says what is missing, and --device cpu "
            "measures the processor"
        )
    return torch.device(name)


def _points(plan: Plan) -> Iterable[tuple[str, Size, ElementType, int]]:
    return (
        (operator, size, dtype, bits)
        for operator in plan.operators
        for size in plan.sizes
        for dtype in (plan.dtypes if operator not in OF_BYTES else BYTES)
        for bits in (plan.bits if operator not in ONE_WIDTH else plan.bits[:1])
    )


def _result(operator: str, place: Place, plan: Plan) -> tuple[KernelResult, str | None]:
    subject = SUBJECTS[operator](place)
    source, target, other, another = torch.zeros(4, place.rows, place.columns, dtype=place.dtype, device=place.device)
    compiled, note = _compiled(subject) if plan.compiled else (None, None)
    calls = {"ours": subject.call, "copy": lambda: target.copy_(source)}
    calls |= {"exact": subject.exact_call} if subject.exact_call else {}
    calls |= {"compiled": compiled} if compiled else {}
    runs = interleaved(list(calls.values()), lambda: another.copy_(other), plan.seconds, place.device)
    seconds = dict(zip(calls, runs, strict=True))
    result = KernelResult(
        operator=operator,
        device=plan.device,
        dtype=str(place.dtype).removeprefix("torch."),
        bits=subject.bits,
        rows=place.rows,
        columns=place.columns,
        moved_bytes=subject.moved_bytes,
        floor_bytes=subject.floor_bytes,
        copied_bytes=2 * place.bytes,
        seconds=seconds["ours"],
        copy_seconds=seconds["copy"],
        exact=subject.exact,
        exact_seconds=seconds.get("exact"),
        compiled_seconds=seconds.get("compiled"),
    )
    return result, note


def _compiled(subject: Subject) -> tuple[Call | None, str | None]:
    """Return the exact layer's step under torch.compile, run once, or why it fails."""
    if subject.compilable is None:
        return None, None
    layer, step = subject.compilable
    call = step(torch.compile(layer))
    try:
        call()
    except Exception as error:  # whatever a compiler raises on a machine that it does not work on
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        return None, f"torch.compile does not work here, so its columns are empty: {reason}"
    return call, None
