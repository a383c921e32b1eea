"""Schemes that stand around a whole model, where a step calls its parts and not the model."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import actbench
from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring import inspection
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.hooked import HookedForward
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import profiles
from actbench.simulator.card import simulated

WORDS, WIDTH, ROWS, LENGTH, CHUNKS = 50, 64, 8, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block())
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.model(x))


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for key in ("x", "y")}


def whole(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def chunked(model: Decoder, batch: Batch) -> Tensor:
    """The same number, found as code does that never holds all scores at once."""
    pairs = zip(model.model(batch["x"]).chunk(CHUNKS), batch["y"].chunk(CHUNKS), strict=True)
    losses = [F.cross_entropy(model.lm_head(part).flatten(0, 1), y.flatten()) for part, y in pairs]
    return torch.stack(losses).mean()


def block_by_block(model: Decoder, batch: Batch) -> Tensor:
    x = batch["x"]
    for part in model.model:
        x = part(x)
    return F.cross_entropy(model.lm_head(x).flatten(0, 1), batch["y"].flatten())


def with_checkpoints(model: Decoder, batch: Batch, reentrant: bool) -> Tensor:
    hidden = checkpoint(model.model[1], model.model[0](batch["x"]), use_reentrant=reentrant)
    scores = checkpoint(lambda x: model.lm_head(model.model[2](x)), hidden, use_reentrant=reentrant)
    return F.cross_entropy(scores.flatten(0, 1), batch["y"].flatten())


def packed(loss: Callable[..., Tensor], text: str = "exact") -> int:
    setup = schemes.build(text).apply(TrainingSetup(decoder(), loss=loss))
    with simulated(profiles.get("t4")):
        return inspection.trace(setup, batch).total_bytes


def gradients(model: nn.Module, loss: Callable[..., Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    loss(model, batch()).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    assert len(found) == len(exact)
    squares = [((a - b).square().sum(), b.square().sum()) for a, b in zip(found, exact, strict=True)]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)


QUICK = ["gact:L1.1", "smaq,on=activations", "offload"]
WHOLE = itertools.product([*QUICK, "gact:L2", "encode:bf16,on=activations"], [chunked, block_by_block])


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    ("text", "loss"),
    [pytest.param(*pair, marks=() if pair[0] in QUICK and pair[1] is chunked else pytest.mark.slow) for pair in WHOLE],
)
def test_the_parts_that_a_loss_calls_keep_what_the_model_would(text: str, loss: Callable[..., Tensor]) -> None:
    exact, saved = packed(loss), packed(whole) - packed(whole, text)
    model = actbench.convert(decoder(), text)

    assert exact - packed(loss, text) > 0.9 * saved
    assert distance(gradients(model, loss), gradients(decoder(), loss)) < 0.3


@pytest.mark.parametrize("text", ["fewbit:3+gact:L1", "randomized:0.5+gact:L1", "gact:L1+checkpoint,blocks=Block"])
def test_a_composition_keeps_less_than_its_other_part(text: str) -> None:
    other = next(part for part in text.split("+") if "gact" not in part)

    assert packed(chunked, text) < 0.8 * packed(chunked, other)


def test_a_block_that_the_loss_calls_is_packed_in_its_second_run_too() -> None:
    packs: list[int] = []
    model = actbench.convert(decoder(), "gact:L1.1+checkpoint,blocks=Block")
    hooks = HookedForward.of(model).hooks
    pack = hooks.pack
    hooks.pack = lambda tensor: packs.append(torch._C._current_graph_task_id()) or pack(tensor)
    found = gradients(model, block_by_block)

    assert sum(task != -1 for task in packs) >= 2 * 4  # of each block, in backward: what four operators save
    assert distance(found, gradients(decoder(), block_by_block)) < 0.05


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("text", ["gact:L1.1", "offload", "actnn:L1,bits=8"])
def test_parts_that_the_loss_checkpoints_are_left_to_it(text: str, reentrant: bool) -> None:
    def loss(model: Decoder, batch: Batch) -> Tensor:
        return with_checkpoints(model, batch, reentrant)

    assert distance(gradients(actbench.convert(decoder(), text), loss), gradients(decoder(), loss)) < 0.02


def test_each_entry_has_its_own_bits_and_counts_its_own_passes() -> None:
    model = actbench.convert(decoder(), "gact:L2.2")
    for _ in range(2):
        gradients(model, chunked)
    forward = HookedForward.of(model)
    bits = [site.bits for site in forward.hooks.entries["model"]]

    assert forward.probing.passes == {"model": 2, "lm_head": 2 * CHUNKS}
    assert len(set(bits)) > 1
    assert len(list(forward.hooks.entries["lm_head"])) == 1  # all chunks are one tensor to it
    assert not list(forward.hooks.entries[""])


def test_a_controller_shares_bits_out_over_all_the_parts_of_a_loss() -> None:
    model = decoder()
    with actbench.Controller(model, "gact:L2.2") as controller:
        gradients(model, chunked)
        forward = HookedForward.of(model)
        before = {site: site.bits for site in forward.hooks.all_sites()}
        for site in before:
            site.bits = 3  # no width that is shared out
        controller.iterate(lambda: chunked(model, batch()))
        found = {site.bits for site in forward.hooks.all_sites() if site.elements}
        gradients(model, chunked)

    assert {3} != found
    assert len(found - {1, 2, 4, 8}) <= 1  # one tensor takes the rest of the budget, as part of a step
    assert not any(isinstance(vars(module).get("forward"), ReboundForward) for module in model.modules())
    assert gradients(model, chunked)[0].equal(gradients(decoder(), chunked)[0])


def test_layers_that_share_bits_out_do_it_once_a_step() -> None:
    model = actbench.convert(decoder(), "actnn:L3,adapt_interval=3")
    allocation, begun = CompressedForward.of(model).allocation, []
    begin = allocation.begin
    allocation.begin = lambda: begun.append(1) or begin()
    for _ in range(3):
        gradients(model, chunked)

    assert len(begun) == 3
    assert len({site.bits for site in allocation.sites}) > 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
@pytest.mark.parametrize("text", ["gact:L1.1", "offload"])
def test_a_copy_of_a_part_stands_alone(text: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = actbench.convert(decoder(), text)
    twin = copied(model.model)
    twin(batch()["x"]).square().mean().backward()

    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert len(pickle.dumps(twin)) < 0.9 * len(pickle.dumps(model))


def test_nothing_is_packed_where_no_gradient_is_wanted() -> None:
    model, x = actbench.convert(decoder(), "gact:L1"), batch()["x"]
    with torch.no_grad():
        hidden = model.model(x)

    assert hidden.equal(decoder().model(x))
    assert list(HookedForward.of(model).hooks.entries) == [""]


def mean_gradients(model: Decoder, draws: int) -> Tensor:
    for draw in range(draws):
        torch.manual_seed(draw)
        chunked(model, batch()).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]) / draws


def test_a_part_that_is_compiled_later_is_a_region_where_a_loss_calls_it_and_refused_inside_of_a_pass() -> None:
    torch._dynamo.reset()
    exact, eager = mean_gradients(decoder(), 1), actbench.convert(decoder(), "gact:L1")
    model = actbench.convert(decoder(), "gact:L1")
    model.model.compile(backend="aot_eager")
    off, usual = (mean_gradients(each, 20).sub(exact).norm() for each in (model, eager))
    assert 0 < off < 1.3 * usual < 0.1 * exact.norm()

    with pytest.raises(ConversionError, match="packed by hooks cannot be compiled"):
        whole(model, batch())
    torch._dynamo.reset()
