"""Two results files side by side."""

from __future__ import annotations

from actbench.compare.limits import Limit, parse_limit
from actbench.compare.pairs import Comparison, compare

__all__ = ["Comparison", "Limit", "compare", "parse_limit"]
