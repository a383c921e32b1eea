"""From a model and a card to a shortlist: which stacks of schemes fit, what each costs, and the code to paste."""

from __future__ import annotations

from actbench.fitting.fit import Fit, fit

__all__ = ["Fit", "fit"]
