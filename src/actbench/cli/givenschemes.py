"""Schemes that a user names in a flag or a recipe, and the errors about them."""

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
            check_scheme(text)
    return found
