"""How a process ended that gave no answer, in words."""

from __future__ import annotations

import signal

from actbench.runner.processes import ProcessDiedError


def describe(death: ProcessDiedError, advice: str = "") -> str:
    """Return how a process ended, as the rest of a sentence about it.

    Args:
        death: Of the process.
        advice: What else to do where the kernel killed it.
    """
    code, hint = death.code or 0, ""
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended by itself with exit code {code}"
    if death.code is None:
        how = "is gone, with the one that started it"
    if code == -signal.SIGKILL:
        hint = "; the usual cause is the kernel's out-of-memory killer: try a smaller batch, or close other programs"
        hint += advice
    noise = f"\nThe last it wrote:\n{death.noise}" if death.noise else ""
    return f"{how}{hint}{noise}"


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:
        return f"signal {number}"
