"""The machine and the versions that measure, found without importing torch or starting CUDA.

A container often allows less memory and fewer cores than the machine has; Linux control groups (versions 1 and 2) tell
the limits.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pynvml

from actbench.model.provenance import Machine, Versions

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


def memory_limit_bytes() -> int | None:
    """Return the smallest memory limit of the control groups of this process, or None."""
    limits = (_number(folder / file) for folder, file, _, _ in _memory_files())
    return min((limit for limit in limits if limit is not None), default=None)


def memory_left_bytes() -> int | None:
    """Return the bytes left below the memory limit, file cache counted as free, or None without a limit."""
    left = []
    for folder, limit_file, usage_file, cache_key in _memory_files():
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None:
            left.append(limit - usage + (_statistic(folder / "memory.stat", cache_key) or 0))
    return max(0, min(left)) if left else None


def _memory_files() -> Iterator[tuple[Path, str, str, str]]:
    """Yield each group's folder, the names of the files with its limit and usage, and the key of its file cache."""
    yield from ((folder, "memory.max", "memory.current", "inactive_file") for folder in _folders(""))
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    yield from ((folder, *names) for folder in _folders("memory"))


def memory_kills() -> int | None:
    """Return how many processes the kernel killed when memory ran out, in this process's group or on the machine."""
    files = [folder / "memory.events" for folder in _folders("")]
    files += [folder / "memory.oom_control" for folder in _folders("memory")]
    counts = (_statistic(file, "oom_kill") for file in (*files, _VMSTAT))
    return next((count for count in counts if count is not None), None)


def quota_cores() -> int | None:
    """Return the processor quota in whole cores, rounded up, or None without a quota."""
    quotas = [_quota(folder / "cpu.max") for folder in _folders("")]
    for folder in _folders("cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        quotas.append(quota / period if quota is not None and quota > 0 and period else None)
    return min((math.ceil(quota) for quota in quotas if quota is not None), default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's group and its parents; the empty controller means version 2."""
    if not _MEMBERSHIP.exists():
        return
    for line in _MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = _CGROUPS / controllers
            group = root / path.lstrip("/")
            while group != root.parent and root in (group, *group.parents):
                yield group
                group = group.parent


def _number(path: Path) -> int | None:
    """Read a number; None if the file is missing or says that there is no limit."""
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
    """Read the number after a key; None if the file or the key is missing."""
    try:
        pairs = dict(line.split() for line in path.read_text().splitlines())
        return int(pairs[key])
    except (OSError, ValueError, KeyError):
        return None


@dataclass(frozen=True)
class Gpu:
    """A GPU that is visible.

    Attributes:
        uuid: What names it in ``CUDA_VISIBLE_DEVICES``: numbers there count in CUDA's order, which may be another than
            the driver's. None for a part of a GPU (MIG).
    """

    name: str
    memory_bytes: int
    driver: str
    uuid: str | None = None


def find_gpu() -> Gpu | None:
    """Return the first visible GPU, or None where there is no driver or ``CUDA_VISIBLE_DEVICES`` hides all."""
    return next(iter(find_gpus()), None)


def find_gpus() -> tuple[Gpu, ...]:
    """Return the visible GPUs; none where there is no driver or ``CUDA_VISIBLE_DEVICES`` hides all."""
    nvml: Any = pynvml
    found: list[Gpu] = []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        for handle in _visible(nvml):
            memory, name = int(nvml.nvmlDeviceGetMemoryInfo(handle).total), _text(nvml.nvmlDeviceGetName(handle))
            uuid = None if _is_parted(nvml, handle) else _text(nvml.nvmlDeviceGetUUID(handle))
            found.append(Gpu(name, memory, driver, uuid))
    except nvml.NVMLError:
        return tuple(found)  # what follows a name that is none is hidden, as for CUDA
    finally:
        nvml.nvmlShutdown()
    return tuple(found)


def _visible(nvml: Any) -> Iterator[Any]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(nvml.nvmlDeviceGetCount())) if named is None else map(str.strip, named.split(","))
    for name in names:
        if name.isdigit():
            yield nvml.nvmlDeviceGetHandleByIndex(int(name))
        elif name.startswith(("GPU-", "MIG-")):
            yield nvml.nvmlDeviceGetHandleByUUID(name)
        else:
            return  # empty or -1 hides it and all that follow, as for CUDA


def _is_parted(nvml: Any, handle: Any) -> bool:
    """Return whether a GPU is parted; a part of one is not."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # it cannot be parted


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


_virtual_memory: Any = psutil.virtual_memory
_CHECKOUT = Path(__file__).parents[2]  # root of the git checkout, if actbench runs from one
_CODE = ("src", "kernels", "pyproject.toml")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
"""The distributions of CuPy."""


def machine() -> Machine:
    """Describe this machine, named after its GPU, or else after its processor and number of cores."""
    processor, cores, device = _processor(), _cores(), find_gpu()
    return Machine(
        name=f"{_slug(device.name if device else processor)}-{cores}c",
        system=f"{platform.system()} {platform.release()}",
        processor=processor,
        cores=cores,
        memory_bytes=memory_bytes(),
        gpu=device.name if device else None,
        gpu_memory_bytes=device.memory_bytes if device else None,
        driver=device.driver if device else None,
    )


def versions() -> Versions:
    """Return the versions of actbench and its libraries, and the commit if actbench runs from a checkout."""
    torch, cuda = _torch_versions()
    commit, dirty = _checkout(_CHECKOUT)
    return Versions(
        actbench=version_of("actbench") or "unknown",
        python=platform.python_version(),
        torch=torch or "none",
        torchvision=version_of("torchvision"),
        transformers=version_of("transformers"),
        numba=version_of("numba"),
        cuda=cuda,
        cupy=next(filter(None, map(version_of, CUPY)), None),
        commit=commit,
        dirty=dirty,
    )


def provenance(command: str) -> dict[str, Any]:
    """Return the provenance fields of records; ``command`` is the command that repeats the experiment."""
    return {"machine": machine(), "versions": versions(), "command": command}


def now() -> str:
    """Return the current time in the format of records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def available_memory_bytes() -> int:
    """Return the host memory that a process may still take without swapping."""
    available = int(_virtual_memory().available)
    left = memory_left_bytes()
    return available if left is None else min(available, left)


def memory_bytes() -> int:
    """Return the host memory of the machine, or of its container, in bytes."""
    total = int(_virtual_memory().total)
    limit = memory_limit_bytes()
    return total if limit is None else min(total, limit)


def _cores() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores()
    return usable if quota is None else max(1, min(usable, quota))


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _slug(name: str) -> str:
    """Turn a device's name into one for files: ``AMD EPYC(TM) 7B13 @ 2.4GHz`` into ``amd-epyc-7b13``."""
    bare = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor|\d+-core)\b", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9]+(?:\.[0-9]+)?", bare)) or "machine"


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_versions() -> tuple[str | None, str | None]:
    """Return torch's version with its build, and the CUDA version it was built for, from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text() if file.exists() else ""
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= '([^']+)'", text, re.MULTILINE)
    return version[1] if version else version_of("torch"), cuda[1] if cuda else None


def _checkout(root: Path) -> tuple[str | None, bool | None]:
    """Return the commit of a checkout, and whether its code differs from the commit; results do not count."""
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *_CODE)
    return commit or None, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
