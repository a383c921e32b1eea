"""How long a fit simulates, unless a user says it."""

from __future__ import annotations

from typing import Final

BUDGET_SECONDS: Final = 120.0
"""Seconds after which no simulation of a model starts."""

SCRIPT_BUDGET_SECONDS: Final = 600.0
"""The same for a script, each of whose simulations runs the script."""
