"""What transformers does differently on fake tensors, at random, or in slow reference code.

Attention over rows of one unpadded sequence each needs only the causal mask that its kernels know. Transformers tells
such rows by their values. Fake tensors have none, so it builds masks of batch x length x length. No real step has these
masks, and they make a simulated CUDA device choose another kernel.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from actbench.device.patches import Patches, replaced

_MASKING = "transformers.masking_utils"
_ASK_FOR_PADDING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def full_rows(batch: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, let models treat each row of a fake batch as one unpadded sequence.

    A batch with positions or its own mask still gets masks: positions may mark several sequences in a row.
    """
    masking = sys.modules.get(_MASKING)  # present if a transformers model is loaded
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


_LOOK_FOR_PADDING = tuple(
    f"transformers.models.{name}." for name in ("idefics2", "idefics3", "modernvbert", "smolvlm", "ultravbert")
)
_EQUAL = (Tensor.__eq__, Tensor.eq, torch.eq)


class _PicturesShown(TorchFunctionMode):
    """Let no element of a fake batch of pictures be zero: models leave out pictures of zeros alone, as padding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EQUAL and isinstance(args[0], FakeTensor) and type(args[1]) is float and not args[1]:
            return torch.zeros(args[0].shape, dtype=torch.bool)
        return func(*args, **(kwargs or {}))


@contextmanager
def known_scalars(module: nn.Module) -> Iterator[None]:
    """Let ``torch.tensor`` take fake scalars with known values, and models find no padding among fake pictures.

    Models such as Llava look for pictures of zeros, which are padding.
    """

    def taking(tensor: Callable[..., Any]) -> Callable[..., Any]:
        return lambda data, **options: tensor(tree_map(_number, data), **options)

    looks = any(type(part).__module__.startswith(_LOOK_FOR_PADDING) for part in module.modules())
    with replaced(torch, "tensor", taking), _PicturesShown() if looks else nullcontext():
        yield


def _number(leaf: Any) -> Any:
    return leaf.item() if isinstance(leaf, FakeTensor) and not leaf.dim() else leaf


def no_layerdrop_draws() -> AbstractContextManager[None]:
    """Inside the block, let ``torch.rand([])`` return 1.

    transformers up to 5.17 evaluates ``rand([]) < layerdrop`` even if ``layerdrop`` is 0. On a fake tensor that raises,
    so it gets a number that is never smaller.
    """

    def change(rand: Callable[..., Any]) -> Callable[..., Any]:
        # a fake tensor of torch.tensor knows its value: it is compared, asked by .item(), and moved as any other
        return lambda *size, **options: torch.tensor(1.0) if size == ([],) else rand(*size, **options)

    return replaced(torch, "rand", change)


DISTRIBUTIONS = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}


def missing_kernels(module: nn.Module) -> tuple[str, ...]:
    """Return the missing packages because of which transformers runs reference code in a model, sorted.

    Transformers wraps a function that a package has a kernel for, and notes in the wrapper whether it found the
    package. Earlier versions set ``is_fast_path_available`` beside such layers. Other libraries' modules are skipped.
    """
    names = {type(part).__module__ for part in module.modules()}
    places = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]
    return tuple(sorted({package for place in places for package in _wanted(place)}))


def _wanted(place: ModuleType) -> Iterator[str]:
    if vars(place).get("is_fast_path_available") is False:
        yield "the packages of its fast path"
    for value in vars(place).values():
        if inspect.isfunction(value) and hasattr(value, "__wrapped__"):
            known = inspect.getclosurevars(value).nonlocals
            if known.get("is_new_implementation") is False and isinstance(known.get("package"), str):
                yield DISTRIBUTIONS.get(known["package"], known["package"])


def chances(module: nn.Module) -> tuple[str, ...]:
    """Return what a model skips at random: LayerDrop, SpecAugment, both or neither."""
    found = {name for owner in _owners(module) for name in _switches(owner)}
    told = ("LayerDrop" if name.endswith("layerdrop") else "SpecAugment" for name in found)
    return tuple(sorted(set(told)))


def deterministic(module: nn.Module) -> AbstractContextManager[None]:
    """Inside the block, switch off LayerDrop and SpecAugment.

    LayerDrop draws the layers to skip anew in each step, so no two steps would need the same memory.
    """
    return _zeroed(module, _switches)


def without_dropout(module: nn.Module) -> AbstractContextManager[None]:
    """Inside the block, set the dropout rates of modules and configs to zero; a loss may still drop by itself."""
    return _zeroed(module, _rates)


@contextmanager
def _zeroed(module: nn.Module, names: Callable[[Any], list[str]]) -> Iterator[None]:
    with Patches() as patches:
        for owner in _owners(module):
            for name in names(owner):
                patches.set(owner, name, type(getattr(owner, name))(0))
        yield


def _owners(module: nn.Module) -> list[Any]:
    parts = list(module.modules())
    configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
    return [*parts, *configs.values()]


def _rates(owner: Any) -> list[str]:
    values = getattr(owner, "__dict__", {})
    drops = "drop" in type(owner).__name__.lower() or type(owner).__name__ == "StochasticDepth"
    return [
        name
        for name, value in values.items()
        if type(value) is float and ("drop" in name.lower() or (drops and name == "p"))
    ]


def _switches(owner: Any) -> list[str]:
    values = getattr(owner, "__dict__", {})  # a config may be any object
    drops = [name for name, value in values.items() if name.endswith("layerdrop") and type(value) is float and value]
    return [*drops, *(["apply_spec_augment"] if values.get("apply_spec_augment") is True else [])]
