"""The grammar of scheme specifications, shared by the command line, recipes, records and saved models.

``NAME[:VALUE][,key=value…]``, joined by ``+``::

    fewbit:3
    fewbit:2,functions=gelu/silu
    fewbit:3+randomized:0.2

This file knows the grammar only; which names and values exist is known to ``actbench.schemes``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from actbench.errors import SpecError

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_KEY = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Part:
    """One scheme of a specification: its name, the value after the colon, and the ``key=value`` options."""

    name: str
    value: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        head = self.name if self.value is None else f"{self.name}:{self.value}"
        return ",".join([head, *(f"{key}={value}" for key, value in self.options.items())])


def parse(text: str) -> tuple[Part, ...]:
    """Split a specification into its parts.

    Raises:
        SpecError: The text does not follow the grammar; the message shows the part that does not.
    """
    if not text.strip():
        raise SpecError("the scheme is empty: write a name such as exact or fewbit:3 (see 'actbench schemes')")
    return tuple(_parse_part(part.strip(), text) for part in text.split("+"))


def _parse_part(part: str, text: str) -> Part:
    head, *pairs = part.split(",")
    name, colon, value = head.partition(":")
    if not _NAME.fullmatch(name):
        raise SpecError(f"scheme {text!r}: {part!r} does not begin with a name; write NAME[:VALUE][,key=value]")
    if colon and not value:
        raise SpecError(f"scheme {text!r}: nothing follows the colon in {part!r}")
    return Part(name, value if colon else None, _parse_options(pairs, part, text))


def _parse_options(pairs: list[str], part: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value or not _KEY.fullmatch(key):
            raise SpecError(f"scheme {text!r}: {pair!r} in {part!r} is not of the form key=value")
        if key in options:
            raise SpecError(f"scheme {text!r}: {key!r} stands twice in {part!r}")
        options[key] = value
    return options
