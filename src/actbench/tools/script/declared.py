"""Checks of a user's training script before it runs: that it is there, and that it is Python."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path

from actbench.errors import UsageError
from actbench.model.scripts import Script, spec_of
from actbench.paths import read_bytes
from actbench.units import MIB

MOST_BYTES = 16 * MIB
"""Largest script that is read."""


_AFTER_OPTIONS = (
    "after the options of actbench run comes the script, and then its own arguments: actbench run --device-profile "
    "rtx-4090 train.py --lr 3e-4"
)


def check_script(script: Script, usage: str = _AFTER_OPTIONS) -> None:
    """Check that a script can be run; nothing of it is.

    ``usage`` says where it is named.

    Raises:
        UsageError: It is not there, no file of Python, or cannot be parsed; or the module cannot be found.
    """
    file, target = script.file, script.target
    if file is None:
        raise UsageError(f"-m {target}: {_why_no_module(target)}")
    if not script.is_module and os.path.isdir(file):
        raise UsageError(f"{target} is a folder: name the script in it, such as {os.path.join(target, 'train.py')}")
    if not os.path.exists(file):
        raise UsageError(f"{target}: there is no such file; {usage}")
    if not file.endswith(".py"):
        if script.is_module:
            return  # a module that was compiled before
        raise UsageError(f"{target} is no Python script: name a file that ends in .py, or a module by -m")
    _parse(file, f"-m {target}" if script.is_module else target)


def misplaced(script: Script, options: Collection[str]) -> list[str]:
    """Return which of actbench's options, such as ``--device-profile``, a script is given that it does not name itself.

    An option counts as the script's own if its file has the name, as text or as a variable.
    """
    given = dict.fromkeys(text.partition("=")[0] for text in script.arguments)
    found = [text for text in given if text.startswith("--") and text in options]
    source = read_bytes(Path(script.file), MOST_BYTES).decode(errors="replace") if found and script.file else ""
    words = source.replace("_", "-")
    return [text for text in found if not re.search(rf"\b{re.escape(text.strip('-'))}\b", words)]


def _why_no_module(name: str) -> str:
    if spec_of(name) is not None:
        return (
            f"'python -m {name}' runs nothing, since there is no {name}.__main__: name the module that is run, as by "
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
        raise UsageError(_told(error, file)) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; nested too deeply
        raise UsageError(f"{name} cannot be parsed: {error or 'it is nested too deeply'}") from None


def _told(error: SyntaxError, file: str) -> str:
    """Return what Python says of a syntax error, with the line and a caret below the place."""
    place = file if error.lineno is None else f"{file}:{error.lineno}"
    told = f"{place}: {type(error).__name__}: {error.msg}"
    if error.text is None or error.offset is None:
        return told
    line = error.text.rstrip("\n").expandtabs(1)
    blanks = len(line) - len(line.lstrip())
    return f"{told}\n    {line.lstrip()}\n    {' ' * max(0, error.offset - 1 - blanks)}^"
