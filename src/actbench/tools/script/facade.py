"""Tensors that say they are on the card, and functions of torch that make or move tensors to it.

Code that asks a tensor for its device is told ``cuda:0`` if the tensor is on the card. Torch's own operators, which run
below the dispatch modes of a simulation, are told ``cpu``: fake CUDA tensors have no backward pass without a driver.
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from actbench.errors import MeasurementError
from actbench.ops import hostmemory
from actbench.simulator.overrides import replaced
from actbench.tools.script.places import address, is_made_of_others, is_on_card, placing
from actbench.tools.script.streams import checked
from actbench.tools.script.tensors import CARD, attributes_shown
from actbench.tools.script.values import real_if_known

_HOST = torch.device("cpu")

_OTHER_CARD = (
    "tensors are put on cuda:{0}, a card of another process: a run simulates the first process, which has cuda:0, and "
    "cuda:1 to cuda:{1} are those of the others; take the card from the environment variable LOCAL_RANK, or run "
    "a script that puts its layers on several cards with --meter cuda"
)

_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


class Facade:
    """Lets tensors and functions of torch believe in the card.

    Args:
        mode: The fake tensor mode of tensors; None where tensors are real.
        is_apart: Whether the card's memory is another than the host's. Else a move to the card is one to the CPU, and
            tensors say that they are there: the device of a real tensor cannot be another.
    """

    def __init__(self, mode: FakeTensorMode | None, *, is_apart: bool) -> None:
        self._mode = mode
        self._is_apart = is_apart
        self._depth = 0
        self._is_passing = False
        self._to = Tensor.to
        self._moved: Callable[[list[Tensor]], object] = lambda tensors: None

    @contextmanager
    def shown(self, moved: Callable[[list[Tensor]], object]) -> Iterator[None]:
        """Inside the block, replace functions and attributes; ``moved`` is called with tensors that came from the host.

        The dispatch modes of the simulation are active when the block begins.
        """
        # forward derivatives import it; it then compiles functions of torch, and could compile none of ours
        with warnings.catch_warnings(action="ignore"):  # torch warns of its own compiler
            importlib.import_module("torch._decomp.decompositions_for_jvp")
        self._depth, self._moved = torch._C._len_torch_dispatch_stack(), moved
        with ExitStack() as stack:
            for owner, name, change in self._replacements():
                stack.enter_context(replaced(owner, name, change))
            stack.enter_context(attributes_shown(self.on_card, self._faked))
            yield

    def on_card(self, tensor: Tensor) -> bool:
        """Return whether code outside of torch's operators sees a tensor on the card."""
        return self._is_apart and torch._C._len_torch_dispatch_stack() >= self._depth and is_on_card(tensor)

    def to_card(self, tensor: Tensor, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """Return a tensor in host memory as one on the card; it keeps the values of small integers."""
        if not self._is_apart:
            return self._move(tensor, dtype, **options)
        if is_lazy(tensor):
            raise MeasurementError(
                "a lazy module moves to the card before its shapes are known: run it once, then move it to the card"
            )
        is_fake = isinstance(tensor, FakeTensor) or is_made_of_others(tensor)
        source = tensor if is_fake else self._faked(tensor)
        with placing("card"):
            made = self._move(source, dtype, **{**options, "copy": True})
        self._moved([made])
        return made

    def to_host(self, tensor: Tensor, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """Return a tensor on the card as one in host memory."""
        if not (self._is_apart and is_on_card(tensor)):
            return self._move(tensor, dtype, **options)
        is_asked = self.on_card(tensor)  # by a script, not by an operator
        with placing("host"):
            moved = self._move(tensor, dtype, **{**options, "copy": True})
        return real_if_known(moved) if is_asked else moved

    def _move(self, tensor: Tensor, dtype: torch.dtype | None, **options: Any) -> Tensor:
        """Call torch's own ``to``; a tensor that is made of others calls it again for these."""
        with self._passing():
            return self._to(tensor, "cpu", dtype or tensor.dtype, **options)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Inside the block, devices are as torch's operators see them."""
        before, self._is_passing = self._is_passing, True
        try:
            yield
        finally:
            self._is_passing = before

    def _faked(self, tensor: Tensor) -> FakeTensor:
        assert self._mode is not None
        made = self._mode.from_tensor(tensor)
        if self._is_apart:
            hostmemory.mark(made.untyped_storage())
        return made

    def _replacements(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        yield Tensor, "to", self._moving
        yield Tensor, "cuda", lambda own: _to_card
        yield Tensor, "cpu", lambda own: lambda tensor, **options: tensor.to("cpu", **_memory(options))
        yield Tensor, "pin_memory", lambda own: lambda tensor, device=None: tensor
        yield Tensor, "is_pinned", lambda own: lambda tensor, device=None: False
        yield Tensor, "record_stream", lambda own: lambda tensor, stream: None
        yield Tensor, "type", self._typed
        yield Tensor, "type_as", lambda own: lambda tensor, other: tensor.to(other.device, other.dtype)
        yield Tensor, "_make_wrapper_subclass", _making_wrapper
        for function in _device._device_constructors():
            owner = torch.fft if function.__name__ in ("fftfreq", "rfftfreq") else torch
            if hasattr(owner, function.__name__):
                yield owner, function.__name__, self._making
        for name in _LIKE:
            yield torch, name, self._making
        for name in _NEW:
            yield Tensor, name, self._making
        yield torch, "normal", self._making
        yield Tensor, "new", lambda own: lambda tensor, *args, **options: _new(own, tensor, args, options)
        yield torch, "set_default_device", self._default
        yield torch.UntypedStorage, "pin_memory", lambda own: lambda storage, device="cuda": storage
        yield torch.UntypedStorage, "data_ptr", _addressed
        if not self._is_apart:  # it refuses parameters that say that they are on the CPU
            yield nn.DataParallel, "forward", lambda own: lambda model, *args, **options: model.module(*args, **options)

    def _moving(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        self._to = own

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._is_passing:
                return own(tensor, *args, **kwargs)
            device, dtype, options = _asked(tensor, args, kwargs)
            if device is not None and device.type == "meta" and isinstance(tensor, FakeTensor):
                return self.to_host(tensor, dtype, **options)  # a fake tensor cannot be there; neither place counts
            if device is None or not (device.type == "cpu" or is_card(device)):
                return own(tensor, *args, **kwargs)
            if device.type == "cpu":
                return self.to_host(tensor, dtype, **options)
            if not self._is_apart and is_lazy(tensor):
                return tensor  # it has no memory yet, and its class allows no other function
            if is_on_card(tensor) or not self._is_apart:
                return self._move(tensor, dtype, **options)
            return self.to_card(tensor, dtype, **options)

        return functools.wraps(own)(to)

    def _making(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function that makes a tensor make it on the card, where it is asked for."""

        def make(*args: Any, **kwargs: Any) -> Any:
            if self._is_passing:
                return own(*args, **kwargs)
            asked = kwargs.get("device")
            if asked is None:
                asked = None if args and _is_like(own, args[0]) else _default_device()
            kwargs.pop("pin_memory", None)  # no driver locks pages here, and the bytes are the same
            if asked is None and any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
                return own(*args, **kwargs)  # where these are
            if asked is None or not is_card(asked):
                with placing("host"):
                    return own(*args, **kwargs)
            kwargs["device"] = _HOST
            if isinstance(kwargs.get("generator"), torch.Generator):
                kwargs["generator"] = None  # one of the card's; no value matters
            with placing("card"):
                with self._passing():
                    made = own(*args, **kwargs)
                return self._settled(made)

        return functools.wraps(own)(make)

    def _settled(self, made: Any) -> Any:
        """Return what was made for the card as a fake tensor: small tensors are made real."""
        if isinstance(made, FakeTensor) or not isinstance(made, Tensor) or not self._is_apart:
            return made
        settled = self.to_card(made.detach())
        return settled.requires_grad_() if made.requires_grad else settled  # vmap refuses to ask

    def _typed(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def typed(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            name = dtype if isinstance(dtype, str) else ""
            if dtype is None and is_on_card(tensor):
                return own(tensor).replace("torch.", "torch.cuda.")
            if name.startswith("torch.cuda."):
                return own(tensor.to(CARD), name.replace(".cuda", ""), *args, **kwargs)
            return own(tensor, dtype, *args, **kwargs)

        return typed

    def _default(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda device: own(None if device is None else torch.device(device))


def _new(own: Callable[..., Tensor], tensor: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Make a tensor where another is: torch's own ``new`` tells no operator of that other."""
    if options or not is_on_card(tensor):
        return own(tensor, *args, **options)
    if len(args) == 1 and not isinstance(args[0], int | torch.Size):
        return tensor.new_tensor(args[0], dtype=tensor.dtype)
    return tensor.new_empty(*args or (0,))


def _making_wrapper(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a tensor that is made of others on the CPU, as these are for torch's operators."""

    def make(*args: Any, **options: Any) -> Tensor:
        places = [_HOST if isinstance(each, torch.device) and is_card(each) else each for each in args]
        if options.get("device") is not None and is_card(options["device"]):
            options["device"] = _HOST
        return own(*places, **options)

    return make


def _addressed(own: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda storage: address(storage) if storage.device.type == "meta" else own(storage)


def is_card(device: Any) -> bool:
    """Return whether a device, in any of the forms that torch takes, is the card; a number is one of its kind.

    Raises:
        torch.AcceleratorError: It is a card that is not there.
        MeasurementError: It is the card of another process.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        device = torch.device("cuda", device)
    found = torch.device(device) if isinstance(device, str) else device
    if not isinstance(found, torch.device) or found.type != "cuda":
        return False
    index = torch.cuda.current_device() if found.index is None else found.index
    if checked(index) != CARD.index:
        raise MeasurementError(_OTHER_CARD.format(index, torch.cuda.device_count() - 1))
    return True


def _to_card(tensor: Tensor, device: Any = None, **options: Any) -> Tensor:
    return tensor.to("cuda" if device is None else device, **_memory(options))


def _default_device() -> torch.device | None:
    """Return the device of ``with torch.device(…)`` or of ``torch.set_default_device``; None without them."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return next((mode.device for mode in modes if isinstance(mode, _device.DeviceContext)), None)


def _is_like(function: Callable[..., Any], first: Any) -> bool:
    """Return whether a function makes a tensor where its first argument is."""
    return isinstance(first, Tensor) and function.__name__ in (*_LIKE, *_NEW)


def _memory(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "device"}


def _asked(
    tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, dict[str, Any]]:
    """Return the device, the type and the other options that ``Tensor.to`` is asked for; no device if none is."""
    options = dict(kwargs)
    device, dtype = options.pop("device", None), options.pop("dtype", None)
    rest = list(args)
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        device, dtype = other.device, other.dtype
    elif rest and not isinstance(rest[0], torch.dtype):
        device = rest.pop(0)
    if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
        dtype = rest.pop(0)
    options.update(zip(("non_blocking", "copy"), rest, strict=False))
    options.pop("non_blocking", None)  # a copy that waits for nobody has the same bytes
    if options.get("memory_format") is None:
        options.pop("memory_format", None)
    if isinstance(device, int) and not isinstance(device, bool):
        device = torch.device("cuda", device)
    return (None if device is None else torch.device(device)), dtype, options
