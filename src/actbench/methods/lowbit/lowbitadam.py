"""Adam with moments of few bits, from the optional packages torchao and bitsandbytes, in a form that can be simulated.

torchao's needs no compiler off CUDA here; bitsandbytes' runs on fake tensors, and says what is in host memory.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from actbench.device.patches import attribute
from actbench.errors import ConversionError, MeasurementError
from actbench.methods.formats.optim.optimizers import adam_groups, is_decoupled
from actbench.methods.formats.optim.shards import is_spread, local_gradient, local_of
from actbench.ops import hostmemory
from actbench.ops.simulation import one_kernel, plain_tensors
from actbench.scheme.wrapped import called

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_SMALLEST: Final = 4096  # elements of a parameter whose moments are of few bits
_PAGED_FROM: Final = 100_000  # elements of a parameter whose moments bitsandbytes pages
_FLOATS: Final = 5  # float32 copies that its step on a CPU makes: both moments, the gradient, a root and what divides

Twin = Callable[[optim.Optimizer], optim.Optimizer]
"""From an optimizer of torch's to the one that takes its place."""


def few_bits_adam(scheme: str, suffix: str, *, bf16_stochastic_round: bool = False) -> Twin:
    """Return a function from torch's Adam or AdamW to torchao's optimizer, whose name ends with 8bit, 4bit or Fp8.

    With ``bf16_stochastic_round`` they round weights of bfloat16 up or down by chance.

    Raises:
        MeasurementError: torchao is not installed; the message begins with the scheme that asks.
    """
    try:
        from torchao import optim as library  # type: ignore[import-untyped]
    except ImportError:
        raise MeasurementError(f'{scheme} needs torchao: pip install "actbench[torchao]"') from None
    classes = {
        decoupled: _adapted(getattr(library, f"{name}{suffix}"))
        for decoupled, name in ((True, "AdamW"), (False, "Adam"))
    }

    def twin(optimizer: optim.Optimizer) -> optim.Optimizer:
        kind = classes[is_decoupled(optimizer)]
        made: optim.Optimizer = kind(adam_groups(optimizer), bf16_stochastic_round=bf16_stochastic_round)
        return made

    return twin


_compiled_once = functools.cache(torch.compile)


@functools.cache
def _adapted(kind: type[Any]) -> type[Any]:
    """Return a class of torchao that needs no compiler off CUDA, and whose saved state is plain tensors."""

    class Adapted(kind):  # type: ignore[misc]
        __doc__ = kind.__doc__

        def step(self, closure: Any = None) -> Any:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            _make_rates_tensors(self.param_groups)
            loss = called(closure)
            shares = map(local_of, parameters)
            if any(isinstance(each, FakeTensor) and each.is_cuda for each in shares):
                _step_as_one_kernel(self, parameters)
                return loss
            compiles = all(parameter.is_cuda for parameter in parameters)
            stance = torch.compiler.set_stance("default" if compiles else "force_eager")
            # torchao compiles its kernel anew for each parameter and step, and torch keeps something of each time
            with stance, attribute(torch, "compile", _compiled_once), _shares_alone(self):
                super().step()
            return loss

        def state_dict(self) -> dict[str, Any]:
            return _plain(super().state_dict(), lambda each: each)

        def local_state_dict(self) -> dict[str, Any]:
            """Return the state with the parts of what this process holds of DTensors."""
            return _plain(super().state_dict(), local_of)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            parameters = _by_number(state_dict, self.param_groups)
            state = {
                number: {name: self._together(parameters[number], name, each) for name, each in of.items()}
                for number, of in state_dict["state"].items()
            }
            super().load_state_dict({**state_dict, "state": state})

        def _together(self, parameter: Tensor, name: str, saved: Any) -> Any:
            if name not in _MOMENTS:
                return saved
            moment = self._new_buffer(parameter, signed=name == "exp_avg")
            own = local_of(moment)
            if isinstance(saved, dict):
                for part, tensor in saved.items():
                    getattr(own, part).copy_(tensor)
            else:  # torch's own, or of a small parameter
                own.copy_(local_of(saved))
            return moment

    found = type(kind.__name__, (Adapted,), {})
    with unset_fake_temporarily():  # the first step computes the levels, whose values fake tensors lack
        parameter = torch.nn.Parameter(torch.zeros(_SMALLEST))
        parameter.grad = torch.zeros_like(parameter)
        found([parameter]).step()
    return found


def _make_rates_tensors(groups: list[dict[str, Any]]) -> None:
    """Give torchao the tensors that it wants for learning rates, where schedulers have written numbers."""
    for group in groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)


def _step_as_one_kernel(optimizer: Any, parameters: Iterable[Tensor]) -> None:
    """Mimic torchao's compiled step: make the state; one kernel for each parameter reads and writes all of it."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        state = _state_of(optimizer, parameter)
        moments = [state[name] for name in _MOMENTS]
        one_kernel([*plain_tensors(parameter, *moments)], [*plain_tensors(parameter.grad)])


def _state_of(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter, which is made as torchao's first step makes it."""
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        moments = {name: optimizer._new_buffer(parameter, name == "exp_avg") for name in _MOMENTS}
        state.update(step=torch.tensor(0.0), **moments)
    return state


@contextmanager
def _shares_alone(optimizer: Any) -> Iterator[None]:
    """Let an optimizer of torchao step what this process holds of DTensors, as if that were whole parameters.

    It cannot step DTensors of bfloat16: their moments stay so when it makes float32 of them.
    """
    groups = optimizer.param_groups
    shares: dict[Tensor, Tensor] = {}
    try:
        for parameter in itertools.chain.from_iterable(group["params"] for group in groups):
            if is_spread(parameter) and parameter.grad is not None:
                share = shares[parameter] = local_of(parameter.detach())
                share.grad = local_gradient(parameter)
                state = _state_of(optimizer, parameter)
                optimizer.state[share] = {name: local_of(value) for name, value in state.items()}
        optimizer.param_groups = [
            {**group, "params": [shares.get(each, each) for each in group["params"]]} for group in groups
        ]
        yield
    finally:
        optimizer.param_groups = groups
        for share in shares.values():
            optimizer.state.pop(share, None)


