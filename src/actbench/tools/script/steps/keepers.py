"""The line of a script that keeps what its steps make: the variable from which that can be reached, and who fills it.

A list of outputs holds its tensors itself. A list of losses, or their sum, holds them by graphs: nodes of autograd are
followed too, and what they saved is read as it was packed, so that no hook unpacks it.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from inspect import CO_NEWLOCALS
from itertools import islice
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from actbench.errors import is_users
from actbench.measuring.meters.peak import Event
from actbench.model.measured import GrowthKind
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.growth import Keeper, left_alive
from actbench.tools.script.steps.lines import Lines
from actbench.tools.script.steps.reading import Names

_FEWEST = 3
"""Steps that must have ended, each with more bytes alive than the one before."""

_MOST_OBJECTS = 100_000
"""Objects that are looked at, which takes some 0.2 s."""

_LATEST = 256
"""Elements of a container that are looked at: what steps leave there is at its end."""

_FILLING = frozenset(("add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update"))
"""Methods by which a container gets elements."""


class Holder(NamedTuple):
    """How a tensor is reached: the last name on the way to it, the file of the user's that uses it, and what it is.

    ``variable`` is the script's own name for an object of a library, of which ``name`` is an attribute.
    """

    name: str
    file: str
    kind: GrowthKind = "container"
    variable: str | None = None


class Keepers:
    """Looks for the line that keeps what steps leave, while the frames of the script are alive.

    Args:
        names: Tells the storages of tensors.
        lines: Tells which frames are the user's.

    Attributes:
        found: What keeps it; None while that is not known.
    """

    def __init__(self, names: Names, lines: Lines) -> None:
        self._names, self._lines = names, lines
        self.found: Keeper | None = None

    def look(self, steps: Sequence[Step], events: Sequence[Event], kept: Set[int]) -> None:
        """Look for what holds most of the bytes that the last steps left, if each left some.

        Args:
            steps: The steps that have ended; the last has just ended.
            events: All events.
            kept: Names of weights, gradients and optimizer state.
        """
        last = steps[-_FEWEST:]
        if self.found or len(last) < _FEWEST or not all(map(Step.has_grown_from, last[1:], last)):
            return
        left = {
            name: amount for name, born, amount in left_alive(events, kept) if last[0].begun <= born < last[-1].begun
        }
        frames = list(self._lines.frames())
        held: Counter[Holder] = Counter()
        for holder, tensor in _reached(frames):
            for name in self._names.names([tensor]) & left.keys():
                held[holder] += left.pop(name)
        variables: Counter[tuple[str, str]] = Counter()  # one may hold outputs, and graphs behind them
        for holder, amount in held.items():
            variables[holder.name, holder.file] += amount
        if not held or 2 * variables.most_common(1)[0][1] < sum(left.values()) + held.total():
            return
        most = variables.most_common(1)[0][0]
        holder = max((each for each in held if each[:2] == most), key=held.__getitem__)
        codes = [frame.f_code for frame in frames]
        files = dict.fromkeys([holder.file, *(code.co_filename for code in codes)])
        places: list[tuple[str, int]] = []
        for held_by in dict.fromkeys((holder.name, holder.variable or holder.name)):
            # of two variables of one name, that of a function that runs is meant
            places += [
                (code.co_filename, number) for code in codes for number in _filling(code.co_filename, held_by, code)
            ]
            places += [(file, number) for file in files for number in _filling(file, held_by)]
        line = next((self._lines.text(*place) for place in places), holder.variable or holder.name)
        self.found = Keeper(line, holder.kind)


def _reached(frames: Iterable[FrameType]) -> Iterator[tuple[Holder, Tensor]]:
    """Yield the tensors that variables of frames hold, the nearest first, each once."""
    waiting: deque[tuple[Holder, Any]] = deque()
    for frame in frames:
        found = {**frame.f_globals, **frame.f_locals}
        if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_NEWLOCALS:
            frame.f_locals.clear()  # the frame would keep this copy of its variables, and what the script deletes
        waiting += ((Holder(name, frame.f_code.co_filename), value) for name, value in found.items())
    # with the objects: a node of autograd is made when it is asked for, and its id comes again
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST_OBJECTS:
        holder, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if issubclass(type(value), Tensor):
            yield holder, value
            value = value.grad_fn
        with suppress(Exception):  # of objects that compute their attributes or elements
            waiting.extend(_inside(holder, value))


def _inside(holder: Holder, value: Any) -> Iterator[tuple[Holder, Any]]:
    """Yield what an object holds, of a long container only its last elements."""
    kind = type(value)
    if issubclass(kind, Node):
        holder = holder._replace(kind="graph")
        yield from ((holder, node) for node, _ in value.next_functions)
        for name in (each for each in dir(kind) if each.startswith("_raw_saved")):
            with suppress(RuntimeError):  # of a graph that a backward pass has freed
                one = getattr(value, name)
                saved = one if isinstance(one, tuple | list) else [one]
                yield from ((holder, each.data) for each in saved if each is not None)
    elif issubclass(kind, dict):
        yield from ((holder, each) for each in islice(reversed(dict.values(value)), _LATEST))
    elif issubclass(kind, list | tuple | deque):
        yield from ((holder, each) for each in islice(reversed(value), _LATEST))
    elif issubclass(kind, set | frozenset):
        yield from ((holder, each) for each in islice(value, _LATEST))
    elif issubclass(kind, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # of a cell that is empty still
                yield Holder(name, value.__code__.co_filename), cell.cell_contents
    elif issubclass(kind, MethodType):
        yield holder, value.__self__
    elif not issubclass(kind, type | ModuleType):
        owner = _owner(holder, kind)
        yield from ((owner._replace(name=name), each) for name, each in getattr(value, "__dict__", {}).items())


def _owner(holder: Holder, kind: type[Any]) -> Holder:
    """Return how attributes of an object of a class are reached, with the name of the object in place of theirs."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or holder.file
    if file == holder.file or is_users(file):
        return Holder(holder.name, file)
    is_plain = kind.__module__.partition(".")[0] in sys.stdlib_module_names  # as a namespace
    what: GrowthKind = holder.kind if is_plain else "library"
    return holder._replace(variable=holder.variable or holder.name, kind=what)


def _filling(file: str, name: str, code: CodeType | None = None) -> Iterator[int]:
    """Yield the numbers of the lines of a file that add something to what a variable or an attribute holds.

    With ``code``, a function of the file, only its lines.
    """
    lines = {line for _, _, line in code.co_lines() if line is not None} if code else None
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # of no file of Python, as a cell with magics
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=changed, attr=method)) if method in _FILLING:
                pass
            case ast.AugAssign(target=changed) | ast.Assign(targets=[ast.Subscript() as changed]):
                pass
            case ast.Assign(targets=[ast.Name() | ast.Attribute() as changed], value=value) if any(
                _name(each) == name for each in ast.walk(value)
            ):
                pass
            case _:
                continue
        if _name(changed) == name and (lines is None or node.lineno in lines):
            yield node.lineno


def _name(node: ast.AST) -> str | None:
    """Return the last name of an expression that leads to an object, without its subscripts."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
