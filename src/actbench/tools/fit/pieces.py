"""The code of plans in pieces, each with its heading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actbench.tools.fit.code import Code, code_for
from actbench.tools.fit.records import Tried


def pieces_of(chosen: Sequence[Tried]) -> tuple[tuple[str, str], ...]:
    """Return the pieces of code of plans, each with its heading."""
    return tuple(pair for plan in chosen for pair in _pasted(plan, code_for(plan.case, plan.measured)))


def _pasted(plan: Tried, code: Code) -> Iterator[tuple[str, str]]:
    """Yield the pieces of code of a plan, each with its heading."""
    yield f"{plan.words}: a loop of your own", code.loop
    if code.trainer:
        yield f"{plan.words}: with transformers' Trainer", code.trainer
    else:
        yield f"{plan.words}: not with transformers' Trainer", f"# {code.why_no_trainer}\n"
    yield f"{plan.words}: measured on the device", f"{code.command}\n"
