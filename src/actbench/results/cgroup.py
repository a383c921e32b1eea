"""What a container allows, which is often less than what the machine has (Linux control groups, versions 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/vmstat")


def memory_limit_bytes() -> int | None:
    """Return the smallest memory limit of the groups this process is in, or None where there is none."""
    limits = [
        *(_number(folder / "memory.max") for folder in _folders("")),
        *(_number(folder / "memory.limit_in_bytes") for folder in _folders("memory")),
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_left_bytes() -> int | None:
    """Return how much of the memory limit is left, file cache counted as free, or None where there is no limit."""
    files = [(folder, "memory.max", "memory.current", "inactive_file") for folder in _folders("")]
    files += [
        (folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for folder in _folders("memory")
    ]
    left = []
    for folder, limit_file, usage_file, cache_key in files:
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None:
            left.append(limit - usage + (_statistic(folder / "memory.stat", cache_key) or 0))
    return max(0, min(left)) if left else None


def memory_kills() -> int | None:
    """Return how many processes the kernel has ended for want of memory in this process's group.

    Where no group counts them it is how many on the whole machine, and None where nothing does.
    """
    files = [folder / "memory.events" for folder in _folders("")]
    files += [folder / "memory.oom_control" for folder in _folders("memory")]
    counts = (_statistic(file, "oom_kill") for file in (*files, _MACHINE))
    return next((count for count in counts if count is not None), None)


def cores() -> int | None:
    """Return the processor quota in whole cores, rounded up, or None where there is none."""
    quotas = [_quota(folder / "cpu.max") for folder in _folders("")]
    for folder in _folders("cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        quotas.append(quota / period if quota is not None and quota > 0 and period else None)
    return min((math.ceil(quota) for quota in quotas if quota is not None), default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's group and those above it; the empty controller is version 2."""
    if not _MEMBERSHIP.exists():
        return
    for line in _MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = _ROOT / controllers
            group = root / path.lstrip("/")
            while group != root.parent and root in (group, *group.parents):
                yield group
                group = group.parent


def _number(path: Path) -> int | None:
    """Read a number; None where the file is missing or says that there is no limit."""
    try:
        amount = int(path.read_text())
    except (OSError, ValueError):
        return None
    return amount if amount < 2**60 else None  # version 1 writes "no limit" as a huge number


def _quota(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _statistic(path: Path, key: str) -> int | None:
    """Read the number behind a key; None where the file or the key is missing."""
    try:
        pairs = dict(line.split() for line in path.read_text().splitlines())
        return int(pairs[key])
    except (OSError, ValueError, KeyError):
        return None
