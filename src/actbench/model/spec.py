"""The grammar of specifications, shared by the command line, recipes, records and saved models.

``NAME[:VALUE][,key=value…]``; several schemes are joined by ``+``::

    fewbit:3
    fewbit:2,functions=gelu/silu
    fewbit:3+randomized:0.2

This file knows the grammar only. ``actbench.scheme`` and ``actbench.methods.formats.encodings`` know which names exist;
keys and values are the fields of the class that a name stands for.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from actbench.errors import SpecError
from actbench.units import COUNT_LIMIT
from actbench.validation import sentence

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_KEY = re.compile(r"[a-z][a-z0-9_]*")
_SIGNS = re.compile(r"[,+]|^\s|\s$|^$")
_EXPONENT = re.compile(r"([=:]-?[\d.]+[eE])\+(?=\d)")  # a plus in an exponent joins no schemes

SMALLEST, LARGEST = 1e-30, 1e30
LONGEST: Final = 100_000
"""Most characters of a specification of schemes; a plan that names each module of a large model has some thousands."""
MOST_PARTS: Final = 100

Found = TypeVar("Found")
Built = TypeVar("Built", bound=BaseModel)


@dataclass(frozen=True)
class SpecPart:
    """One name of a specification, the value after the colon, and the ``key=value`` options."""

    name: str
    value: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        head = self.name if self.value is None else f"{self.name}:{self.value}"
        return ",".join([head, *(f"{key}={value}" for key, value in self.options.items())])


def parse_spec(text: str) -> tuple[SpecPart, ...]:
    """Split a specification of schemes into its parts.

    Raises:
        SpecError: The text does not follow the grammar; the message shows the wrong part.
    """
    if not text.strip():
        raise SpecError("the scheme is empty: write a name such as exact or fewbit:3 (see 'actbench schemes')")
    if len(text) > LONGEST or text.count("+") >= MOST_PARTS:
        found = f"{len(text):,} characters and {text.count('+') + 1:,} parts"
        raise SpecError(f"scheme {text!r} has {found}; it may have {LONGEST:,} and {MOST_PARTS}")
    parts = [part.strip() for part in _EXPONENT.sub(r"\1", text).split("+")]
    return tuple(parse_part(part, f"scheme {text!r}", f" in {part!r}") for part in parts)


def check_apart(named: Sequence[tuple[str, bool]], text: str) -> None:
    """Check that no scheme is given twice, and that the unchanged model is not composed with others.

    Args:
        named: The name of each part of a specification, and whether ``only=`` limits it to a part of the model.
        text: The specification.

    Raises:
        SpecError: One is.
    """
    if len(named) > 1 and any(name == "exact" for name, _ in named):
        raise SpecError(f"scheme {text!r}: exact is the unchanged model and cannot be composed; leave it out")
    for (first, of_part), (second, of_other) in itertools.combinations(named, 2):
        if first == second and not (of_part and of_other):  # whether parts overlap is seen on the model
            raise SpecError(
                f"scheme {text!r}: {first} is given twice; give it once, with all its keys, or each with only="
                " for parts of the model that do not overlap"
            )


def parse_part(part: str, about: str, where: str = "") -> SpecPart:
    """Split one part of a specification, without space around it.

    Args:
        part: Such as ``fewbit:2,functions=gelu/silu``.
        about: Beginning of a message, such as ``scheme 'fewbit:3+randomized:0.2'``.
        where: Text after an option in a message, if there may be several parts.

    Raises:
        SpecError: The part does not follow the grammar.
    """
    head, *pairs = part.split(",")
    name, colon, value = head.partition(":")
    if not _NAME.fullmatch(name):
        raise SpecError(f"{about}: {part!r} does not begin with a name; write NAME[:VALUE][,key=value]")
    if colon and not value:
        raise SpecError(f"{about}: nothing follows the colon in {part!r}")
    return SpecPart(name, value if colon else None, _parse_options(pairs, about, where))


def _parse_options(pairs: list[str], about: str, where: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value or not _KEY.fullmatch(key):
            raise SpecError(f"{about}: {pair!r}{where} is not of the form key=value")
        if key in options:
            raise SpecError(f"{about}: {key!r} is given twice{where}")
        options[key] = value
    return options


def find_named(name: str, known: Mapping[str, Found], kind: str, text: str) -> Found:
    """Return what a name stands for.

    Args:
        name: The name.
        known: All there is, by name.
        kind: The word for it, such as ``scheme``; ``actbench schemes`` lists them.
        text: The specification that the name stands in.

    Raises:
        SpecError: There is no such name; the message has the closest names.
    """
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), known, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    where = "" if text == name else f"{kind} {text!r}: "
    raise SpecError(f"{where}there is no {kind} {name!r}; {hint}'actbench {kind}s' lists all {len(known)}")


def build(cls: type[Built], positional: str | None, part: SpecPart, about: str, see: str = "") -> Built:
    """Build an object of ``cls`` from one part of a specification.

    Args:
        cls: The class of its name; each option fills the field of its key, and ``/`` divides the items of a tuple.
        positional: The field that the value after the colon fills; None if there is none.
        part: The part.
        about: Beginning of a message.
        see: End of a message about a wrong value, unless that message already names a command to run.

    Raises:
        SpecError: A key or value is wrong; the message names it and what is allowed.
    """
    given: dict[str, Any] = dict(part.options)
    if part.value is not None:
        if positional is None:
            raise SpecError(f"{about}: {part.name} takes no value after the colon, found {part.value!r}")
        if positional in given:
            raise SpecError(f"{about}: {positional} is given twice, after the colon and as a key")
        given[positional] = part.value
    for key, value in given.items():
        if key not in cls.model_fields:
            allowed = ", ".join(cls.model_fields) or "none"
            raise SpecError(f"{about}: {part.name} has no key {key!r}; its keys: {allowed}")
        if get_origin(cls.model_fields[key].annotation) is tuple:
            given[key] = tuple(value.split("/"))
    try:
        return cls.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()))
        told = "'actbench " in problems  # the validator already says where to look
        raise SpecError(f"{about}: {problems}{'' if told else see}") from None


def check_sizes(built: BaseModel, about: str) -> None:
    """Check that no float becomes zero or infinity in float32, and that 64 bits hold each integer.

    Args:
        built: An object built from a specification.
        about: Beginning of a message.

    Raises:
        SpecError: A number that the specification gives is too large, or too small and not zero.
    """
    for key in built.model_fields_set:
        value = getattr(built, key)
        if isinstance(value, float) and not (value == 0 or SMALLEST <= abs(value) <= LARGEST):
            raise SpecError(
                f"{about}: {key}={value:g} must be 0, or its magnitude must be from {SMALLEST:g} to {LARGEST:g}"
            )
        if isinstance(value, int) and abs(value) >= COUNT_LIMIT:
            raise SpecError(f"{about}: {key}={value} does not fit 64 bits")


def _problem(error: ErrorDetails) -> str:
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{place} is missing"
    message = error["msg"].removeprefix("Value error, ")
    # without a place, it is about several fields together
    return sentence(f"{place}={error['input']}", message) if place else f"{message[0].lower()}{message[1:]}"


def shortest(name: str, positional: str | None, built: BaseModel) -> str:
    """Return the shortest specification that builds an object: it leaves out defaults.

    Args:
        name: The name in the specification.
        positional: The field that stands after the colon; None if there is none.
        built: The object; its fields are numbers, booleans, texts and tuples of texts.

    Raises:
        SpecError: A text, such as a file name, holds a character of the grammar.
    """
    options: dict[str, str] = {}
    for key, field_info in type(built).model_fields.items():
        value = getattr(built, key)
        if (key == positional and value is not None) or value != field_info.get_default(call_default_factory=True):
            options[key] = _written(value)
            if _SIGNS.search(options[key]):
                raise SpecError(
                    f"{name}: {key}={options[key]!r} cannot be written in a specification; rename it without commas, + "
                    "and spaces at its ends"
                )
    return str(SpecPart(name, options.pop(positional or "", None), options))


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):  # the shortest text that reads back as the same number, without a plus
        return str(value).removesuffix(".0").replace("e+", "e")
    return str(value)
