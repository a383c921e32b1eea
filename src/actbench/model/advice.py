"""What a user can do about a peak that is too high."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from actbench.model.records import Phase

PHASES: dict[Phase, str] = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}

FindSchemes = Callable[[Sequence[str]], Sequence[str]]
"""From kinds of changes to the names of schemes that make one of them; reading records does not import the schemes."""


class _Remedy(NamedTuple):
    """A setting to change, and the kinds of changes by which a scheme helps."""

    setting: str
    changes: tuple[str, ...]


_OF_MODEL = _Remedy("another --optimizer", ("optimizer", "gradients"))
_OF_SAMPLES = _Remedy("a smaller --batch-size", ("saved tensors", "recomputation", "loss"))


def advice(
    phase: Phase | None, *, mostly_model: bool, whole: Sequence[str] = (), find: FindSchemes | None = None
) -> str:
    """Return what the user can do, as a part of a sentence.

    Args:
        phase: Part of the step with the peak, or in which memory ran out; None if unknown.
        mostly_model: Whether weights, gradients and optimizer state, which no batch size changes, fill most of it.
        whole: The kinds of modules whose weights the scheme leaves whole, if these fill most of it.
        find: Names the schemes that help; without it the text refers to 'actbench schemes'.
    """
    if phase is None:
        return "take a smaller --batch-size or another --scheme"
    if whole:
        left = f"the scheme leaves the weights of {', '.join(whole)} whole"
        return f"{left}: spread them over processes by fsdp, or take a smaller model"
    setting, changes = _OF_MODEL if phase == "optimizer" or mostly_model else _OF_SAMPLES
    names = f": {', '.join(find(changes))}" if find else " (see 'actbench schemes')"
    return f"take {setting}, or a --scheme that changes {' or '.join(changes)}{names}"
