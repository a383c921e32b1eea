"""Which modules run in pieces: those that compute each position by itself, whatever their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
from transformers.models.t5.modeling_t5 import T5Config, T5LayerFF

from actbench.methods.tiled.positionwise import why_not

WIDTH = 8


class Mlp(nn.Module):
    """An MLP with something between its layers."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu, wide: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.between(self.up(x)))
        return found


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + F.dropout(self.down(F.silu(gate) * value), 0.1, self.training)  # type: ignore[no-any-return]


class Router(nn.Module):
    """A mixture of two experts, which take so many tokens at most."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([Mlp(), Mlp()])
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = self.gate(flat).softmax(-1).topk(self.capacity, dim=0).indices
        result = torch.zeros_like(flat)
        for expert, taken in zip(self.experts, chosen.T, strict=True):
            result = result.index_add(0, taken, expert(flat[taken]))
        return result.view_as(x)


class Writes(Mlp):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(()))
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "input":
            x.mul_(2)
        elif self.how == "buffer":
            self.seen.add_(1)  # type: ignore[operator]
        elif self.how == "new buffer":
            self.seen = self.seen + 1  # type: ignore[operator]
        else:
            self.last = x
        return super().forward(x)


APART: dict[str, Callable[[], nn.Module]] = {
    "GPT-2's": lambda: GPT2MLP(4 * WIDTH, GPT2Config(n_embd=WIDTH)),
    "Llama's": lambda: LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=16, num_attention_heads=1)),
    "T5's, with norm and residual": lambda: T5LayerFF(T5Config(d_model=WIDTH, d_ff=16, feed_forward_proj="gated-gelu")),
    "gated": Gated,
    "a sequence": lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 8)),
    "flat rows inside": lambda: Mlp(lambda x: x.flatten(0, 1).tanh().view_as(x)),
    "softmax of features": lambda: Mlp(lambda x: x.softmax(-1)),
    "bfloat16": lambda: Mlp().bfloat16(),
}
MIXED: dict[str, Callable[[], nn.Module]] = {
    "a mean over tokens": lambda: Mlp(lambda x: x - x.mean(1, keepdim=True)),
    "a softmax over tokens": lambda: Mlp(lambda x: x.softmax(1)),
    "a convolution over tokens": lambda: Mlp(lambda x: F.conv1d(x.mT, torch.ones(16, 1, 3), padding=1, groups=16).mT),
    "a shift": lambda: Mlp(lambda x: x.roll(1, 1)),
    "a sum so far": lambda: Mlp(lambda x: x.cumsum(1)),
    "products of tokens": lambda: Mlp(lambda x: x @ x.mT @ x),
    "another order": lambda: Mlp(lambda x: x.transpose(0, 1).reshape(x.shape)),
    "statistics of the batch": lambda: Mlp(lambda x: F.batch_norm(x.mT, None, None, training=True).mT),
    "a number for each position": lambda: Mlp(lambda x: x * torch.ones(x.shape[1], 1, device=x.device)),
    "the length": lambda: Mlp(lambda x: x / x.shape[1]),
    "a norm over tokens": lambda: Mlp(lambda x: F.layer_norm(x, x.shape[1:])),
    "the first token": lambda: Mlp(lambda x: x + x[:, :1]),
    "values": lambda: Mlp(lambda x: x if x.sum() > 0 else -x),
    "one mask for all positions": lambda: Mlp(lambda x: x * torch.bernoulli(torch.ones(x.shape[:2]))[..., None]),
    "a router with a capacity": lambda: Router(2),
    "a new attribute": lambda: Writes("attribute"),
    "a buffer": lambda: Writes("buffer"),
    "a new buffer": lambda: Writes("new buffer"),
    "its input": lambda: Writes("input"),
    "another width": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4)),
}


@pytest.mark.parametrize("name", APART)
def test_an_mlp_computes_each_position_by_itself(name: str) -> None:
    mlp = APART[name]()
    before = {key: id(value) for key, value in [*mlp.named_parameters(), *mlp.named_buffers()]}

    assert why_not(mlp) is None
    assert {key: id(value) for key, value in [*mlp.named_parameters(), *mlp.named_buffers()]} == before


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_positions_or_leaves_traces_is_none(name: str) -> None:
    module = MIXED[name]()
    module.eval()

    assert why_not(module)
    assert not module.training
    assert vars(module).get("last") is None
    assert all(not buffer.is_meta and not buffer.any() for buffer in module.buffers())


def test_a_tensor_that_is_no_parameter_of_it_is_none_of_its_own() -> None:
    hidden = torch.ones((), requires_grad=True)

    assert "with a gradient" in (why_not(Mlp(lambda x: x * hidden)) or "")
