"""What a model keeps for backward, module by module."""

from __future__ import annotations

from actbench.inspection.sites import Trace, inspect, trace

__all__ = ["Trace", "inspect", "trace"]
