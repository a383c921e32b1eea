"""What a user can do about a peak that is too high."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from actbench.model.records import Phase

STEP: dict[Phase, str] = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}
"""Words for the parts of a training step."""
PHASES: dict[Phase, str] = {**STEP, "prefill": "prefill", "generation": "generation"}

FindSchemes = Callable[[Sequence[str]], Sequence[str]]
"""From kinds of changes to the names of schemes that make one of them; reading records does not import the schemes."""


class Settings(NamedTuple):
    """What a user can change beside the scheme, in words; no batch is smaller than one of one row."""

    batch: str | None = "a smaller --batch-size"
    optimizer: str = "another --optimizer"


FLAGS = Settings()
"""What a user of flags can change."""

_OF_MODEL = ("optimizer", "gradients")
"""Kinds of changes by which a scheme helps if most of a peak does not depend on the batch."""
_OF_WEIGHTS = ("gradients", "parameters")
"""Kinds of changes by which a scheme helps if, of that, hardly anything is the optimizer's."""
_OF_SAMPLES = ("saved tensors", "recomputation", "loss")
"""Kinds of changes by which a scheme helps if most of a peak comes from the batch."""


def helping_changes(phase: Phase, *, mostly_model: bool, of_optimizer: bool = True) -> tuple[str, ...]:
    """Return the kinds of changes by which a scheme lowers a peak; arguments are those of :func:`advice`."""
    if phase != "optimizer" and not mostly_model:
        return _OF_SAMPLES
    return _OF_MODEL if of_optimizer else _OF_WEIGHTS


def advice(
    phase: Phase | None,
    *,
    mostly_model: bool,
    of_optimizer: bool = True,
    whole: Sequence[str] = (),
    find: FindSchemes | None = None,
    examples: Sequence[str] = (),
    settings: Settings = FLAGS,
) -> str:
    """Return what the user can do, as a part of a sentence.

    Args:
        phase: Part of the step with the peak, or in which memory ran out; None if unknown.
        mostly_model: Whether weights, gradients and optimizer state, which no batch size changes, fill most of it.
        of_optimizer: Whether enough of it is the optimizer's for another one to help.
        whole: The kinds of modules whose weights the scheme leaves whole, if these fill most of it.
        find: Names the schemes that help; without it the text refers to 'actbench schemes'.
        examples: Some of these schemes, which the text names if ``find`` does not.
        settings: What can be changed beside the scheme.
    """
    if phase in ("prefill", "generation"):
        smaller = (
            "fewer weights or a --dtype of fewer bits"
            if mostly_model
            else f"{settings.batch or ''}, a shorter --prompt"
        )
        return f"take {smaller.removeprefix(', ')} or, for a smaller cache, --cache fp8"
    if phase is None:
        return f"take {settings.batch} or another --scheme" if settings.batch else "take another --scheme"
    if whole:
        left = f"the scheme leaves the weights of {', '.join(whole)} whole"
        return f"{left}: spread them over processes by fsdp, or take a smaller model"
    changes = helping_changes(phase, mostly_model=mostly_model, of_optimizer=of_optimizer)
    setting = {_OF_MODEL: settings.optimizer, _OF_SAMPLES: settings.batch}.get(changes)
    such_as = f", such as {' or '.join(examples)}" if examples else ""
    names = f": {', '.join(find(changes))}" if find else f"{such_as} (see 'actbench schemes')"
    return f"take {f'{setting}, or ' if setting else ''}a --scheme that changes {' or '.join(changes)}{names}"
