"""What a machine reaches: its operators, measured one by one, and the device profile that says so."""

from __future__ import annotations

from actbench.measuring.calibration.calibrate import calibrate

__all__ = ["calibrate"]
