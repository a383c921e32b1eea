"""What the attributes of tensors say to code outside of torch's operators: where tensors are, and their values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator import known
from actbench.simulator.overrides import attribute
from actbench.tools.script.places import address, is_made_of_others
from actbench.tools.script.values import READERS

CARD = torch.device("cuda", 0)

OnCard = Callable[[Tensor], bool]


@contextmanager
def attributes_shown(on_card: OnCard, faked: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, let tensors say where they are.

    Args:
        on_card: Whether code that asks now sees a tensor on the card.
        faked: Makes a real tensor fake.
    """
    with ExitStack() as stack:
        for name, value in _of_fakes(on_card, faked).items():
            stack.enter_context(attribute(FakeTensor, name, value))
        for name, value in _of_others(on_card).items():
            stack.enter_context(attribute(Tensor, name, value))
        yield


def _of_fakes(on_card: OnCard, faked: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return attributes of fake tensors."""
    own_device = FakeTensor.device.fget  # type: ignore[attr-defined]
    own_data = Tensor.data

    def device(tensor: Any) -> torch.device:
        return CARD if on_card(tensor) else own_device(tensor)

    def set_data(tensor: Any, value: Tensor) -> None:
        """Make a real tensor fake first: torch would put real memory behind a tensor that stays fake."""
        if not isinstance(value, FakeTensor):
            value = faked(value)
        own_data.__set__(tensor, value)  # type: ignore[attr-defined]
        vars(tensor).pop(known.NAME, None)

    own_new = FakeTensor.__new__

    def new(cls: type[FakeTensor], first: Any = None, *args: Any, **state: Any) -> FakeTensor:
        """Make a parameter again as ``init_empty_weights`` of accelerate and peft do, where they have put it."""
        if isinstance(first, FakeTensor) and not args and "fake_mode" in state:
            return nn.Parameter(first.detach(), state["requires_grad"])  # type: ignore[return-value]
        return own_new(cls, first, *args, **state)

    return READERS | {
        "__new__": staticmethod(new),
        "__deepcopy__": _deepcopied,
        "device": property(device),
        "is_cuda": property(on_card),
        "is_cpu": property(lambda tensor: device(tensor).type == "cpu"),
        "data_ptr": lambda tensor: address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.itemsize,
        "get_device": lambda tensor: 0 if on_card(tensor) else -1,
        "data": property(own_data.__get__, set_data),  # type: ignore[attr-defined]
    }


def _of_others(on_card: OnCard) -> dict[str, Any]:
    """Return attributes of all tensors, for those that are made of others."""
    own_device, own_is_cuda = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]

    def is_such(tensor: Tensor) -> bool:
        return is_made_of_others(tensor) and on_card(tensor)

    return {
        "device": property(lambda tensor: CARD if is_such(tensor) else own_device(tensor)),
        "is_cuda": property(lambda tensor: is_such(tensor) or own_is_cuda(tensor)),
    }


def _deepcopied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    """Return a copy with memory of its own, where the tensor is; torch would copy the fake tensor mode with it."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol."
            )
        made: Any = tensor.detach().clone()
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        made.requires_grad_(tensor.requires_grad)
        made.grad = None if tensor.grad is None else copy.deepcopy(tensor.grad, memo)
        for name in vars(tensor).keys() - vars(made).keys() - {known.NAME}:
            setattr(made, name, copy.deepcopy(getattr(tensor, name), memo))
        memo[id(tensor)] = made
    return memo[id(tensor)]
