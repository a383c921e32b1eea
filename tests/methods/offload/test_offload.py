import copy
import itertools

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import fake, profiles
from actbench.simulator.card import place, simulated
from actbench.simulator.tracker import StorageTracker


def convert(model, text="offload"):
    return schemes.build(text).apply(TrainingSetup(model))


class Block(nn.Sequential):
    pass


def plain():
    return nn.Sequential(*(Block(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))


def live_bytes(model):
    """Bytes of a forward on fake tensors that are still on the device, beside the model and the batch."""
    mode = fake.fake_mode()
    with simulated(profiles.get("t4")), fake.faked(model, mode, place()), mode:
        x = torch.randn(64, 32, device=place())
        ledger = StorageTracker(host_is_free=True)
        with ledger:
            ledger.add([x, *model.parameters(), *model.buffers()])
            before = ledger.live_bytes
            loss = model(x).sum()
            after = ledger.live_bytes - before
            loss.backward()
    return after


def test_the_model_is_the_site():
    model = plain()
    setup = convert(model)

    assert setup.module is model
    assert [(site.path, site.was) for site in setup.sites] == [("", "Sequential")]


def test_nothing_but_the_loss_stays_on_the_device():
    assert live_bytes(plain()) == 3 * 64 * 32 * 4 + 4
    assert live_bytes(convert(plain()).module) == 4


def test_it_takes_no_value():
    with pytest.raises(SpecError, match="no value"):
        schemes.build("offload:2")


PARTS = ("randomized:0.25", "checkpoint,blocks=Block", "offload")


class Powers(nn.Module):
    def forward(self, x):
        for _ in range(6):
            x = x.exp()  # saves its result
        return x


def test_the_simulation_holds_what_is_fetched_ahead():
    """In backward there are a gradient and the next, a tensor that is back, and the one that is fetched ahead."""
    size, mode, model = 64 * 32 * 4, fake.fake_mode(), nn.Sequential(nn.Linear(32, 32), Powers())
    converted = convert(model).module
    with simulated(profiles.get("t4")), fake.faked(converted, mode, place()), mode:
        x = torch.randn(64, 32, device=place())
        with StorageTracker(host_is_free=True) as ledger:
            ledger.add([x, *converted.parameters()])
            before = ledger.live_bytes
            converted(x).sum().backward()
            peak = ledger.peak_bytes - before

    assert 4 * size <= peak < 5 * size


@pytest.mark.parametrize("parts", list(itertools.permutations(PARTS)), ids=" ".join)
def test_the_order_of_a_composition_changes_nothing(parts):
    torch.manual_seed(0)
    exact = plain()
    model = convert(copy.deepcopy(exact), "+".join(parts)).module
    reference = convert(copy.deepcopy(exact), "+".join(PARTS)).module
    x = torch.randn(64, 32)
    found = []
    for each in (model, reference):
        torch.manual_seed(1)
        out = each(x)
        assert torch.equal(out, exact(x))
        out.sum().backward()
        found.append([p.grad for p in each.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert live_bytes(model) == 4


def test_randomized_and_offload_keep_the_seeds_on_the_device():
    """A seed is 8 bytes, below what is worth moving."""
    assert live_bytes(convert(plain(), "randomized:0.25+offload").module) == 3 * 8 + 4


def test_randomized_and_checkpoint_keep_what_checkpoint_keeps():
    """The input of the first block is the batch, which is not counted."""
    for text in ("checkpoint,blocks=Block", "randomized:0.25+checkpoint,blocks=Block"):
        assert live_bytes(convert(plain(), text).module) == 3 * 64 * 32 * 4 - 64 * 32 * 4 + 4


def test_hooks_that_would_hide_it_are_refused():
    model = convert(plain(), "gact").module
    with pytest.raises(ConversionError, match="Only the innermost hooks run, so offload would move nothing"):
        convert(model)


def test_packing_what_is_moved_is_refused():
    model = convert(plain()).module
    with pytest.raises(ConversionError, match="packs or moves its saved tensors already"):
        convert(model, "gact")
