"""Makes the recipe of a command from its argument and flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from actbench.cli.caseflags import CaseFlags
from actbench.errors import ModelError
from actbench.machine import find_gpu
from actbench.model.declared import check_model

if TYPE_CHECKING:
    from actbench.run.recipes import Recipe


@contextmanager
def recipe_hint(target: str | None) -> Iterator[None]:
    """If a target is not a model, add the recipe that may be meant to the error."""
    from actbench.run.recipes import closest

    try:
        yield
    except ModelError as error:
        close = closest(target or "")
        if close is None:
            raise
        raise ModelError(f"{error}; or did you mean the recipe {close!r}?") from None


def recipe_of_target(target: str, flags: CaseFlags, trusted: bool, cumulative: bool, *, elsewhere: bool) -> Recipe:
    """Return the recipe with this name or file, or the recipe made for the model with this name.

    ``elsewhere`` is that of :func:`check_model`.
    """
    from actbench.run import recipes

    if recipes.files_of(target) is not None or target.endswith(".toml"):
        loaded = recipes.Recipe.load_to_run(target, trusted=trusted)
        return flags.recipe(loaded.with_flags, ({}, {}), cumulative=cumulative)
    return recipe_of(target, flags, cumulative, elsewhere=elsewhere)


def recipe_of(model: str, flags: CaseFlags, cumulative: bool = False, *, elsewhere: bool = False) -> Recipe:
    """Return the recipe of one model; the search for the largest batch starts at 1, which mostly fits."""
    from actbench.run.recipes import Recipe

    check_model(model, elsewhere=elsewhere)
    workload = {"batch_size": "1" if flags.max_batch or flags.infer or flags.generate else "8", "model": model}
    measure = {"meters": ["cuda" if find_gpu() else "simulated"]}
    return flags.recipe(Recipe.from_flags, (workload, measure), cumulative=cumulative)
