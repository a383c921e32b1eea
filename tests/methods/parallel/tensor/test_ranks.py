import copy
import pickle

import pytest
import torch

from actbench.methods.parallel.tensor.ranks import OwnNumbers, Ranks


@pytest.fixture(autouse=True)
def _same_numbers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def draw(rank, size=2):
    """Return what a process draws of its own and then with the others, from one state of the generator."""
    torch.manual_seed(3)
    numbers = OwnNumbers(Ranks(size, rank, "0"))
    numbers.begin(torch.zeros(1))
    own = torch.rand(4)
    numbers.end()
    return own, torch.rand(4)


def test_processes_draw_their_own_numbers_and_then_the_same_again():
    (first, after), (second, also_after) = draw(0), draw(1)

    assert not torch.equal(first, second)
    assert torch.equal(after, also_after)
    assert not torch.equal(first, after)


def test_the_same_state_draws_the_same_numbers_again_as_checkpointing_needs():
    assert torch.equal(draw(1)[0], draw(1)[0])


def test_numbers_of_one_region_are_not_those_of_the_next():
    numbers, drawn = OwnNumbers(Ranks(2, 0, "0")), []
    for _ in range(2):
        numbers.begin(torch.zeros(1))
        drawn.append(torch.rand(4))
        numbers.end()

    assert not torch.equal(*drawn)


def test_a_begin_without_an_end_leaves_no_trace():
    numbers = OwnNumbers(Ranks(2, 1, "0"))
    numbers.begin(torch.zeros(1))
    numbers.begin(torch.zeros(1))
    numbers.end()
    torch.rand(4)
    state = torch.get_rng_state()

    torch.manual_seed(3)
    torch.randint(2**48, ()), torch.randint(2**48, ()), torch.rand(4)
    assert torch.equal(state, torch.get_rng_state())


def test_a_copy_draws_by_itself():
    numbers = OwnNumbers(Ranks(2, 1, "0"))
    numbers.begin(torch.zeros(1))
    for twin in (copy.deepcopy(numbers), pickle.loads(pickle.dumps(numbers))):
        before = torch.get_rng_state()
        twin.end()
        assert torch.equal(before, torch.get_rng_state())
    numbers.end()
