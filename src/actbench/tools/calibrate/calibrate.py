"""Measures the speed of this machine, for the cost model of simulated steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.benchmark import Timer

from actbench.errors import MeasurementError
from actbench.machine import machine, memory_bytes, now, versions
from actbench.ops import hostmemory
from actbench.simulator.profiles import DeviceTable
from actbench.tools.calibrate.host import host_of
from actbench.tools.calibrate.profile import operators_of, peaks, points_of, shares
from actbench.tools.calibrate.steps import plan, run
from actbench.tools.calibrate.stopwatch import Clock, settle_heap
from actbench.units import GIB

_COPIED, _SENT = 2**26, 2**24
"""Bytes of a copy that no cache holds, and of one to memory that the C library keeps, as in steps."""
_GIGA, _MICRO = 1e9, 1e-6
_HOST = torch.device("cpu")


class Calibrated(NamedTuple):
    """A device profile of this machine, the name of the device, and what was not measured, with the reason."""

    profile: DeviceTable
    device: str
    notes: tuple[str, ...]


def calibrate(
    device: Literal["cpu", "cuda"] = "cpu",
    *,
    schemes: Sequence[str] | None = None,
    budget_seconds: float = 100.0,
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibrated:
    """Measure the operators of this machine and return its device profile.

    Args:
        device: The device to measure.
        schemes: The schemes whose operators are measured in steps of small models; None for every scheme.
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
    samples, notes = run(plan(where, schemes), where, clock, time.monotonic() + budget_seconds, progress)
    points = points_of(samples)
    flops = peaks(points)
    if "fp32" not in flops:
        raise MeasurementError(
            f"the rates of this machine are unknown: no matrix product was measured in {budget_seconds:g} s; give a "
            "larger --budget"
        )
    progress("the host")
    host = {part: each / _MICRO for part, each in host_of(where, clock, notes).items()}
    # what is copied within a memory is read and written
    bandwidth, of_host = (2 * _copied("target.copy_(source)", _COPIED, each, clock) for each in (where, _HOST))
    launch = points[points.kind == "elementwise"].groupby(["label", "precision"]).taken.first().median()
    properties: Any = torch.cuda.get_device_properties(where) if device == "cuda" else None
    facts, installed = machine(), versions()
    name = properties.name if properties else facts.processor
    table = {
        "gib": (properties.total_memory if properties else memory_bytes()) / GIB,
        "compute_capability": (properties.major, properties.minor) if properties else None,
        "processors": properties.multi_processor_count if properties else None,
        **flops,
        "bandwidth": bandwidth,
        "link": _copied("to_host(source)", _SENT, where, clock),
        "launch": launch,
        "source": f"actbench calibrate: {name}, {torch.get_num_threads()} threads of {facts.name}, {facts.system}, "
        f"actbench {installed.actbench}, torch {installed.torch}, Python {installed.python}, {now()}",
        "host": {**host, "bandwidth": of_host},
        "efficiencies": shares(points, flops, bandwidth, launch, on_cuda=device == "cuda"),
        "operators": operators_of(points),
    }
    rounded = json.loads(json.dumps(table), parse_float=lambda number: float(f"{float(number):.6g}"))
    return Calibrated(DeviceTable.model_validate(rounded), name, tuple(notes))


def _copied(copy: str, size: int, device: torch.device, clock: Clock) -> float:
    """Return the GB/s of a line that copies so many bytes of a device."""
    source = torch.ones(size // 4, device=device)
    names = {"source": source, "target": torch.ones_like(source), "to_host": hostmemory.to_host}
    timing: dict[str, Any] = {} if device.type == "cuda" else {"timer": clock}  # torch's own waits for the device
    timer = Timer(copy, globals=names, num_threads=torch.get_num_threads(), **timing)
    return size / timer.blocked_autorange().median / _GIGA
