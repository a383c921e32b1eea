"""The choices of the command line, checked before torch is imported."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from actbench.errors import UsageError
from actbench.results.kernels import DeviceName, ElementType
from actbench.results.records import FloatName, whole_name


class Size(NamedTuple):
    """Rows and columns of a tensor."""

    rows: int
    columns: int


DEFAULT_SIZES: dict[DeviceName, tuple[str, ...]] = {
    "cpu": ("512x3072", "4096x3072"),
    "cuda": ("4096x4096", "16384x4096"),
}
DEFAULT_DTYPES: dict[DeviceName, tuple[str, ...]] = {
    "cpu": ("float32",),
    "cuda": ("float32", "bfloat16"),
}
OPERATORS = (
    "layer:gelu",
    "layer:silu",
    "layer:relu",
    "stepwise_activate",
    "stepwise_encode",
    "stepwise_decode",
    "relu_mask",
    "mask_select",
    "pack_codes",
    "unpack_codes",
    "groupquant_encode",
    "groupquant_decode",
    "smaq_encode",
    "smaq_decode",
    "sketch_rademacher",
    "sketch_gaussian",
)
"""The operators that can be measured, in the order of the table."""

ONE_WIDTH = frozenset(
    {"layer:relu", "relu_mask", "mask_select", "smaq_encode", "smaq_decode", "sketch_rademacher", "sketch_gaussian"}
)
"""Operators without a choice of bits."""

OF_BYTES = frozenset({"pack_codes", "unpack_codes"})
"""Operators on bytes, which have no other dtype."""

BYTES: tuple[ElementType, ...] = ("uint8",)


@dataclass(frozen=True)
class Plan:
    """What to measure: each operator at each size, dtype and number of bits, for ``seconds``.

    Operators without a choice of bits are measured once; ``compiled`` adds ``torch.compile`` of the exact layers.
    """

    device: DeviceName
    operators: tuple[str, ...]
    sizes: tuple[Size, ...]
    dtypes: tuple[FloatName, ...]
    bits: tuple[int, ...]
    seconds: float
    compiled: bool


def sizes(given: Iterable[str]) -> tuple[Size, ...]:
    """Read sizes such as ``512x3072``, separated by commas."""
    return tuple(map(_size, _split(given)))


def _size(text: str) -> Size:
    found = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if found is None or not int(found[1]) * int(found[2]):
        raise UsageError(f"--size {text!r}: give rows and columns, such as 512x3072")
    return Size(int(found[1]), int(found[2]))


def bits(given: Iterable[str]) -> tuple[int, ...]:
    """Read numbers of bits."""
    found = _split(given)
    for text in found:
        if text not in {str(number) for number in range(1, 9)}:
            raise UsageError(f"--bits {text!r}: give whole numbers from 1 to 8, such as 3 or 2,3,4")
    return tuple(map(int, found))


def dtypes(given: Iterable[str]) -> tuple[FloatName, ...]:
    """Read names of dtypes."""
    return _known("--dtype", map(whole_name, _split(given)), get_args(FloatName))  # type: ignore[return-value]


def operators(given: Iterable[str]) -> tuple[str, ...]:
    """Read names of operators; ``layer`` stands for all layers, ``groupquant`` for both; none for all."""
    names = [name for text in _split(given) for name in _family(text)]
    return _known("--op", names, OPERATORS) or OPERATORS


def _family(text: str) -> tuple[str, ...]:
    """Return the operators whose names begin with a whole word, or the text itself."""
    return tuple(name for name in OPERATORS if re.split("[:_]", name)[0] == text) or (text,)


def _known(flag: str, given: Iterable[str], allowed: Sequence[str]) -> tuple[str, ...]:
    names = _split(given)
    for name in names:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{flag} {name!r} is not one of {', '.join(allowed)}{hint}")
    return names


def _split(given: Iterable[str]) -> tuple[str, ...]:
    parts = [part.strip() for text in given for part in text.split(",")]
    if "" in parts:
        raise UsageError("a list that is empty, or has two commas beside each other: leave the flag out, or name one")
    return tuple(dict.fromkeys(parts))
