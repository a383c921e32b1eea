from __future__ import annotations

import difflib
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from actbench.codecs.encodings.encoding import Encoding
from actbench.codecs.encodings.fp8 import Fp8
from actbench.codecs.encodings.grouped import IntGroups
from actbench.codecs.encodings.halves import Bf16, Fp16
from actbench.codecs.encodings.nnwbdi import NnwBdi
from actbench.codecs.encodings.packed import Smaq
from actbench.codecs.encodings.s2fp8 import S2fp8
from actbench.codecs.encodings.simulated import SmaqSimulated
from actbench.errors import UsageError

ENCODINGS: Final[dict[str, type[Encoding]]] = {
    kind.name: kind for kind in (Bf16, Fp16, Fp8, S2fp8, IntGroups, Smaq, SmaqSimulated, NnwBdi)
}
"""The encodings by name."""

COMPARED: Final = (
    "bf16",
    "fp16",
    "fp8:e4m3",
    "fp8:e5m2",
    "s2fp8",
    "int:6",
    "int:8,group_size=256",
    "smaq",
    "smaq,rounding=nearest",
    "smaq_simulated",
    "smaq_simulated,rounding=nearest",
    "smaq_simulated,clamp=true",
    "nnwbdi",
)
"""What ``actbench encodings`` compares unless told otherwise."""


def build(text: str) -> Encoding:
    """Build the encoding that a specification names: ``NAME[:VALUE][,key=value…]``, such as ``fp8:e5m2``.

    ``int6`` is short for ``int:6``, and so with other widths.

    Raises:
        UsageError: A name, key or value is wrong; the message says what is allowed.
    """
    head, *pairs = text.strip().split(",")
    name, colon, value = head.partition(":")
    if name not in ENCODINGS and name.startswith("int") and name[3:].isdigit() and not colon:
        name, colon, value = "int", ":", name[3:]
    kind = _kind(name, text)
    given = dict(_option(pair, text) for pair in pairs)
    if colon:
        if kind.positional is None:
            raise UsageError(f"encoding {text!r}: {name} takes no value after the colon, found {value!r}")
        if kind.positional in given:
            raise UsageError(f"encoding {text!r}: {kind.positional} is given twice, after the colon and as a key")
        given[kind.positional] = value
    for key in given:
        if key not in kind.model_fields:
            raise UsageError(f"encoding {text!r}: {name} has no key {key!r}; its keys: {_keys(kind)}")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(_problem(item) for item in error.errors())
        raise UsageError(f"encoding {text!r}: {problems}") from None


def _kind(name: str, text: str) -> type[Encoding]:
    if name not in ENCODINGS:
        close = difflib.get_close_matches(name, ENCODINGS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"encoding {text!r}: there is no encoding {name!r}; {hint}known: {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def _keys(kind: type[Encoding]) -> str:
    return ", ".join(kind.model_fields) or "none"


def _problem(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    place = "".join(f"{step}={error['input']}: " for step in error["loc"])
    return f"{place}{message[0].lower()}{message[1:]}"


def _option(pair: str, text: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not (key and equals and value):
        raise UsageError(f"encoding {text!r}: {pair!r} is not of the form key=value")
    return key, value
