"""Blocks that are recomputed, in parts of a model, beside hooks that pack or move saved tensors, in parts of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from actbench import convert, scheme as schemes
from actbench.errors import ConversionError
from actbench.packing import savedtensors
from actbench.scheme.setup import TrainingSetup

HOOKS = ["gact:L1", "gact:L2", "coat", "encode:int:8,on=activations", "smaq,on=activations", "offload"]
WHOLE = ("0.0", "0.1", "1.0", "1.1")


class Attention(nn.MultiheadAttention):
    """Attention of a sequence to itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found: torch.Tensor = super().forward(x, x, x, need_weights=False)[0]
        return found


class Block(nn.Sequential):
    """A block of two layers, and the layers of one inside."""

    def __init__(self) -> None:
        inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        super().__init__(nn.LayerNorm(32), Attention(32, 2, batch_first=True), inner)


def model() -> nn.Module:
    torch.manual_seed(0)
    stages = (nn.Sequential(Block(), Block()) for _ in range(2))
    return nn.Sequential(*stages, nn.Linear(32, 8))


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def runs(setup: TrainingSetup) -> tuple[Counter[str], set[Any], float]:
    """Return how often each block runs again in a backward pass, who acts, and the cosine of the gradient."""
    counts: Counter[str] = Counter()
    acted: set[Any] = set()
    for path in WHOLE:
        norm = setup.module.get_submodule(f"{path}.0")
        norm.register_forward_hook(lambda *_, path=path: counts.update([path] * in_backward()))
    x, exact = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)), model()
    with savedtensors.listening(acted.add):
        for each in (setup.module, exact):
            each(x).square().sum().backward()
    ours, wanted = (torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (setup.module, exact))
    return counts, acted, float(nn.functional.cosine_similarity(ours, wanted, dim=0))


def assert_all_act(spec: str, again: tuple[str, ...]) -> None:
    """Check that a step runs these blocks again, and no others, and that each part of a scheme acts."""
    setup = schemes.build(spec).apply(TrainingSetup(model()))
    counts, acted, alike = runs(setup)

    assert counts == Counter(again)
    assert all(part.acts in acted for part in setup.parts if part.acts is not None)
    assert len({part.acts for part in setup.parts}) == len(spec.split("+")) or "/" in spec
    assert alike > 0.95


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize(
    ("recomputed", "packed", "again"),
    [
        ("", "", WHOLE),
        (",only=0.0", "", ("0.0",)),
        (",only=0", "", ("0.0", "0.1")),
        ("", ",only=1", WHOLE),
        ("", ",only=0/1", WHOLE),
        (",only=1.0", ",only=1", ("1.0",)),
        (",only=0", ",only=0", ("0.0", "0.1")),
        (",only=1.0/0.1", ",only=0", ("0.1", "1.0")),
        (",only=1.0", ",only=0.0/1.1", ("1.0",)),
        (",only=0", ",only=1.0.2", ("0.0", "0.1")),
        ("", ",only=2", WHOLE),
    ],
)
def test_both_act_where_hooks_are_around_or_elsewhere(
    hooks: str, recomputed: str, packed: str, again: tuple[str, ...]
) -> None:
    assert_all_act(f"checkpoint,blocks=Block{recomputed}+{hooks}{packed}", again)


@pytest.mark.parametrize(
    ("recomputed", "packed", "again"),
    [("", "", WHOLE), (",only=0", "", ("0.0", "0.1")), (",only=0.0", ",only=0", ("0.0",))],
)
def test_selective_acts_with_offload(recomputed: str, packed: str, again: tuple[str, ...]) -> None:
    assert_all_act(f"selective,blocks=Block{recomputed}+offload{packed}", again)


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize(
    ("recomputed", "packed"),
    [
        (",only=0.1", ",only=0.1"),
        ("", ",only=0.1"),
        (",only=0", ",only=0.1"),
        ("", ",only=0.1.1"),
        (",only=0.1", ",only=0.1.2"),
        (",only=0.1/1.0", ",only=2/1.0.1"),
    ],
)
def test_hooks_on_or_inside_of_a_recomputed_block_are_refused(hooks: str, recomputed: str, packed: str) -> None:
    spec = f"checkpoint,blocks=Block{recomputed}+{hooks}{packed}"
    if hooks == "offload" and packed == ",only=0.1":  # its hooks are around the block that they are bound on
        assert_all_act(spec, {"": WHOLE, ",only=0": ("0.0", "0.1"), ",only=0.1": ("0.1",)}[recomputed])
        return
    with pytest.raises(ConversionError, match=r"0 is recomputed in .*only=|1 is recomputed in .*only="):
        schemes.build(spec).apply(TrainingSetup(model()))


@pytest.mark.parametrize(("recomputed", "packed"), [(",only=0.1", ",only=0.1"), ("", ",only=0.1"), ("", ",only=0.1.2")])
def test_actnn_packs_attention_by_hooks_too(recomputed: str, packed: str) -> None:
    spec = f"checkpoint,blocks=Block{recomputed}+actnn:L1{packed}"
    if packed == ",only=0.1.2":  # without an attention
        assert_all_act(spec, WHOLE)
        return
    with pytest.raises(ConversionError, match=r"0\.1 is recomputed in .* what 0\.1\.1 saves"):
        schemes.build(spec).apply(TrainingSetup(model()))
    assert_all_act(f"checkpoint,blocks=Block{recomputed}+actnn:L1", WHOLE if not recomputed else ("0.1",))


def test_a_refused_pair_leaves_the_model_as_it_was() -> None:
    exact = model()
    with pytest.raises(ConversionError, match="only= out of what packs"):
        convert(exact, "checkpoint,blocks=Block,only=0.1+gact:L1,only=0.1")

    assert not any("forward" in vars(module) for module in exact.modules())


class Own(nn.Module):
    """A model that recomputes by itself: each block, or all of them at once."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.drop = nn.Sequential(Block(), Block(), Block()), nn.Dropout(0.2)
        self.at_once = at_once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in [self.blocks] if self.at_once else self.blocks:
            x = checkpoint(lambda given, part=part: self.drop(part(given)), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("hooks", ["gact:L0", *HOOKS, "actnn:L1,bits=8"])
def test_a_model_that_checkpoints_its_blocks_itself(hooks: str, at_once: bool) -> None:
    found = []
    for spec in (f"{hooks}+checkpoint,blocks=Block", "exact"):
        module = schemes.build(spec).apply(TrainingSetup(Own(at_once))).module
        torch.manual_seed(1)
        module(torch.randn(4, 16, 32)).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in module.parameters()]))

    if hooks in ("gact:L0", "offload"):
        assert torch.equal(*found)
    assert nn.functional.cosine_similarity(*found, dim=0) > 0.95


@pytest.mark.parametrize("hooks", ["gact:L0", "coat"])
def test_gradient_checkpointing_of_transformers(hooks: str) -> None:
    found = []
    for spec in (f"{hooks}+checkpoint", "exact"):
        torch.manual_seed(0)
        config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=8)
        module: Any = schemes.build(spec).apply(TrainingSetup(GPT2LMHeadModel(config))).module
        getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
        torch.manual_seed(1)
        ids = torch.arange(16).view(2, 8)
        module.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in module.parameters()]))

    assert nn.functional.cosine_similarity(*found, dim=0) > 0.95
    assert hooks == "coat" or torch.equal(*found)
