"""Sizes of images: a number for square ones, ``HEIGHTxWIDTH`` for others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainSerializer, WrapValidator

from actbench.units import Count

_RECTANGLE = re.compile(r"([0-9]{1,18})x([0-9]{1,18})")


def image_size(value: Any, number: Callable[[Any], int]) -> int | str:
    """Return the canonical form of a size: the edge of a square, in pixels, or ``HEIGHTxWIDTH``.

    Args:
        value: A number, or a text of the form ``512x1024``.
        number: Checks any other value.

    Raises:
        ValueError: An edge has no pixel, or the text has another form.
    """
    if not isinstance(value, str):
        return number(value)
    match = _RECTANGLE.fullmatch(value)
    size = (int(match[1]), int(match[2])) if match else (0, 0)
    if min(size) < 1:
        raise ValueError(f"{value!r} is no size of images: write 224 for a square, or 512x1024 for height and width")
    return write(size)


if TYPE_CHECKING:
    ImageSize = int | str
else:
    ImageSize = Annotated[Count, WrapValidator(image_size), PlainSerializer(lambda size: size, return_type=int | str)]


def edges(size: ImageSize) -> tuple[int, int]:
    """Return the height and the width of a size in its canonical form, in pixels."""
    height, _, width = str(size).partition("x")
    return int(height), int(width or height)


def write(size: tuple[int, int]) -> int | str:
    """Return height and width in canonical form."""
    return size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}"
