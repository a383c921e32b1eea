"""From flags to the fields of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actbench.errors import UsageError

_WORKLOAD = (
    "batch_size",
    "task",
    "sequence_length",
    "image_size",
    "attention",
    "dtype",
    "autocast",
    "optimizer",
    "weights",
)


def workload_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that say what is trained, those not given left out."""
    flags = {name: given[name] for name in _WORKLOAD if given[name] is not None}
    if given["trust_remote_code"]:
        flags["trust_remote_code"] = True
    return flags


def measure_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that say how to measure, those not given left out."""
    flags = {
        "meters": meters(given["meter"]),
        "device_profile": given["device_profile"],
        "memory_limit": given["memory_limit"],
        "largest_batch": True if given["max_batch"] else None,
        "seed": given["seed"],
        "min_steps": given["steps"],
        "min_seconds": given["seconds"],
    }
    if flags["device_profile"] is None and {"simulated", "cpu"} == set(flags["meters"] or ()):
        flags["device_profile"] = "cpu"  # an estimate of what is measured beside it
    return {name: value for name, value in flags.items() if value is not None}


def default_meter() -> str:
    """Return the meter of a model for which none is named: what runs on the best device of this machine."""
    from actbench.machine import gpu

    return "cuda" if gpu.find() else "simulated"


def meters(given: list[str] | None) -> list[str] | None:
    """Split ``simulated,cpu`` and repeated flags into one list."""
    return None if given is None else [name.strip() for text in given for name in text.split(",")]


def composed(
    scheme: list[str] | None, gelu_bits: str | None, linear: str | None, activation_bits: str | None = None
) -> list[str]:
    """Return the schemes that flags ask for; the short forms compose into one, or are added to the one that is given.

    Raises:
        UsageError: A short form stands beside several schemes, and it is not plain which one it should join; or there
            are two short forms of one scheme.
    """
    if gelu_bits is not None and activation_bits is not None:
        raise UsageError("--gelu-bits and --activation-bits are both short for fewbit: give one of them")
    short = [] if gelu_bits is None else [f"fewbit:{gelu_bits},functions=gelu"]
    short += [] if activation_bits is None else [f"fewbit:{activation_bits}"]
    short += [] if linear is None else [linear]
    if not short:
        return scheme or []
    if len(scheme or []) > 1:
        raise UsageError(
            "--gelu-bits, --activation-bits and --linear join one scheme: give at most one --scheme beside them"
        )
    return ["+".join([*(scheme or []), *short])]
