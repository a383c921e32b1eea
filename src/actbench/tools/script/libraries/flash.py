"""Flash attention by other packages: simulated by torch's attention, whose flash kernel saves the same tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actbench.tools.script.libraries.importpatches import Change, Make, changed

Note = Callable[[str], None]

_ASKED = re.compile(r"(paged\|)?flash_attention_\d|.*/.*flash.*")
_NAME = "flash_attention_2"


def attend(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, scale: float | None = None, causal: bool = False
) -> Tensor:
    """Attend over tensors of shape (batch, length, heads, dimension); return the shape of ``q``.

    ``k`` and ``v`` may have fewer heads, which the kernel shares among those of ``q``.
    """
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    causal = causal and q.shape[2] > 1
    found = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return found.transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attend over (batch, length, heads, dimension), as the function of the package does."""
    return attend(q, k, v, dropout_p, softmax_scale, causal)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, **options: Any
) -> Tensor:
    """Attend over (batch, length, 3, heads, dimension)."""
    q, k, v = qkv.unbind(2)
    return attend(q, k, v, dropout_p, softmax_scale, causal)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attend over (batch, length, heads, dimension) and (batch, length, 2, heads, dimension)."""
    k, v = kv.unbind(2)
    return attend(q, k, v, dropout_p, softmax_scale, causal)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attend over (tokens of all sequences, heads, dimension); the kernel holds the same for one long sequence."""
    q, k, v = (each.unsqueeze(0) for each in (q, k, v))
    return attend(q, k, v, dropout_p, softmax_scale, causal).squeeze(0)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attend over (tokens of all sequences, 3, heads, dimension)."""
    q, k, v = qkv.unsqueeze(0).unbind(2)
    return attend(q, k, v, dropout_p, softmax_scale, causal).squeeze(0)


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attend as ``xformers.ops`` does: over (batch, length, heads, dimension), or (batch, length, dimension)."""
    flat = query.dim() == 3
    q, k, v = (each.unsqueeze(2) if flat else each for each in (query, key, value))
    if isinstance(attn_bias, Tensor):
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        bias = attn_bias.unsqueeze(1) if attn_bias.dim() == 3 else attn_bias
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, scale=scale).transpose(1, 2)
    else:
        found = attend(q, k, v, p, scale, causal=attn_bias is not None)
    return found.squeeze(2) if flat else found


class LowerTriangularMask:
    """The causal bias of ``xformers.ops``."""


_FLASH = (
    *(flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func),
    flash_attn_varlen_qkvpacked_func,
)
_XFORMERS = (memory_efficient_attention, LowerTriangularMask)


def stubs() -> dict[str, Make]:
    """Return functions that make the modules of ``flash_attn`` and ``xformers`` which a script imports."""
    return {
        "flash_attn": lambda: _module("2.8.3", _FLASH),
        "flash_attn_interface": lambda: _module("3.0.0", _FLASH),
        "xformers": lambda: _module("0.0.33", _XFORMERS),
    }


def _module(version: str, functions: tuple[Any, ...]) -> ModuleType:
    made = ModuleType("flash")
    vars(made).update({each.__name__: each for each in functions}, __version__=version, __path__=[])
    return made


_SIMULATED = "torch's attention, whose flash kernel saves the same tensors; padded tokens count as others"


def noting(note: Note) -> Callable[[str], None]:
    """Return a function that notes a package which is simulated."""
    return lambda package: note(f"{package} is simulated by {_SIMULATED}.")


def changes(note: Note) -> dict[str, Change]:
    """Return the changes of transformers, by the names of its modules."""

    def change(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            stack.enter_context(
                changed(module.PreTrainedModel, "_check_and_adjust_attn_implementation", _accepted(note))
            )
            stack.enter_context(_interface(module))
            return stack.pop_all()

    return {"transformers.modeling_utils": change}


def _accepted(note: Note) -> Callable[[Any], Any]:
    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def check(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
            asked = isinstance(attn_implementation, str) and _ASKED.fullmatch(attn_implementation)
            if not asked or not self._supports_flash_attn:
                return own(self, attn_implementation, *args, **kwargs)
            note(f"Flash attention in transformers is simulated by {_SIMULATED}.")
            return _NAME

        return check

    return change


@contextmanager
def _interface(module: ModuleType) -> Iterator[None]:
    """Inside the block, let transformers' flash attention be ours."""
    functions = module.ALL_ATTENTION_FUNCTIONS
    own = functions[_NAME]
    functions[_NAME] = _forward
    try:
        yield
    finally:
        functions[_NAME] = own


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over (batch, heads, length, dimension), as attention functions of transformers do."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return attend(q, k, v, dropout, scaling, causal), None
