"""The device profile of a calibration, as a value and as TOML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from actbench.measuring.calibration.findings import Found, Key
from actbench.measuring.meters.profilefile import DeviceTable
from actbench.results.calibration import CalibrationReport, KindFound
from actbench.results.machine import memory_bytes
from actbench.units import GIB

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
_HIGHEST, _LEAST = 1.5, 0.001
"""Largest and smallest share in a profile."""


def profile_of(report: CalibrationReport, found: Mapping[Key, Found], device: torch.device) -> DeviceTable:
    """Return the device profile of a calibration."""
    is_cuda = device.type == "cuda"
    operators: dict[str, dict[str, Any]] = {}
    for (label, precision), each in sorted(found.items()):
        operators.setdefault(label, {})[precision] = [
            (*([round(flops)] if flops else []), round(size), _rounded(seconds / _MICRO))
            for flops, size, seconds in each.points
        ]
    return DeviceTable.model_validate(
        {
            "gib": _rounded((torch.cuda.mem_get_info(device)[1] if is_cuda else memory_bytes()) / GIB, 6),
            "compute_capability": torch.cuda.get_device_capability(device) if is_cuda else None,
            **{name: _rounded(rate / _TERA) for name, rate in report.flops_per_second.items()},
            "bandwidth": _rounded(report.bandwidth / _GIGA),
            "link": _rounded(report.link / _GIGA),
            "launch": _rounded(report.launch_seconds / _MICRO),
            "source": _source(report),
            "host": {
                **{name: _rounded(seconds / _MICRO) for name, seconds in report.host.model_dump().items()},
                "bandwidth": _rounded(report.bandwidth / _GIGA),
            },
            "efficiencies": _kinds(report),
            "operators": operators,
        }
    )


def _source(report: CalibrationReport) -> str:
    versions = report.versions
    return (
        f"actbench calibrate: {report.device}, {report.threads} threads of {report.machine.name}, "
        f"{report.machine.system}, actbench {versions.actbench}, torch {versions.torch}, Python {versions.python}, "
        f"{report.recorded_at}"
    )


def _kinds(report: CalibrationReport) -> dict[str, dict[str, float]]:
    """Return the shares of kinds, which serve for operators that were not measured."""
    tables: dict[str, dict[str, float]] = {}
    for kind in report.kinds:
        table = tables.setdefault(kind.kind, {"memory": 1.0, "ramp": _ramp(kind, report)})
        table["memory" if kind.flops_per_second is None else kind.precision] = _rounded(
            min(max(kind.share, _LEAST), _HIGHEST)
        )
    return tables


def _ramp(kind: KindFound, report: CalibrationReport) -> float:
    return _rounded(max(kind.least_seconds - report.launch_seconds, 0.0) / _MICRO)


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def toml(profile: DeviceTable) -> str:
    """Return the text of a profile's file."""
    return "\n".join(_lines(profile)) + "\n"


def _lines(profile: DeviceTable) -> Iterator[str]:
    tables = profile.model_dump(exclude_none=True)
    host, kinds, operators = (tables.pop(name, {}) for name in ("host", "efficiencies", "operators"))
    yield "# Measured by 'actbench calibrate'; docs/time.md explains the figures. Use it with --device-profile."
    yield from _entries(tables)
    yield "\n# Microseconds of the host for an operator, and GB/s of its memory.\n[host]"
    yield from _entries(host)
    yield "\n# Shares of these rates that kinds of operators reach, for those that have no entry below."
    for name, table in kinds.items():
        yield f'\n[efficiencies."{name}"]'
        yield from _entries(table)
    yield "\n# Times of operators: moved bytes and microseconds, after the number of operations if there are any."
    for name, table in operators.items():
        yield f'\n[operators."{name}"]'
        yield from _entries(table)


def _entries(table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            yield f'{name} = "{escaped}"'
        elif isinstance(value, list | tuple):
            yield f"{name} = [{', '.join(_element(each) for each in value)}]"
        else:
            yield f"{name} = {_number(value)}"


def _element(value: Any) -> str:
    return f"[{', '.join(map(_number, value))}]" if isinstance(value, list | tuple) else _number(value)


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 and value != int(value) else str(int(value) if value == int(value) else value)
