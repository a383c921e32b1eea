"""Which kind of operator each is, so that its efficiency can be looked up."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

Kind = str
"""A heading of ``efficiencies.toml``."""


@functools.cache
def _kinds() -> dict[str, Kind]:
    text = resources.files(__package__).joinpath("kinds.toml").read_text(encoding="utf-8")
    return {name: kind for kind, names in tomllib.loads(text).items() for name in names}


NOTHING = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_local_scalar_dense",
        "lift_fresh",
        "_unsafe_view",
        "_reshape_alias",
        "resize_",
        "set_",
        "detach_",
        "as_strided_",
        "is_same_size",
        "_record_function_enter_new",
        "_record_function_exit",
        "_amp_update_scale_",
        "wait_tensor",
        "wait_tensors",
        "fresh_seed",  # a view of the 64 that two operators draw; the tensor that it is given tells the device alone
    )
)
"""Operators other than views that move no bytes of the device."""

IGNORED = frozenset(("device", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "promote_types"))
"""Questions to tensors, which only fake ones answer through the dispatcher."""


_OURS: dict[str, Kind] = {
    "to_host": "host copy",
    "from_host": "host copy",
    "one_kernel": "optimizer",
    **dict.fromkeys(
        ("smaq_encode", "smaqstep_adam_", "smaqstep_sgd_", "sketch_columns", "fresh_sketch"), "computed packing"
    ),
}
"""Kinds of the operators of actbench that do more than pack at the speed of memory."""

_OF_OPTIMIZERS = ("_foreach_", "_fused_ad", "_fused_sgd", "_amp_", "optimizer_update_")
"""How the names of optimizers' operators begin, those of bitsandbytes with the last."""


def kind_of(func: Any, name: str, args: tuple[Any, ...]) -> Kind | None:
    """Return the kind of an operator that moves bytes; None for an operator of unknown kind."""
    if func.namespace == "actbench":
        return _OURS.get(name, "packing")
    if name.startswith(_OF_OPTIMIZERS):
        return "optimizer"
    kind = _kinds().get(name)
    if kind == "convolution":
        # places by aten's schemas; a convolution's gradients put the output's gradient in front, and the bias's sizes
        if name == "convolution":
            return _kind_of_convolution(args[1], args[8])
        return _kind_of_gradients(args[1], args[2], args[9])
    if kind is None and torch.Tag.pointwise in func.tags:
        return "elementwise"
    return kind


def has_channels_last(tensor: Tensor) -> bool:
    """Return whether torch takes a tensor as one with its channels last, as it chooses kernels by."""
    return tensor.dim() > 3 and suggest_memory_format(tensor) is not torch.contiguous_format


_GROUPS_AT_ONCE = 32
"""Gradients of as many groups, as in ResNeXt, run on tensor cores in channels_last; those of others seem not to."""


def _kind_of_convolution(weight: Tensor, groups: int) -> Kind:
    if groups == 1:
        return "convolution"
    return "depthwise convolution" if weight.shape[1] == 1 else "grouped convolution"


def _kind_of_gradients(x: Tensor, weight: Tensor, groups: int) -> Kind:
    kind = _kind_of_convolution(weight, groups)
    # fitted on RegNets of timm's tables (docs/decisions/0028)
    is_uneven = weight.element_size() == 2 and groups % _GROUPS_AT_ONCE != 0 and has_channels_last(x)
    return "uneven grouped convolution" if kind == "grouped convolution" and is_uneven else kind
