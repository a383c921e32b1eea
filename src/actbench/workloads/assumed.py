"""What losses ask about the values of a batch, answered for fake tensors from what batches are made to be."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


class AssumedValues(TorchFunctionMode):
    """Let losses of transformers that look at values run on fake tensors; real tensors are left alone.

    Losses of detection check that boxes end behind their beginning, which those of our batches do, and match them with
    predictions by their costs: whichever are matched, as many are. Losses of CTC leave out padding among the labels,
    and ours have none. So no byte depends on the answers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, or answer it where it would read values that are not there."""
        if args and isinstance(args[0], FakeTensor):
            if func is Tensor.__bool__ and args[0].dtype == torch.bool:
                return True
            if func is Tensor.__array__:
                return numpy.zeros(tuple(args[0].shape))
            if func in (Tensor.masked_select, torch.masked_select):
                return args[0].flatten()
        return func(*args, **(kwargs or {}))
