"""Blocks that are recomputed, in parts of a model, beside hooks that pack or move saved tensors, in parts of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from actbench import conversion_of, convert, scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring import inspection
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.methods.actnn.ops import groupquant
from actbench.packing import hostoffload, packer, savedtensors
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

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
    with savedtensors.observing(acted.add):
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


@pytest.mark.sampled(fast=8, slow=6)
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
        (",only=0.1", ",only=0.1", ("0.1",)),
        ("", ",only=0.1", WHOLE),
        (",only=0", ",only=0.1", ("0.0", "0.1")),
        (",only=0/1.1", ",only=0.1/1", ("0.0", "0.1", "1.1")),
    ],
)
def test_both_act_where_hooks_are_around_blocks_or_on_them_or_elsewhere(
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
        ("", ",only=0.1.1"),
        (",only=0.1", ",only=0.1.2"),
        (",only=0.1/1.0", ",only=2/1.0.1"),
    ],
)
def test_hooks_inside_of_a_recomputed_block_are_refused(hooks: str, recomputed: str, packed: str) -> None:
    spec = f"checkpoint,blocks=Block{recomputed}+{hooks}{packed}"
    with pytest.raises(ConversionError, match=r"0 is recomputed in .*only=|1 is recomputed in .*only="):
        schemes.build(spec).apply(TrainingSetup(model()))


@pytest.mark.parametrize(
    ("recomputed", "packed", "again"),
    [(",only=0.1", ",only=0.1", ("0.1",)), ("", ",only=0.1", WHOLE), ("", ",only=0.1.2", WHOLE), ("", "", WHOLE)],
)
def test_actnn_packs_attention_by_hooks_too(recomputed: str, packed: str, again: tuple[str, ...]) -> None:
    assert_all_act(f"checkpoint,blocks=Block{recomputed}+actnn:L1{packed}", again)


def test_actnn_of_an_attention_inside_of_a_recomputed_stage_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"0 is recomputed in .* what 0\.1\.1 saves"):
        schemes.build("checkpoint,blocks=Sequential,only=0+actnn:L1,only=0.1").apply(TrainingSetup(model()))


@pytest.mark.parametrize("hooks", HOOKS)
def test_a_block_is_packed_beside_parts_with_other_schemes(hooks: str) -> None:
    alone, other = f"checkpoint,blocks=Block,only=0.1+{hooks},only=0.1", "coat,only=1.0"
    beside = f"{alone}+{other}+fewbit:3,only=1.1" if hooks != "coat" else f"{alone}+gact:L1,only=1.0"
    assert_all_act(beside, ("0.1",))


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("hooks", HOOKS)
def test_the_order_in_which_both_are_bound_changes_nothing(hooks: str) -> None:
    first, second = (schemes.build(spec) for spec in ("checkpoint,blocks=Block,only=0.1", f"{hooks},only=0.1"))
    found = []
    for setup in (second.apply(first.apply(TrainingSetup(model()))), first.apply(second.apply(TrainingSetup(model())))):
        counts, acted, alike = runs(setup)
        assert {part.acts for part in setup.parts} <= acted
        found.append((counts.copy(), alike, kept(setup.module)))  # which may run the blocks again, on fake tensors

    assert found[0] == found[1]
    assert found[0][0] == Counter(["0.1"])


@pytest.mark.parametrize("hooks", HOOKS)
def test_both_are_undone(hooks: str) -> None:
    module = convert(model(), f"checkpoint,blocks=Block,only=0+{hooks},only=0.0/0.1")
    conversion_of(module).undo()

    assert not any("forward" in vars(part) for part in module.modules())
    assert not runs(TrainingSetup(module))[0]


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    return module(batch["x"]).square().sum()  # type: ignore[no-any-return]


def batch() -> dict[str, Any]:
    return {"x": torch.randn(4, 16, 32)}


def kept(module: nn.Module) -> int:
    """Return the bytes that a forward pass leaves, by the ledger of fake tensors."""
    return inspection.trace(TrainingSetup(module, loss_of), batch).total_bytes


WAITS = {
    "coat": 2048 + 2 * 128,
    "gact:L1": groupquant.packed_bytes(2048, 4, 256),
    "encode:int:8,on=activations": 2048 + 4 * 32,
}
"""Bytes of a packed input of 2,048 elements: codes, and a scale for each of 16, 256 and 64 of them."""


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize(("hooks", "waits"), WAITS.items())
@pytest.mark.parametrize("meter", [CpuMeter(), SimulatedMeter(profiles.get("cpu"))], ids=["cpu", "simulated"])
def test_a_recomputed_block_keeps_its_input_packed(step_of: Any, meter: Any, hooks: str, waits: int) -> None:
    def read(spec: str) -> Any:
        module = schemes.build(spec).apply(TrainingSetup(model())).module
        return meter.memory(step_of(meter, module, batch))

    both = f"checkpoint,blocks=Block,only=0.1/1.0+{hooks},only=0.1/1.0"
    whole, packed = read("checkpoint,blocks=Block,only=0.1/1.0"), read(both)

    assert whole.activation_bytes - packed.activation_bytes == 2 * (4 * 2048 - waits)


@pytest.mark.parametrize(("hooks", "leaves"), [("offload", True), ("gact:L0", False), ("gact:swap", True)])
def test_inputs_that_wait_whole_give_the_exact_gradient(
    hooks: str, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the CPU are moved as those of a device are."""
    moved, move = list[int](), hostoffload.to_host
    monkeypatch.setattr(packer, "is_elsewhere", lambda tensor: True)
    monkeypatch.setattr(hostoffload, "to_host", lambda tensor: moved.append(tensor.numel()) or move(tensor))
    found = []
    for spec in (f"checkpoint,blocks=Block,only=0+{hooks},only=0.1", "exact"):
        module = schemes.build(spec).apply(TrainingSetup(model())).module
        loss = loss_of(module, {"x": torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))})
        if spec != "exact":
            assert sum(moved) == (4 * 16 * 32 if leaves else 0)  # the input of the block, before its second run
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([p.grad for p in module.parameters()])

    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("hooks", ["coat", "gact:L2"])
def test_hooks_on_a_recomputed_block_whose_input_has_no_graph_are_not_idle(hooks: str) -> None:
    """As on the first block of a language model with adapters: its input may be the batch, and stays whole."""
    setup = schemes.build(f"checkpoint,blocks=Block,only=0.0+{hooks},only=0.0").apply(TrainingSetup(model(), loss_of))
    trace = inspection.trace(setup, batch)

    assert inspection.refuse_idle(setup.parts, trace) == []
    assert trace.total_bytes == kept(
        schemes.build("checkpoint,blocks=Block,only=0.0").apply(TrainingSetup(model())).module
    )


def test_a_refused_pair_leaves_the_model_as_it_was() -> None:
    exact = model()
    with pytest.raises(ConversionError, match="let only= of the scheme that packs name the whole block"):
        convert(exact, "checkpoint,blocks=Block,only=0.1+gact:L1,only=0.1.1")

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
