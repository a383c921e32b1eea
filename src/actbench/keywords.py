"""Refuses keywords that a public function does not take, and names the closest that it takes."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from actbench.errors import UsageError


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a UsageError if a function is called with a keyword that it does not take."""
    allowed = list(dict.fromkeys(known))
    for name in given:
        if name not in allowed:
            longer = [each for each in allowed if each.startswith(name)]
            close = longer[:1] or difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"{function}: there is no keyword {name!r}; {hint}allowed: {', '.join(allowed)}")


def checking(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that checks its keywords first; ``name`` is what users call it by."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return function  # only it knows what it takes
    known = [each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY]

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        if not keywords.keys() <= set(known):
            check_keywords(name, keywords, known)
        return function(*args, **keywords)

    return checked
