"""What the files of actbench's own schemes declare, read without importing them, which would import torch.

So a wrong name or key, and most wrong values, are refused at once. Values that only torch's half of the package can
judge are refused when the scheme is built.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model

from actbench import plugins
from actbench.errors import SpecError
from actbench.model import spec
from actbench.plugins import Plugin

_WITHOUT_TORCH = ("typing", "collections", "functools", "math", "re", "pydantic", "actbench.model", "actbench.units")
_ROOT = "Data"  # the base of the first class, without fields
_UNKNOWN = object()
_ANNOTATIONS = __future__.annotations.compiler_flag


@dataclass
class _Class:
    """A class of a file: its bases, its texts such as ``name``, and the types and defaults of its fields."""

    bases: list[str]
    texts: dict[str, str] = field(default_factory=dict)
    types: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Of fields whose default is known here."""


@dataclass(frozen=True)
class _Scheme:
    """The fields of a scheme as a model, and the one that the value after the colon fills.

    The model is None if some of the fields are declared elsewhere.
    """

    model: type[BaseModel] | None
    positional: str | None
    is_whole: bool = False
    """Whether the defaults of all fields are known."""


def check_scheme(text: str) -> None:
    """Check a specification of schemes, as far as can be known without torch.

    Raises:
        SpecError: A name, key or value is wrong; the message is the one of building the scheme.
    """
    parts = spec.parse_spec(text)
    for part in parts:
        found = spec.find_named(part.name, _schemes(), "scheme", text)
        if found.model is None:
            continue
        about = f"scheme {text!r}"
        try:
            built = spec.build(found.model, found.positional, part, about, f" (see 'actbench schemes {part.name}')")
        except NameError:  # of a validator that reads what was not imported
            continue
        spec.check_sizes(built, about)
    spec.check_apart([(part.name, "only" in part.options) for part in parts], text)


def spelled(text: str) -> tuple[str, ...] | None:
    """Return the parts of a specification as records have them, sorted; None if that is not known without torch.

    Equal parts are equal schemes. Unequal parts may be, where a scheme changes what it is given.
    """
    found = []
    for part in spec.parse_spec(text):
        scheme = _schemes().get(part.name)
        if scheme is None or scheme.model is None or not scheme.is_whole:
            return None
        try:
            built = spec.build(scheme.model, scheme.positional, part, text)
            found.append(spec.shortest(part.name, scheme.positional, built))
        except (NameError, SpecError):
            return None
    return tuple(sorted(found))


@functools.cache
def _schemes() -> dict[str, _Scheme]:
    return {name: _declared(plugin) for name, plugin in plugins.installed("schemes").items()}


def _declared(plugin: Plugin) -> _Scheme:
    """Return what the file of a scheme declares.

    Files of other packages are not read: they may declare a scheme in any way that Python has. Their values are judged
    when the scheme is built.
    """
    file = plugin.source() if plugin.is_ours else None
    family = None if file is None else _family(file, plugin.entry.attr)
    if family is None:
        return _Scheme(None, None)
    defaults = {key: value for each in family for key, value in each.defaults.items()}
    types: dict[str, Any] = {key: (kind, defaults.get(key)) for each in family for key, kind in each.types.items()}
    texts = {key: text for each in family for key, text in each.texts.items()}
    return _Scheme(
        create_model(plugin.name, **types), texts.get("positional"), is_whole=types.keys() <= defaults.keys()
    )


def _family(file: Path, name: str) -> list[_Class] | None:
    """Return a class and those it is derived from, the first ones first; None if one is declared out of sight."""
    classes, imported = _read(file)
    if name in classes:
        found = classes[name]
        # pydantic takes the fields of the last base first
        above = [[] if base == _ROOT else _family(file, base) for base in reversed(found.bases)]
        return None if None in above else [*(each for family in above for each in family or ()), found]
    home = plugins.source_of(imported[name]) if name in imported else None
    return None if home is None or home == file else _family(home, name)


@functools.cache
def _read(file: Path) -> tuple[dict[str, _Class], dict[str, str]]:
    """Return the classes of a file, and the module of each name that it imports."""
    names: dict[str, Any] = {}
    found: dict[str, _Class] = {}
    imported: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = _class_of(node, names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {each.asname or each.name: node.module for each in node.names}
            if node.module.startswith(_WITHOUT_TORCH):
                module = importlib.import_module(node.module)
                names |= {each.asname or each.name: getattr(module, each.name) for each in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef):
            _run(node, names)
    return found, imported


def _run(node: ast.stmt, names: dict[str, Any]) -> None:
    """Run a statement of a file; one that reads what was not imported is left out."""
    try:
        exec(compile(ast.Module([node], []), "schemes", "exec", _ANNOTATIONS), names)
    except (NameError, AttributeError):
        return


def _class_of(node: ast.ClassDef, names: dict[str, Any]) -> _Class:
    found = _Class([base.id for base in node.bases if isinstance(base, ast.Name)])
    converted = {key for function in node.body if isinstance(function, ast.FunctionDef) for key in _converted(function)}
    for statement in node.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        key, annotation = statement.target.id, ast.unparse(statement.annotation)
        if not annotation.startswith("ClassVar"):
            found.types[key] = Any if key in converted else _evaluated(annotation, names, Any)
            value = ast.unparse(statement.value) if statement.value else "None"  # one must be given
            if (default := _evaluated(value, names, _UNKNOWN)) is not _UNKNOWN:
                found.defaults[key] = default
        elif isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            found.texts[key] = statement.value.value
    return found


def _evaluated(expression: str, names: dict[str, Any], otherwise: Any) -> Any:
    """Return the value of an expression of a file; ``otherwise`` if it reads what was not imported."""
    try:
        return eval(expression, names)
    except (NameError, AttributeError):
        return otherwise


def _converted(function: ast.FunctionDef) -> set[str]:
    """Return the fields that a validator may convert before their types are checked."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and any(keyword.arg == "mode" for keyword in decorator.keywords):
            return {str(argument.value) for argument in decorator.args if isinstance(argument, ast.Constant)}
    return set()
