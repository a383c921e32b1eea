"""The speed of a machine: its operators, measured one by one, and its device profile."""

from __future__ import annotations

from actbench.measuring.calibration.calibrate import calibrate

__all__ = ["calibrate"]
