"""Intercepts activations that a model calls as functions, while the modules that call them run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils._python_dispatch import _disable_current_modes

from actbench.errors import ConversionError
from actbench.methods.fewbit.called.code import functions_called
from actbench.methods.fewbit.called.functions import FUNCTIONS, Call, Called, Settings
from actbench.methods.fewbit.piecewise import Piecewise
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.refusals import is_compiled, refuse_compiling
from actbench.packing.wrapped import checkpoint_hook, has_own_functions, held_in_graphs

StandIn = Callable[[nn.Module, Tensor | None], nn.Module | None]
"""From a layer of torch, and a tensor on its device, to the layer that saves less; None for one that stays."""


class _Left(threading.local):  # and no ContextVar, of which torch.compile in torch 2.11 makes no graph
    is_running = False


_left = _Left()


class CalledForward(ReboundForward):
    """A forward in which layers that save less compute the called activation functions.

    So functions save the same bytes and have the same gradients as layers. It makes no difference whether the module
    itself or one inside it calls a function. Nothing is registered on the module: the layers are found by function,
    arguments and device, and made by ``stand_in`` when they are missing.

    Args:
        module: The module.
        stand_in: Returns the layer for a layer of torch.

    Attributes:
        unseen: Names of called functions that cannot be intercepted under ``torch.compile``, and need to be.
    """

    def __init__(self, module: nn.Module, stand_in: StandIn) -> None:
        super().__init__(module)
        self.stand_in = stand_in
        self.unseen: tuple[str, ...] = ()
        self._layers: dict[Any, nn.Module | None] = {}
        self._fake: dict[Any, nn.Module | None] = {}
        self._early = SimpleNamespace()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; raise a ConversionError under ``torch.compile`` if that cannot intercept what it calls."""
        module = self.module
        # without gradients nothing is saved, so that the exact function will do
        if self.unseen and torch.is_grad_enabled():
            what, why = _hidden(self.unseen)
            refuse_compiling(what, why, "layers in place of these functions")
        with _Reaching(self):
            return self.inner(module, *args, **kwargs)

    @property
    def uncompilable(self) -> tuple[str, str] | None:
        """What cannot be intercepted in compiled code, and why; None if everything can."""
        return _hidden(self.unseen) if self.unseen else None

    def layer(self, called: Called, call: Call) -> nn.Module | None:
        """Return the layer that computes a call, on its input's device; None if the call stays as it is."""
        x = call.input
        if not isinstance(x, FakeTensor):
            key = (called.kind, call.settings, x.device)
            if key in self._layers:
                return self._layers[key]
            if torch.compiler.is_compiling():
                early: nn.Module | None = getattr(self._early, self._made_early(called, call.settings, x.device))
                return early
            self._layers[key] = self._made(called, call)
            return self._layers[key]
        in_mode = (called.kind, call.settings, x.device, x.fake_mode)
        if in_mode not in self._fake:
            with _disable_current_modes():  # watching modes would count its constants as the model's results
                # those of modes that have ended go
                of_mode = {key: layer for key, layer in self._fake.items() if key[-1] is x.fake_mode}
                self._fake = {**of_mode, in_mode: self._made(called, call)}
        return self._fake[in_mode]

    @held_in_graphs
    def _made_early(self, called: Called, settings: Settings, device: torch.device) -> str:
        """Make the layer that computes a call while ``torch.compile`` traces it; return its name in ``_early``."""
        name = f"{called.kind.__name__} {settings} {device}".replace(".", "_")  # torch takes no points
        if not hasattr(self._early, name):
            with _disable_current_modes():
                setattr(self._early, name, self._made(called, Call(torch.empty(0, device=device), settings)))
        return name

    def _made(self, called: Called, call: Call) -> nn.Module | None:
        exact = called.layer(call.settings)
        return None if exact is None else self.stand_in(exact, call.input)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layers": {}, "_fake": {}, "_early": SimpleNamespace()}


def _hidden(unseen: tuple[str, ...]) -> tuple[str, str]:
    what = f"a converted model whose code calls {', '.join(unseen)}"
    return what, "compiled code would call them unconverted, and their gradient would be another"


