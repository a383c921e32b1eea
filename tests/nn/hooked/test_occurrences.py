from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench.nn.hooked import HookedForward
from actbench.nn.hooked.occurrences import MOST_LATE, Occurrences
from actbench.nn.hooked.probing import Probing


def made(function, rows=8):
    return function(torch.ones(rows, 4, requires_grad=True))


def test_a_tensor_is_known_by_its_operator_its_shape_and_its_turn():
    places = Occurrences(4)
    places.begin()
    first, second, other = places.place(made(torch.tanh)), places.place(made(torch.tanh)), places.place(made(torch.exp))
    places.begin()

    assert (first.path, second.path) == ("TanhBackward0 [4] #0", "TanhBackward0 [4] #1")
    assert other.path == "ExpBackward0 [4] #0"
    assert places.place(made(torch.exp)) is other  # whatever came before it
    assert [places.place(made(torch.tanh, rows)) for rows in (3, 5)] == [first, second]
    assert list(places) == [first, second, other]


def test_what_was_seen_is_of_the_last_pass():
    places = Occurrences(4)
    for functions in ((torch.tanh, torch.exp), (torch.exp,)):
        places.begin()
        for function in functions:
            places.place(made(function))

    assert [[place.path for place in kind] for kind in places.seen().values()] == [["ExpBackward0 [4] #0"]]


def test_each_run_of_a_block_begins_anew():
    places = Occurrences(4)
    places.begin()
    outer = places.place(made(torch.tanh))
    with places.block("blocks.0"):
        first = places.place(made(torch.tanh))
    with places.block("blocks.1"):
        other = places.place(made(torch.tanh))
    with places.block("blocks.0"):
        assert places.place(made(torch.tanh)) is first
        assert places.place(made(torch.tanh)).path == "blocks.0 TanhBackward0 [4] #1"

    assert len({outer, first, other}) == 3
    assert places.place(made(torch.tanh)).path == "TanhBackward0 [4] #1"


class Sentences(nn.Module):
    """A model of token sequences, whose tensors have the length in one dimension, in two, or in none."""

    def __init__(self):
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(50, 64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.loud = 1.0

    def forward(self, tokens):
        x = self.words(tokens).tanh()
        q, k, v = self.qkv(x).chunk(3, -1)
        x = (torch.softmax(q @ k.transpose(1, 2), -1) @ v).exp()
        first = self.out(x[:, 0]).sigmoid() + x.mean(1).sigmoid()
        return self.out(x).tanh().mean() + self.loud * first.mean()


def tokens(length, rows=4):
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.slow
def test_fifty_lengths_have_no_more_places_than_two(hook):
    model, counts = hook(Sentences(), bits=4), []
    places = HookedForward.of(model).hooks.places
    for length in range(5, 55):
        model(tokens(length)).backward()
        counts.append(len(list(places)))

    assert counts[1:] == counts[:1] * 49
    assert len(places.seen()) > 5


def test_bits_that_were_shared_out_at_one_length_hold_at_all(hook):
    """And the other way round: those that are found at another length than the first hold at the first."""
    for first, probed in ((9, 9), (9, 21)):
        model = hook(Sentences(), bits=3)
        forward = HookedForward.of(model)
        model(tokens(first))
        forward.probing = Probing(3, 1000)
        model(tokens(probed)).backward()
        found = {}
        for length in (first, probed, 30, 13):
            model(tokens(length))
            found[length] = [place.bits for kind in forward.hooks.places.seen().values() for place in kind]

        assert len(set(found[first])) > 1
        assert all(sorted(bits) == sorted(found[first]) for bits in found.values())


def test_a_tensor_of_another_length_has_the_place_of_the_same_turn():
    places = Occurrences(4)
    places.begin([(10,)])
    first = [places.place(torch.tanh(torch.ones(2, length, 4, requires_grad=True))) for length in (10, 7, 10)]
    places.begin([(20,)])
    again = [places.place(torch.tanh(torch.ones(2, length, 4, requires_grad=True))) for length in (20, 7, 20)]
    more = places.place(made(torch.tanh).view(8, 2, 2).tanh())

    assert again == first
    assert more.path == "TanhBackward0 of 3 dimensions #3"
    assert list(places) == [*first[::2], first[1], more]


def test_lengths_that_no_input_tells_of_are_told_apart_so_far_and_no_further():
    places, counts = Occurrences(4), []
    for length in range(2 * MOST_LATE):
        places.begin()
        places.place(torch.tanh(torch.ones(2, 1 + length, 4, requires_grad=True)))
        counts.append(len(list(places)))

    assert counts[-1] == counts[MOST_LATE] == 1 + MOST_LATE


def test_what_was_written_down_is_read_again():
    places, other = Occurrences(4), Occurrences(4)
    for lengths in ([(10,)], [(20,)]):
        places.begin(lengths)
        for length in (lengths[0][0], 7):
            places.place(torch.tanh(torch.ones(2, length, 4, requires_grad=True)))
    places.begin([(20,)])
    for place in [places.place(torch.tanh(torch.ones(2, 5, 4, requires_grad=True))) for _ in range(3)]:
        place.bits = len(place.path)
    other.adapt(places.adapted())
    other.begin([(30,)])
    found = [other.place(torch.tanh(torch.ones(2, 5, 4, requires_grad=True))) for _ in range(3)]

    assert [(place.path, place.bits) for place in other] == [(place.path, place.bits) for place in places]
    assert [place.bits for place in found] == [len(place.path) for place in found]
