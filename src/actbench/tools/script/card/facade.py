"""A card that is the CPU: what a script makes for the card, or moves to it, is in host memory.

Functions are replaced one by one, in the whole process, and not by a ``TorchFunctionMode``: such a mode does not see
what Python functions of torch call inside, so it would miss what a backward pass recomputes.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from actbench.device.patches import Patches, replaced
from actbench.simulator.places import is_card
from actbench.tools.script.card.autocast import believe_in_autocast

_HOST = torch.device("cpu")

_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


@contextmanager
def card_is_the_cpu() -> Iterator[None]:
    """Inside the block, let torch's functions take the CPU for the card."""
    # forward derivatives import it; it then compiles functions of torch, and could compile none of ours
    with warnings.catch_warnings(action="ignore"):  # torch warns of its own compiler
        importlib.import_module("torch._decomp.decompositions_for_jvp")
    with ExitStack() as stack:
        for owner, name, change in _replacements():
            stack.enter_context(replaced(owner, name, change))
        believe_in_autocast(stack.enter_context(Patches()))
        yield


def _replacements() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    yield Tensor, "to", _moving
    yield Tensor, "cuda", lambda own: _to_card
    yield Tensor, "pin_memory", lambda own: lambda tensor, device=None: tensor
    yield Tensor, "is_pinned", lambda own: lambda tensor, device=None: False
    yield Tensor, "type", _typed
    for function in _device._device_constructors():
        owner = torch.fft if function.__name__ in ("fftfreq", "rfftfreq") else torch
        if hasattr(owner, function.__name__):
            yield owner, function.__name__, _making
    for name in _LIKE:
        yield torch, name, _making
    for name in _NEW:
        yield Tensor, name, _making
    yield torch, "normal", _making
    yield torch, "set_default_device", _default
    yield torch, "load", _loading
    yield torch.UntypedStorage, "pin_memory", lambda own: lambda storage, device="cuda": storage
    # it refuses parameters that say that they are on the CPU
    yield nn.DataParallel, "forward", lambda own: lambda model, *args, **options: model.module(*args, **options)


def _moving(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = args[0] if args else kwargs.get("device")
        if isinstance(asked, Tensor | torch.dtype) or asked is None or not is_card(asked):
            return own(tensor, *args, **kwargs)
        if is_lazy(tensor):
            return tensor  # it has no memory yet, and its class allows no other function
        return own(tensor, _HOST, *args[1:], **{name: value for name, value in kwargs.items() if name != "device"})

    return functools.wraps(own)(to)


def _to_card(tensor: Tensor, device: Any = None, **options: Any) -> Tensor:
    return tensor.to("cuda" if device is None else device, **options)


def _making(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that makes a tensor make it on the CPU, where the card is asked for."""

    def make(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("device")
        if asked is None and not (args and _is_like(own, args[0])):
            asked = _default_device()
        kwargs.pop("pin_memory", None)  # no driver locks pages here, and the bytes are the same
        if asked is not None and is_card(asked):
            kwargs["device"] = _HOST
        return own(*args, **kwargs)

    return functools.wraps(own)(make)


def _typed(own: Callable[..., Any]) -> Callable[..., Any]:
    def typed(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return own(tensor, dtype.replace(".cuda", "") if isinstance(dtype, str) else dtype, *args, **kwargs)

    return typed


def _loading(own: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, str | int | torch.device) and is_card(map_location):
            map_location = _HOST
        elif isinstance(map_location, dict):
            map_location = {saved: "cpu" if is_card(place) else place for saved, place in map_location.items()}
        return own(f, map_location, *args, **kwargs)

    return functools.wraps(own)(load)


def loading_named(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the change of ``safetensors.torch.load_file``, which knows the card by a driver."""

    def load_file(filename: Any, device: Any = "cpu", **options: Any) -> Any:
        return own(filename, "cpu" if is_card(device) else device, **options)

    return functools.wraps(own)(load_file)


def _default(own: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda device: own(None if device is None else torch.device(device))


def _default_device() -> torch.device | None:
    """Return the device of ``with torch.device(…)`` or of ``torch.set_default_device``; None without them."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return next((mode.device for mode in modes if isinstance(mode, _device.DeviceContext)), None)


def _is_like(function: Callable[..., Any], first: Any) -> bool:
    """Return whether a function makes a tensor where its first argument is."""
    return isinstance(first, Tensor) and function.__name__ in (*_LIKE, *_NEW)
