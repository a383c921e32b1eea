"""What the attributes of tensors say to code outside of torch's operators: where tensors are, and their values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.device.patches import attribute, replaced
from actbench.simulator import known
from actbench.simulator.places import address, is_on_card
from actbench.tools.script.values.values import READERS


def storages_addressed() -> AbstractContextManager[None]:
    """Inside the block, give storages without memory numbers for addresses."""

    def addressed(own: Callable[[Any], int]) -> Callable[[Any], int]:
        return lambda storage: address(storage) if storage.device.type == "meta" else own(storage)

    return replaced(torch.UntypedStorage, "data_ptr", addressed)


@contextmanager
def attributes_shown(faked: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, let fake tensors be copied, and let them tell values and addresses.

    ``faked`` makes a real tensor fake.
    """
    with ExitStack() as stack:
        stack.enter_context(storages_addressed())
        for name, value in _of_fakes(faked).items():
            stack.enter_context(attribute(FakeTensor, name, value))
        yield


def _of_fakes(faked: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return attributes of fake tensors."""
    own_data = Tensor.data

    def set_data(tensor: Any, value: Tensor) -> None:
        """Make a real tensor fake first: torch would put real memory behind a tensor that stays fake."""
        if not isinstance(value, FakeTensor):
            value = faked(value)
        own_data.__set__(tensor, value)  # type: ignore[attr-defined]
        tensor.fake_device = value.fake_device  # type: ignore[attr-defined]
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
        # torch leaves tensors of a card where they are, and host memory without values is never shared
        "share_memory_": lambda tensor: tensor,
        "is_shared": is_on_card,
        "data_ptr": lambda tensor: address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.itemsize,
        "data": property(own_data.__get__, set_data),  # type: ignore[attr-defined]
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
