"""Who made each storage: the line of the user's script, the module that ran, and the operator."""

from __future__ import annotations

import linecache
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules import module as hooks

from actbench.errors import is_users
from actbench.measuring.meters.stepevents import UNKNOWN, Origin
from actbench.model.ledger import OUTSIDE
from actbench.model.timeline import OPTIMIZER
from actbench.tools.script.steps.copies import Copies, Names

_LONGEST_LINE = 60


class Lines:
    """Notes the origin of each storage.

    Outside of forward and backward passes it always does. Inside, it does if ``is_on``: to look for the line of each
    storage takes a third of the time of a step.

    Args:
        folder: Files below it are the user's; with ``script``, the file that was named. Installed packages are not.

    Attributes:
        origins: The origin of each storage, by its name in the tracker's events.
        passes: The line that began the backward pass in which a storage was made, by the same name.
        runs_again: Whether modules ran inside of a backward pass, as those do that are recomputed.
        copies: What was copied outside of forward and backward passes.
        autocast: The types in which autocast computes where gradients are needed.
        fed: Told of the arguments of a module that is part of no other, where gradients are needed.
        ran: Called when such a module has run that has parameters, with gradients or without.
    """

    def __init__(self, folder: Path, script: Path | None = None) -> None:
        self._folder = f"{folder.resolve()}/"
        self._script = None if script is None else str(script.resolve())
        self._own: dict[CodeType, bool] = {}
        self._active: list[nn.Module] = []
        self._paths: dict[int, str] = {}  # by id, until the module is gone
        self._known: dict[int, ref[nn.Module]] = {}
        self._roots: list[ref[nn.Module]] = []
        self._turns: list[tuple[int, str, str]] = [(-1, OUTSIDE, "")]
        self._backward = ""
        self.origins: dict[int, Origin] = {}
        self.passes: dict[int, str] = {}
        self.autocast: dict[str, None] = {}
        self._texts: dict[tuple[str, int], str] = {}
        self.copies = Copies()
        self.is_on = self.runs_again = False
        self.is_updating: Callable[[], bool] = lambda: False
        self.fed: Callable[[Any], object] = lambda arguments: None
        self.ran: Callable[[], object] = lambda: None

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that ran, were part of no other that did, and are still held by the script."""
        return [each for each in (known() for known in self._roots) if each is not None]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block, follow the modules that run."""

        def enter(module: nn.Module, *_: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():  # which calls hooks where compiled code would
                self._enter(module)

        def leave(module: nn.Module, *arguments: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():
                self._leave(arguments[:-1])  # the last is the result

        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
            leaving: Any = hooks.register_module_forward_hook(leave, with_kwargs=True, always_call=True)
            stack.callback(leaving.remove)
            # the handle leaves this entry behind, and torch.compile then warns of hooks on all modules
            stack.callback(hooks._global_forward_hooks_with_kwargs.pop, leaving.id)
            yield

    @contextmanager
    def calling(self, module: nn.Module, arguments: Any) -> Iterator[None]:
        """Follow a module inside the block whose hooks are not called."""
        self._enter(module)
        try:
            yield
        finally:
            self._leave((arguments, {}))

    def made(self, name: int, func: Any) -> None:
        """Note that an operator makes a storage now."""
        operator = "unknown" if func is None else func._schema.name
        node: Node | None = torch._C._current_autograd_node()
        if node is not None:
            self.passes[name] = self._backward
        if node is not None and self.is_on:
            _, module, line = self._turns[bisect_right(self._turns, node._sequence_nr(), key=lambda turn: turn[0]) - 1]
            self.origins[name] = Origin(module, operator, line)
        elif self.is_on or not (self._active or node is not None):
            line, module = self.line(), self._running()
            if not (self._active or node is not None):
                self.copies.made(name)
            if self._active and self._turns[-1][1:] != (module, line):
                # the node of this operator has been made already
                self._turns.append((torch._C._autograd._get_sequence_nr() - 1, module, line))
            self.origins[name] = Origin(module, operator, line)

    def follow(self, given: Any, result: Any, names: Names) -> None:
        """Note the arguments of an operator and its result, before :meth:`made` is told of this."""
        if not self._active and torch._C._current_autograd_node() is None:
            self.copies.follow(given, result, names)

    def begin_pass(self) -> None:
        """Note the line that runs now as that which begins a backward pass."""
        self._backward = self.line()

    def of_gradient(self, name: int, module: str | None = None) -> Origin:
        """Return the origin of a gradient of a module: the line that began its backward pass, else the last one."""
        made = self.origins.get(name, UNKNOWN)
        owner = made.module if module is None else module
        return Origin(owner, made.operator, self.passes.get(name, self._backward))

    def label(self, name: int) -> str:
        """Return the line that made a storage, else its module; empty if neither is known."""
        return self.origins.get(name, UNKNOWN).label

    def line(self) -> str:
        """Return the innermost line of the user's that runs now; empty if none does."""
        for frame in self.frames():
            return self.text(frame.f_code.co_filename, frame.f_lineno)
        return ""

    def frames(self) -> Iterator[FrameType]:
        """Yield the frames of the user's code that runs now, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code not in self._own:
                self._own[code] = self._is_own(code.co_filename)
            if self._own[code]:
                yield frame
            frame = frame.f_back

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module in the model that it is part of."""
        return self._paths.get(id(module), type(module).__name__)

    def _is_own(self, file: str) -> bool:
        found = str(Path(file).resolve()) if file and not file.startswith("<") else ""
        if found == self._script:
            return True
        return found.startswith(self._folder) and is_users(file)

    def text(self, file: str, number: int) -> str:
        """Return a line of a file as it is shown: the file's name, its number and its words, cut short."""
        known = self._texts.get((file, number))
        if known is None:
            text = linecache.getline(file, number).strip()
            shown = f"{text[: _LONGEST_LINE - 1]}…" if len(text) > _LONGEST_LINE else text
            known = self._texts[file, number] = f"{Path(file).name}:{number} {shown}".rstrip()
        return known

    def _running(self) -> str:
        if self._active:
            return self.path_of(self._active[-1])
        return OPTIMIZER if self.is_updating() else OUTSIDE

    def _enter(self, module: nn.Module) -> None:
        module = module._modules.get("_orig_mod") or module  # the first is in what torch.compile returns
        if torch._C._current_autograd_node() is not None:
            self.runs_again = True
        elif not self._active and id(module) not in self._paths:
            self._add_root(module)
        self._active.append(module)
        if torch.is_grad_enabled():  # an evaluation may have an autocast of its own
            # of a simulated card the CPU's autocast computes, whose type is then that of CUDA
            device = next((each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each)), None)
            if device is not None:
                self.autocast[str(torch.get_autocast_dtype(device)).removeprefix("torch.")] = None

    def _leave(self, arguments: Any) -> None:
        left = self._active.pop()
        if not self._active and torch._C._current_autograd_node() is None:
            if _is_model(left):
                self.ran()
            if torch.is_grad_enabled():
                self.fed(arguments)

    def _add_root(self, module: nn.Module) -> None:
        """Name the modules inside of one that runs by itself; a part of another keeps its name there."""
        if not _is_model(module):
            self._name(module, type(module).__name__)
            return
        self._roots.append(ref(module))
        prefix = "" if len(self.roots) == 1 else f"{type(module).__name__}."
        for path, part in module.named_modules():
            self._name(part, f"{prefix}{path}".rstrip("."))

    def _name(self, module: nn.Module, path: str) -> None:
        """Give a module a path, unless it has one; another module may have its id once it is gone."""

        def forget(gone: ref[nn.Module], key: int = id(module)) -> None:
            if self._known.get(key) is gone:
                del self._known[key], self._paths[key]

        if id(module) not in self._paths:
            self._paths[id(module)], self._known[id(module)] = path, ref(module, forget)


def _is_model(module: nn.Module) -> bool:
    """Return whether a module is no loss and no transform: those have no parameters."""
    return next(module.parameters(), None) is not None
