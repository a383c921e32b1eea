"""Functions of a user's own file that build models, read without running the file."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from actbench.errors import ModelError
from actbench.model.modelspecs import is_function
from actbench.paths import MOST_BYTES, from_home, read_bytes

_BINDING = {"*", "__dict__", "__getattr__", "__import__", "exec", "globals", "import_module", "sys.modules", "vars"}
"""What may give a file names that stand nowhere in it."""


def check_function(spec: str, *, elsewhere: bool = False) -> None:
    """Check that the file of ``file.py:function`` is there and binds the function's name.

    Other specifications are not looked at, and neither is what only running the file can tell. With ``elsewhere``, an
    absolute path is one of another machine.

    Raises:
        ModelError: There is no such file or name; the message is that of loading the model.
    """
    if not is_function(spec):
        return
    file, _, name = spec.rpartition(":")
    path = from_home(file)
    if elsewhere and path.is_absolute():
        return
    if not os.path.isfile(path):
        raise no_file(spec, path)
    tree = _parsed(path)
    if tree is not None and name not in _bound(tree) and not _may_bind_more(tree):
        raise no_function(spec, path, name)


def no_file(spec: str, path: Path) -> ModelError:
    """Return the error about a file that does not exist, with the Python files of the folder that it may be."""
    try:
        beside = sorted(each[:-3] for each in os.listdir(path.parent) if each.endswith(".py"))
    except OSError:
        beside = []
    return ModelError(f"model {spec!r}: there is no file {path}{_hint(path.stem, beside, '.py')}")


def no_function(spec: str, path: Path, name: str) -> ModelError:
    """Return the error about a file that lacks a function, with those functions of it that may be meant."""
    tree = _parsed(path)
    functions = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)] if tree else []
    return ModelError(f"model {spec!r}: {path} has no function {name!r}{_hint(name, functions)}")


def _hint(name: str, known: Iterable[str], suffix: str = "") -> str:
    close = [f"{each}{suffix}" for each in difflib.get_close_matches(name, list(known), n=3)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _parsed(path: Path) -> ast.Module | None:
    """Return the code of a file; None if it cannot be read or parsed, which running it says with the line."""
    try:
        return ast.parse(read_bytes(path, MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _bound(tree: ast.Module) -> set[str]:
    """Return every name that a file binds anywhere, at its top or not: by definition, import or assignment."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
    return found


def _may_bind_more(tree: ast.Module) -> bool:
    """Whether a file takes all names of another, or does what may bind names that do not stand in it."""
    used = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute | ast.alias | ast.FunctionDef))
    return any(_called(node) in _BINDING for node in used)


def _called(node: ast.Name | ast.Attribute | ast.alias | ast.FunctionDef) -> str:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) if node.attr == "modules" else node.attr  # those of sys, and not of a model
    return node.id if isinstance(node, ast.Name) else node.name
