"""Checks of a user's training script before it runs: that it is there, and that it is Python."""

from __future__ import annotations

import ast
import os
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from actbench.errors import UsageError
from actbench.model.records import Case
from actbench.model.scripts import Script, spec_of
from actbench.paths import read_bytes
from actbench.run.recipes.sections import Planned
from actbench.units import MIB

BENCH: Final = "actbench.tools.script.bench"
"""The module that runs scripts, in processes of their own."""

FOLLOWED_UP: Final = "actbench.tools.script.followup"
"""As :data:`BENCH`, and with more simulations, which answer what is asked next."""

FULLY_ANSWERED: Final = "actbench.tools.script.fullanswer"
"""As :data:`FOLLOWED_UP`, however long these simulations take."""

MOST_BYTES = 16 * MIB
"""Largest script that is read."""


_AFTER_OPTIONS = (
    "after the options of actbench run comes the script, and then its own arguments: actbench run --device-profile "
    "rtx-4090 train.py --lr 3e-4"
)


def name_and_title(case: Case, specs: Sequence[str]) -> tuple[str, str]:
    """Return what a script's results are stored as, whatever its arguments, and the title of its tables."""
    script = case.script
    name = case.model if script is None else script.target if script.is_module else Path(script.target).stem
    return name, f"What does each scheme save on {case.model}?" if specs else case.model


def written(case: Case, specs: Sequence[str]) -> tuple[Planned[Case], ...]:
    """Return the cases of a script: unchanged, and with each scheme as the user wrote it."""
    asked = ["exact", *(spec for spec in specs if spec != "exact")]
    return tuple(Planned(case.model_copy(update={"scheme": spec})) for spec in asked)


def check_script(script: Script, usage: str = _AFTER_OPTIONS) -> None:
    """Check that a script can be run, without running it.

    ``usage`` says where it is named.

    Raises:
        UsageError: It is not there, no file of Python, or cannot be parsed; or the module cannot be found.
    """
    file, target = script.file, script.target
    if file is None:
        raise UsageError(f"-m {target}: {_why_no_module(target)}")
    if not script.is_module and re.fullmatch(r"python[0-9.]*", os.path.basename(target)):
        raise UsageError(f"{target}: leave this word out, since actbench starts Python itself; {usage}")
    if not script.is_module and os.path.isdir(file):
        raise UsageError(f"{target} is a folder: name the script in it, such as {os.path.join(target, 'train.py')}")
    if not os.path.exists(file):
        raise UsageError(f"{target}: there is no such file; {usage}")
    if not file.endswith(".py"):
        if script.is_module:
            return  # a module that was compiled before
        raise UsageError(f"{target} is not a Python script: name a file that ends in .py, or a module by -m")
    _parse(file, f"-m {target}" if script.is_module else target)


def misplaced(script: Script, options: Mapping[str, bool]) -> dict[int, tuple[str, ...]]:
    """Return the words of actbench's options, with their values, by the option's place in a script's arguments.

    ``options`` says of each of actbench's options, such as ``--device-profile``, whether it takes a value. An option
    counts as the script's own if its file has the name, as text or as a variable. One that lacks its value has no
    words.
    """
    given = script.arguments
    names = [text.partition("=")[0] for text in given]
    found = [place for place, name in enumerate(names) if name.startswith("--") and name in options]
    source = read_bytes(Path(script.file), MOST_BYTES).decode(errors="replace") if found and script.file else ""
    variables = source.replace("_", "-")
    places: dict[int, tuple[str, ...]] = {}
    for place in found:
        name = names[place]
        if not re.search(rf"\b{re.escape(name.strip('-'))}\b", variables):
            takes_next = options[name] and name == given[place]
            words = given[place : place + 1 + takes_next]
            is_whole = not takes_next or (len(words) > 1 and not words[1].startswith("--"))
            places[place] = words if is_whole else ()
    return places


def with_options(
    typed: Sequence[str], script: Script, more: Sequence[str], moved: Mapping[int, Sequence[str]] | None = None
) -> str:
    """Return a command with more options before the script, among them those that stand in the script's arguments.

    ``typed`` are the words of the command after ``actbench``; ``moved`` are those of :func:`misplaced`. One without
    words is left out.
    """
    end = len(typed) - len(script.arguments)
    begin = end - (2 if typed[end - 2] in ("-m", "--module") else 1)
    front, moved = typed[:begin], moved or {}
    if front[-1] == "--":  # what comes after it is not an option
        front = front[:-1]
    gone = {place + step for place, words in moved.items() for step in range(len(words) or 1)}
    behind = [text for place, text in enumerate(script.arguments) if place not in gone]
    options = [word for words in moved.values() for word in words]
    return shlex.join(["actbench", *front, *more, *options, *typed[begin:end], *behind])


def _why_no_module(name: str) -> str:
    if spec_of(name) is not None:
        return (
            f"'python -m {name}' runs nothing, since there is no {name}.__main__: name the module to run, as by "
            "python -m"
        )
    return (
        "there is no module of this name here: check the spelling, start from the folder that holds it, or install its "
        "package into the environment of actbench"
    )


def _parse(file: str, name: str) -> None:
    try:
        source = read_bytes(Path(file), MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    try:
        with warnings.catch_warnings(action="ignore"):  # the script itself gives them
            ast.parse(source, file)
    except SyntaxError as error:
        raise UsageError(_syntax_error(error, file)) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; nested too deeply
        raise UsageError(f"{name} cannot be parsed: {error or 'it is nested too deeply'}") from None


def _syntax_error(error: SyntaxError, file: str) -> str:
    """Return what Python says of a syntax error, with the line and a caret below the place."""
    place = file if error.lineno is None else f"{file}:{error.lineno}"
    told = f"{place}: {type(error).__name__}: {error.msg}"
    if error.text is None or error.offset is None:
        return told
    line = error.text.rstrip("\n").expandtabs(1)
    blanks = len(line) - len(line.lstrip())
    return f"{told}\n    {line.lstrip()}\n    {' ' * max(0, error.offset - 1 - blanks)}^"