class _LeftForward(ReboundForward):
    """The forward of an activation layer that stays; the function that it calls stays too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        was_running, _left.is_running = _left.is_running, True
        try:
            return self.inner(self.module, *args, **kwargs)
        finally:
            _left.is_running = was_running


class _Reaching(TorchFunctionMode):
    """Intercepts functions called in a with-block; a forward's layers compute those that it has layers for.

    What a module's own code checkpoints runs again outside of the block, in the backward pass, so its first run is not
    intercepted either.
    """

    def __init__(self, forward: CalledForward) -> None:
        super().__init__()
        self._forward = forward
        self._around = None if torch.compiler.is_compiling() else checkpoint_hook()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, or the layer that computes it."""
        kwargs = kwargs or {}
        called = FUNCTIONS.get(func)
        if called is None or _left.is_running or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        call = called.call(args, kwargs)
        if call is None or not self._takes(call.input, types):
            return func(*args, **kwargs)
        layer = self._forward.layer(called, call)
        return func(*args, **kwargs) if layer is None else layer(call.input)

    def _takes(self, x: Tensor, types: Any) -> bool:
        if not (x.requires_grad and x.is_floating_point() and x.layout is torch.strided):
            return False
        if torch.compiler.is_compiling():
            return True
        return not has_own_functions(types) and checkpoint_hook() is self._around


class Host(NamedTuple):
    """A module whose calls of functions are intercepted.

    Attributes:
        path: Path of the module in the model.
        names: Names of the functions.
        layers: The layers that compute them, with the functions' default arguments.
    """

    path: str
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]


def reach_calls(model: nn.Module, stand_in: StandIn, is_left: Callable[[nn.Module], bool]) -> list[Host]:
    """Bind a forward on each module of a model whose code calls functions that a layer can compute.

    Args:
        model: The model, whose layers are replaced already; call :func:`refuse_compiled_calls` first.
        stand_in: Returns the layers, and so decides which functions are wanted.
        is_left: Whether a module is an activation layer that stays; the function that it calls stays too.

    Returns:
        These modules, in the order of the model.
    """
    hosts: list[Host] = []
    left: dict[nn.Module, None] = {}
    for path, forward, layers in list(_calling(model, stand_in)):
        if is_left(forward.module):
            left[forward.module] = None
            continue
        forward.bind()
        hosts.append(Host(path, tuple(layers), tuple(dict.fromkeys(layers.values()))))
    inside = {part for host in hosts for part in model.get_submodule(host.path).modules()}
    for module in left:
        if module in inside:
            _LeftForward(module).bind()
    return hosts


def refuse_compiled_calls(model: nn.Module, stand_in: StandIn, is_left: Callable[[nn.Module], bool]) -> None:
    """Raise a ConversionError if a module whose code calls functions is compiled, or is inside a compiled part.

    There :func:`reach_calls` would bind a forward in vain. The model is not changed.
    """
    if any(map(is_compiled, model.modules())):
        for path, forward, _ in _calling(model, stand_in):
            if not is_left(forward.module):
                _refuse_compiled(model, path)


def _calling(model: nn.Module, stand_in: StandIn) -> Iterator[tuple[str, CalledForward, dict[str, nn.Module]]]:
    """Yield the modules that call functions: path, forward that is not bound yet, and layers by function."""
    like = next(model.parameters(), None)
    place = torch.empty(0) if like is None else like
    for path, module in model.named_modules():
        # modules of ours save less already, and those of torch.jit run no Python
        if type(module).__module__.startswith(("actbench.methods.", "actbench.packing.", "torch.jit.")):
            continue
        forward, functions = CalledForward(module, stand_in), functions_called(module)
        layers = dict(_wanted(forward, functions, place))
        if layers:
            forward.unseen = tuple(_unseen(functions, layers))
            yield path, forward, layers


def _wanted(forward: CalledForward, functions: tuple[Any, ...], place: Tensor) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names of the functions that a layer can compute, with the layer."""
    for called in map(FUNCTIONS.__getitem__, functions):
        layers = [forward.layer(called, Call(place, (*settings, *called.fixed))) for settings in called.examples]
        found = [layer for layer in layers if layer is not None]
        if found:
            yield called.name, found[0]


def _unseen(functions: tuple[Any, ...], layers: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the names of functions that torch.compile does not show to modes, but those with exact layers."""
    shown = set(chain.from_iterable(get_overridable_functions().values()))  # as torch.compile decides
    for function in functions:
        layer = layers.get(FUNCTIONS[function].name)
        if layer is not None and function not in shown and not isinstance(getattr(layer, "steps", None), Piecewise):
            yield FUNCTIONS[function].name


def _refuse_compiled(model: nn.Module, path: str) -> None:
    names = path.split(".") if path else []
    around = [model, *(model.get_submodule(".".join(names[: count + 1])) for count in range(len(names)))]
    if any(map(is_compiled, around)):
        raise ConversionError(
            f"{path or 'the model'} calls activations as functions, and torch.compile has compiled it; convert first, "
            "and compile then"
        )
