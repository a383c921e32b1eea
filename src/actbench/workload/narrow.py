"""A narrower model of the same architecture, whose gradient answers approximations as that of the wide one does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

_OWN: Final = ("hidden_size", "d_model", "n_embd", "dim")
"""Keys of Hugging Face configs for the width of the residual stream."""

_WIDTHS: Final = frozenset(
    (
        *_OWN,
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "ffn_dim",
        "d_ff",
        "n_inner",
        "hidden_dim",
        "embedding_size",
        "pooler_hidden_size",
        "word_embed_proj_dim",
    )
)
_HEADS: Final = frozenset(
    (
        "num_attention_heads",
        "num_key_value_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "num_heads",
        "n_head",
        "n_heads",
    )
)
_HEAD_WIDTHS: Final = frozenset(("head_dim", "d_kv"))
_SPREADS: Final = frozenset(("initializer_range", "init_std"))
"""Standard deviations of random weights; T5's ``initializer_factor`` is none, since it is divided by the width."""

_LEAST_HEAD: Final = 16  # width of a head


def narrowed(config: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Return the changes of a config that make a model narrow, but at least ``least`` wide; empty if there are none.

    All widths are divided by one power of two. So are the numbers of heads, as far as they have it as a factor; what is
    left divides the width of each head. Random weights are drawn wider by the root of it: sums of fewer products then
    are as large as before, and so are the shares of the residual stream that blocks add to it.
    """
    widths, heads, head_widths = (
        {key: value for key, value in config.items() if key in keys and isinstance(value, int) and value > 0}
        for keys in (_WIDTHS, _HEADS, _HEAD_WIDTHS)
    )
    own = next((widths[key] for key in _OWN if key in widths), 0)
    implied = [own // max(heads.values())] if heads and not head_widths else []
    for power in range(max(own // least, 1).bit_length() - 1, 0, -1):
        factor = 2**power
        fewer = math.gcd(factor, *heads.values())
        thinner = factor // fewer
        of_heads = [*head_widths.values(), *implied]
        fits = all(each % (2 * thinner) == 0 and each >= thinner * _LEAST_HEAD for each in of_heads)
        if fits and not any(each % factor for each in widths.values()):
            spreads = {key: value * math.sqrt(factor) for key, value in config.items() if key in _SPREADS and value}
            return {
                **{key: value // factor for key, value in widths.items()},
                **{key: value // fewer for key, value in heads.items()},
                **{key: value // thinner for key, value in head_widths.items()},
                **{key: float(f"{value:.4g}") for key, value in spreads.items()},
            }
    return {}