def _by_number(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[int, Tensor]:
    """Return an optimizer's parameters by the numbers that a saved state has for them."""
    numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = dict(zip(numbers, itertools.chain.from_iterable(group["params"] for group in groups), strict=False))
    if not state_dict["state"].keys() <= parameters.keys():
        raise ValueError("the loaded state is of more parameters than this optimizer has")
    return parameters


def _plain(found: dict[str, Any], held: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a state dict with numbers and plain tensors; ``held`` gives what is saved of each value."""
    groups = [{**group, "lr": float(group["lr"])} for group in found["param_groups"]]
    state = {number: {name: _apart(held(each)) for name, each in of.items()} for number, of in found["state"].items()}
    return {**found, "state": state, "param_groups": groups}


def _apart(value: Any) -> Any:
    """Return the parts of a wrapper subclass by name, and anything else as it is."""
    if not hasattr(value, "__tensor_flatten__") or is_spread(value):  # torch saves DTensors, these in them too
        return value
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def blockwise_adam(inner: optim.Optimizer, *, paged: bool) -> optim.Optimizer:
    """Return bitsandbytes' twin of torch's Adam or AdamW, for the same parameters, groups and options.

    Args:
        inner: Has not stepped.
        paged: Whether moments of parameters of at least 100,000 elements lie in memory that CUDA moves between the
            device and the host; on a CPU nothing moves.

    Raises:
        ConversionError: It is Adam with weight decay, which bitsandbytes has in the form of AdamW only, or of DTensors.
        MeasurementError: bitsandbytes is not installed.
    """
    kind = bnb_adam()
    if not is_decoupled(inner) and any(group["weight_decay"] for group in inner.param_groups):
        raise ConversionError(
            "adam8bit: bitsandbytes decays weights as AdamW does, and the optimizer is Adam with weight_decay; take "
            "--optimizer adamw, or adam8bit of torchao"
        )
    groups = adam_groups(inner)
    if any(is_spread(each) for group in groups for each in group["params"]):
        raise ConversionError(
            "adam8bit:bnb: a parameter is a DTensor, as FSDP2 makes them, which bitsandbytes' operators do not take; "
            "take adam8bit of torchao, or smaq,on=state"
        )
    away = any(each.device.type != "cpu" for group in groups for each in group["params"])
    made: optim.Optimizer = kind(groups, is_paged=paged and away)
    return made


class _Prefetches:
    """Lets bitsandbytes fetch paged moments; those of a fake parameter have no pages."""

    def prefetch_state(self, p: Tensor) -> None:
        if not isinstance(p, FakeTensor):
            super().prefetch_state(p)  # type: ignore[misc]


@functools.cache
def bnb_adam() -> type[Any]:
    """Return bitsandbytes' class; a MeasurementError where it is not installed."""
    try:
        kind: Any = importlib.import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        raise MeasurementError(
            f'adam8bit:bnb needs bitsandbytes: pip install "actbench[bitsandbytes]" ({error})'
        ) from None

    class BlockwiseAdamW(_Prefetches, kind):  # type: ignore[misc]
        __doc__ = kind.__doc__

        def fill_qmap(self) -> None:
            """Make the levels that codes stand for; of fake parameters without values."""
            if any(isinstance(each, FakeTensor) for group in self.param_groups for each in group["params"]):
                self.name2qmap = {name: torch.empty(256) for name in ("dynamic", "udynamic")}
            else:
                super().fill_qmap()

        def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
            """Return a moment of zeros, marked where it lies in host memory."""
            if isinstance(p, FakeTensor):
                return _fake_moment(p, dtype, paged=self.is_paged and p.numel() >= _PAGED_FROM)
            return _marked(super().get_state_buffer(p, dtype))

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            """Step a parameter; a fake one with what its step would allocate."""
            super().update_step(group, p, gindex, pindex)
            if isinstance(p, FakeTensor):
                _allocate_as_a_step(p)

        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            """Load a state of this optimizer; a ValueError for one of torch's."""
            if any("exp_avg" in each for each in state_dict["state"].values()):
                raise ValueError("the loaded state is of torch's Adam, which bitsandbytes cannot round; begin anew")
            super().load_state_dict(state_dict, move_to_device)

    BlockwiseAdamW.__name__ = kind.__name__  # by which records know it
    return BlockwiseAdamW


def _fake_moment(parameter: Tensor, dtype: torch.dtype, *, paged: bool) -> Tensor:
    """Return a moment without values; if it is paged, in host memory from the beginning, so that no meter counts it."""
    if not paged:
        return torch.zeros_like(parameter, dtype=dtype)
    made: Any = torch.zeros_like(parameter, dtype=dtype, device="cpu")
    made.is_paged = True  # else bitsandbytes asks for it on the device
    return made  # type: ignore[no-any-return]


def _marked(buffer: Tensor) -> Tensor:
    """Return a moment, marked as host memory where bitsandbytes pages it."""
    if getattr(buffer, "is_paged", False):
        hostmemory.NOTED.add(buffer.untyped_storage())
    return buffer


def _allocate_as_a_step(parameter: Tensor) -> None:
    """Make what a step on a CPU makes and frees; on CUDA it is one kernel."""
    if parameter.device.type == "cpu":
        copies = _FLOATS + (parameter.dtype != torch.float32)
        _ = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(copies)]
