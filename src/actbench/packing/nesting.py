"""Hooks that pack saved tensors, and blocks that are recomputed: which may be inside which."""

from __future__ import annotations

from torch import nn

from actbench.errors import ConversionError
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.wrapped import HookWrapper, WrappedForward


def refuse_hooks_inside(model: nn.Module) -> None:
    """Raise a ConversionError if hooks that pack or move saved tensors are bound inside of a recomputed block.

    Of nested hooks only the innermost run. The block's own hooks, which find out what to recompute, would not see the
    tensors that hooks inside take. Hooks around blocks are fine: blocks know of them.
    """
    _refuse_hooks(model, "", None)


def _refuse_hooks(module: nn.Module, path: str, block: str | None) -> None:
    hooked = False
    for bound in ReboundForward.all_of(module):  # the front one runs around the others
        if bound.recomputes and not hooked:
            block = path
        wrapper = bound.wrapper if isinstance(bound, WrappedForward) else None
        if isinstance(wrapper, HookWrapper) and block is not None:
            raise ConversionError(
                f"{block or 'the model'} is recomputed in the backward pass, and hooks pack or move what {path} saves: "
                "only the innermost of nested hooks run, so nothing there would be recomputed; let only= of the "
                "scheme that packs name the whole block, or leave only= out, so that it packs what the block keeps; or "
                "name parts in only= that do not overlap"
            )
        hooked = hooked or (wrapper is not None and wrapper.hooked and block is None)
    for name, child in module.named_children() if not hooked else ():
        _refuse_hooks(child, f"{path}.{name}" if path else name, block)
