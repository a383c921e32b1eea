"""What a model saves for backward, module by module and tensor by tensor."""

from __future__ import annotations

from actbench.measuring.inspection.itemized import itemize
from actbench.measuring.inspection.sites import Trace, inspect, refuse_idle, trace

__all__ = ["Trace", "inspect", "itemize", "refuse_idle", "trace"]
