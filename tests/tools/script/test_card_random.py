"""Random numbers of the card that a script believes in."""

from __future__ import annotations

import copy

import pytest
import torch
from cards import Card
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, set_device_states


def test_seeds_and_states_are_those_of_cuda(card: Card) -> None:
    torch.manual_seed(5)
    assert torch.cuda.initial_seed() == 5
    if hasattr(torch.accelerator, "random"):  # torch 2.11 lacks it
        assert torch.accelerator.random.initial_seed() == 5
    torch.cuda.manual_seed_all(6)

    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(7)
    torch.cuda.set_rng_state(state)

    assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (16,), "cpu")
    assert torch.cuda.initial_seed() == 6
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(8)
    assert torch.cuda.initial_seed() == 6
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.cuda.set_rng_state(torch.zeros(5056, dtype=torch.uint8))


def test_a_generator_of_the_card_draws_and_returns_to_its_state(card: Card) -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    torch.randn(5, generator=generator)
    state = generator.get_state()

    drawn = torch.randn(5, generator=generator)
    generator.set_state(state)

    assert generator.device == torch.device("cuda", 0)
    assert torch.equal(torch.randn(5, generator=generator), drawn)
    assert torch.equal(torch.randn(5, generator=generator.set_state(state).clone_state()), drawn)
    assert copy.deepcopy(generator).device == torch.device("cuda", 0)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device == torch.device("cpu")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_dropout_again(card: Card, reentrant: bool) -> None:
    drawn = []

    def block(x: Tensor) -> Tensor:
        drawn.append(torch.nn.functional.dropout(torch.ones(50), 0.5))
        return x * drawn[-1]

    x = torch.ones(50, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=True)
    y.sum().backward()

    assert len(drawn) == 2
    assert torch.equal(*drawn)


def test_a_checkpoint_keeps_and_sets_the_state_of_the_card_while_tensors_are_fake(card: Card) -> None:
    torch.cuda.manual_seed(6)
    with FakeTensorMode() as mode:
        state = torch.cuda.get_rng_state(0)
        torch.cuda.manual_seed(7)
        set_device_states([0], [state], device_type="cuda")
        assert torch.cuda.initial_seed() == 6
        torch.cuda.set_rng_state(mode.from_tensor(state))

    assert type(state) is Tensor
    assert torch.cuda.initial_seed() == 6
