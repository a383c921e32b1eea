"""The parts of a model that ``only=encoder.layer.[0-5]/lm_head`` limits a scheme to.

A pattern is the path of a module or, if no module has that path, the end of one: ``layer.3`` is then
``encoder.layer.3``. If no path ends so, it is the name of a class, or of one that it derives from: ``LayerNorm``. ``*``
stands for any text in one name, ``[0-5]`` for a number from 0 to 5. A named module includes all modules inside it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Final

from torch import nn

from actbench.errors import ConversionError, NothingToConvertError
from actbench.packing.refusals import is_compiled

_SYNTAX = re.compile(r"(?:[\w*-]|\[\d+-\d+\])+(?:\.(?:[\w*-]|\[\d+-\d+\])+)*")
_SPECIAL = re.compile(r"(\*+|\[\d+-\d+\])")
_MOST_SPECIAL = 50  # stars and ranges of a pattern; no module's path has as many names
_MOST_NUMBERS = 10_000  # of all ranges of a pattern, each of which is written out
MOST_PATTERNS: Final = 2000
"""Patterns of one ``only=``; each is compared with the path of every module."""


def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression that matches the paths of a pattern.

    Raises:
        ValueError: The pattern is malformed, or has more stars, ranges or numbers in them than any path needs.
    """
    if not _SYNTAX.fullmatch(pattern):
        raise ValueError(f"{pattern!r} is no path of a module: write names and dots, * for any name, [0-5] for numbers")
    tokens = _SPECIAL.split(pattern)
    if len(tokens) // 2 > _MOST_SPECIAL:
        raise ValueError(f"a pattern has at most {_MOST_SPECIAL} stars and ranges, and this one {len(tokens) // 2}")
    numbers = sum(map(_numbers, tokens[1::2]))
    if numbers > _MOST_NUMBERS:
        raise ValueError(f"the ranges of a pattern have at most {_MOST_NUMBERS} numbers in all, and these {numbers}")
    first, *behind_stars = re.split(r"\0", "".join("\0" if "*" in token else _expression(token) for token in tokens))
    # What stands between two stars is the first of its kind, for good: a search that went back would take a time that
    # grows with each star as the length of a name does.
    between = "".join(f"(?>[^.]*?{text})" for text in behind_stars[:-1])
    return re.compile(first + between + "".join(f"[^.]*{text}" for text in behind_stars[-1:]))


def _numbers(token: str) -> int:
    """Return how many numbers a range has; 0 for stars."""
    if token.startswith("*"):
        return 0
    first, last = map(int, token[1:-1].split("-"))
    if last < first:
        raise ValueError(f"{token} must be a range from a smaller to a larger number")
    return last - first + 1


def _expression(token: str) -> str:
    if not token.startswith("["):
        return re.escape(token)
    first, last = map(int, token[1:-1].split("-"))
    return f"(?:{'|'.join(map(str, range(first, last + 1)))})"


def parts_of(model: nn.Module, only: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """Return path and module of each part that patterns name; a module inside another part is no separate part.

    In a list or a dict of modules, which has no forward, each module is a part.

    Raises:
        NothingToConvertError: A pattern names no module; the message has the closest paths.
        ConversionError: A part is compiled.
    """
    modules = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    named: set[str] = set()
    for pattern in only:
        found = _named(pattern, modules)
        if not found:
            near = _nearest(pattern, modules)
            held = f"some of its modules: {', '.join(near)}" if near else "it holds no other module"
            raise NothingToConvertError(f"only={pattern} names no module of {type(model).__name__}; {held}")
        named.update(found)
    parts: dict[nn.Module, str] = {}
    for path in sorted(named, key=list(modules).index):
        if not any(path.startswith(f"{other}.") for other in named):
            for place, part in _called(path, modules[path]):
                parts.setdefault(part, place)
    for place in parts.values():
        _refuse_compiled(place, model, modules)
    return [(place, part) for part, place in parts.items()]


def _named(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    expression = compiled(pattern)
    end = re.compile(rf"(?:.*\.){expression.pattern}")
    found = list(filter(expression.fullmatch, modules)) or list(filter(end.fullmatch, modules))
    return found or [path for path, module in modules.items() if any(map(expression.fullmatch, _classes(module)))]


def _classes(module: nn.Module) -> list[str]:
    """Return the names of a module's class and of those that it derives from, but for ``Module`` itself."""
    return [kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]


def _nearest(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    """Return the paths whose ends, of as many names, are most like a pattern, or the first paths."""
    names = pattern.count(".") + 1
    ends = {".".join(path.split(".")[-names:]): path for path in reversed(modules)}
    close = difflib.get_close_matches(pattern, ends, n=3, cutoff=0.5)
    return [ends[end] for end in close] or list(modules)[:5]


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, or the modules in it if it is only a container."""
    if type(module).forward is not nn.Module.forward:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _called(f"{path}.{name}", child)


def _refuse_compiled(path: str, model: nn.Module, modules: dict[str, nn.Module]) -> None:
    names = path.split(".")
    around = [model, *(modules[".".join(names[: count + 1])] for count in range(len(names)))]
    if any(map(is_compiled, around)):
        raise ConversionError(f"only=: {path} is compiled; convert first, and compile then")


def common_part(model: nn.Module, first: tuple[str, ...], second: tuple[str, ...]) -> str | None:
    """Return the path of the first module that is in a part of both, or None."""
    ours, theirs = ([set(part.modules()) for _, part in parts_of(model, only)] for only in (first, second))
    common = {module for one in ours for other in theirs for module in one & other}
    return next((path for path, module in model.named_modules() if module in common), None)


def replace_part(model: nn.Module, part: nn.Module, new: nn.Module) -> None:
    """Replace a part by a module, wherever the part stands in the model."""
    for module in list(model.modules()):  # the new module may hold the part
        for name, child in module._modules.items():
            if child is part:
                module._modules[name] = new
