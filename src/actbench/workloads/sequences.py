"""Telling transformers what it looks up in the values of masks and positions, which fake tensors do not have.

Where each row of a batch is one sequence, and no row is padded, attention needs no mask but the triangle that its
kernels know. Transformers looks that up. On fake tensors it cannot, and builds masks of batch times length times
length, which no real step has, and by which a simulation of a CUDA device would choose another kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from actbench.workloads.replacing import replaced

_MASKING = "transformers.masking_utils"
_ASK_FOR_PADDING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def full_rows(batch: Mapping[str, Any]) -> Iterator[None]:
    """Let models take each row of a fake batch for one sequence that is not padded, inside the block.

    A batch that gives positions may hold several sequences in a row, and a mask that it gives may mask something: for
    such a batch the masks are built.

    Args:
        batch: What the model is about to be called with, by name.
    """
    masking = sys.modules.get(_MASKING)  # it is there where a model of transformers is
    with ExitStack() as stack:
        if masking is not None and "position_ids" not in batch:
            stack.enter_context(replaced(masking, "find_packed_sequence_indices", _not_packed))
        if masking is not None and not any("mask" in str(name) for name in batch):
            for name in _ASK_FOR_PADDING:
                stack.enter_context(replaced(masking, name, _not_padded))
        yield


def _not_packed(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def found(position_ids: Any) -> Any:
        return None if isinstance(position_ids, FakeTensor) else find(position_ids)

    return found


def _not_padded(ask: Callable[..., bool]) -> Callable[..., bool]:
    def asked(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return ask(None if isinstance(padding_mask, FakeTensor) else padding_mask, *args, **kwargs)

    return asked
