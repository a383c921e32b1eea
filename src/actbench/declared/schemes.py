"""What the files of the schemes declare, read without importing them, since they import torch, which takes seconds.

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

from actbench import spec

_FOLDER = Path(__file__).parents[1] / "schemes"
_WITHOUT_TORCH = ("typing", "collections", "functools", "math", "re", "pydantic", "actbench.results", "actbench.units")
_ROOT = "Data"  # the base of the first class, without fields
_ANNOTATIONS = __future__.annotations.compiler_flag


@dataclass
class _Class:
    """A class of a file: its bases, its texts such as ``name``, and the types of its fields."""

    bases: list[str]
    texts: dict[str, str] = field(default_factory=dict)
    types: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Scheme:
    """The fields of a scheme as a model, and the one that the value after the colon fills.

    The model is None if some of the fields are declared elsewhere.
    """

    model: type[BaseModel] | None
    positional: str | None


def check_scheme(text: str) -> None:
    """Check a specification of schemes, as far as can be known without torch.

    Raises:
        SpecError: A name, key or value is wrong; the message is the one of building the scheme.
    """
    for part in spec.parse(text):
        found = spec.find(part.name, _schemes(), "scheme", text)
        if found.model is None:
            continue
        about = f"scheme {text!r}"
        try:
            built = spec.build(found.model, found.positional, part, about, f" (see 'actbench schemes {part.name}')")
        except NameError:  # of a validator that reads what was not imported
            continue
        spec.check_sizes(built, about)


@functools.cache
def _schemes() -> dict[str, _Scheme]:
    classes: dict[str, _Class] = {}
    for path in sorted(_FOLDER.glob("*.py")):
        classes |= _classes_of(path)
    found: dict[str, _Scheme] = {}
    for name in classes:
        family = _family(name, classes)
        texts = {key: text for each in family for key, text in each.texts.items()}
        if texts.get("name") and classes["Scheme"] in family:
            types: dict[str, Any] = {key: (kind, None) for each in family for key, kind in each.types.items()}
            whole = all(base in (*classes, _ROOT) for each in family for base in each.bases)
            found[texts["name"]] = _Scheme(create_model(name, **types) if whole else None, texts.get("positional"))
    return dict(sorted(found.items()))


def _family(name: str, classes: dict[str, _Class]) -> list[_Class]:
    """Return a class and those it is derived from, the first ones first."""
    known = classes.get(name)
    if known is None:
        return []
    above = [each for base in known.bases for each in _family(base, classes)]
    return [*above, known]


def _classes_of(path: Path) -> dict[str, _Class]:
    names: dict[str, Any] = {}
    found: dict[str, _Class] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = _class_of(node, names)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").startswith(_WITHOUT_TORCH):
                module = importlib.import_module(node.module or "")
                names |= {each.asname or each.name: getattr(module, each.name) for each in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef):
            _run(node, names)
    return found


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
            found.types[key] = Any if key in converted else _type(annotation, names)
        elif isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            found.texts[key] = statement.value.value
    return found


def _type(annotation: str, names: dict[str, Any]) -> Any:
    try:
        return eval(annotation, names)
    except (NameError, AttributeError):
        return Any


def _converted(function: ast.FunctionDef) -> set[str]:
    """Return the fields that a validator may convert before their types are checked."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and any(keyword.arg == "mode" for keyword in decorator.keywords):
            return {str(argument.value) for argument in decorator.args if isinstance(argument, ast.Constant)}
    return set()
