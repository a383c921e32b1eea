"""Where cases are measured, found out without importing torch."""

from __future__ import annotations

from actbench.machine.cgroup import memory_kills
from actbench.machine.facts import available_memory_bytes, machine, memory_bytes, versions

__all__ = ["available_memory_bytes", "machine", "memory_bytes", "memory_kills", "versions"]
