"""Checks the schemes of flags and recipes, and adds their place to errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from actbench.errors import SpecError
from actbench.model.declared import check_scheme


@contextmanager
def schemes_from(place: str) -> Iterator[None]:
    """Add the place of a refused scheme, a flag or a recipe, to the error."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{place}: {error}") from None


def checked_schemes(found: list[str], place: str) -> list[str]:
    """Return specifications of schemes that are right, as far as is known before torch is imported.

    Raises:
        SpecError: One is wrong; the message begins with the place, a flag.
    """
    with schemes_from(place):
        for text in found:
            try:
                check_scheme(text)
            except SpecError as error:
                raise SpecError(f"{error}{_several(text, place)}") from None
    return found


def _several(text: str, place: str) -> str:
    """Return how to ask for several schemes, if a text is a list of such; nothing else."""
    schemes = text.split(",")
    if len(schemes) < 2:
        return ""
    try:
        for each in schemes:
            check_scheme(each)
    except SpecError:
        return ""
    return f"; for {len(schemes)} rows, repeat the option: {' '.join(f'{place} {each}' for each in schemes)}"
