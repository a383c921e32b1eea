from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench.methods.gact.sensitivity import Probing
from actbench.packing.hooked import HookedForward
from actbench.packing.hooked.occurrences import MOST_LATE, Occurrences


def made(function, rows=8):
    return function(torch.ones(rows, 4, requires_grad=True))


def test_a_tensor_is_known_by_its_operator_its_shape_and_its_turn():
    sites = Occurrences(4)
    sites.begin()
    first, second, other = sites.site(made(torch.tanh)), sites.site(made(torch.tanh)), sites.site(made(torch.exp))
    sites.begin()

    assert (first.path, second.path) == ("TanhBackward0 [4] #0", "TanhBackward0 [4] #1")
    assert other.path == "ExpBackward0 [4] #0"
    assert sites.site(made(torch.exp)) is other  # whatever came before it
    assert [sites.site(made(torch.tanh, rows)) for rows in (3, 5)] == [first, second]
    assert list(sites) == [first, second, other]


def test_what_was_seen_is_of_the_last_pass():
    sites = Occurrences(4)
    for functions in ((torch.tanh, torch.exp), (torch.exp,)):
        sites.begin()
        for function in functions:
            sites.site(made(function))

    assert [[site.path for site in kind] for kind in sites.seen().values()] == [["ExpBackward0 [4] #0"]]


def test_each_run_of_a_block_begins_anew():
    sites = Occurrences(4)
    sites.begin()
    outer = sites.site(made(torch.tanh))
    with sites.block("blocks.0"):
        first = sites.site(made(torch.tanh))
    with sites.block("blocks.1"):
        other = sites.site(made(torch.tanh))
    with sites.block("blocks.0"):
        assert sites.site(made(torch.tanh)) is first
        assert sites.site(made(torch.tanh)).path == "blocks.0 TanhBackward0 [4] #1"

    assert len({outer, first, other}) == 3
    assert sites.site(made(torch.tanh)).path == "TanhBackward0 [4] #1"


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
    sites = HookedForward.of(model).hooks.sites
    for length in range(5, 55):
        model(tokens(length)).backward()
        counts.append(len(list(sites)))

    assert counts[1:] == counts[:1] * 49
    assert len(sites.seen()) > 5


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
            found[length] = [site.bits for kind in forward.hooks.sites.seen().values() for site in kind]

        assert len(set(found[first])) > 1
        assert all(sorted(bits) == sorted(found[first]) for bits in found.values())


def test_a_tensor_of_another_length_has_the_place_of_the_same_turn():
    sites = Occurrences(4)
    sites.begin([(10,)])
    first = [sites.site(torch.tanh(torch.ones(2, length, 4, requires_grad=True))) for length in (10, 7, 10)]
    sites.begin([(20,)])
    again = [sites.site(torch.tanh(torch.ones(2, length, 4, requires_grad=True))) for length in (20, 7, 20)]
    more = sites.site(made(torch.tanh).view(8, 2, 2).tanh())

    assert again == first
    assert more.path == "TanhBackward0 of 3 dimensions #3"
    assert list(sites) == [*first[::2], first[1], more]


def test_lengths_that_no_input_tells_of_are_told_apart_so_far_and_no_further():
    sites, counts = Occurrences(4), []
    for length in range(2 * MOST_LATE):
        sites.begin()
        sites.site(torch.tanh(torch.ones(2, 1 + length, 4, requires_grad=True)))
        counts.append(len(list(sites)))

    assert counts[-1] == counts[MOST_LATE] == 1 + MOST_LATE


def test_what_was_written_down_is_read_again():
    sites, other = Occurrences(4), Occurrences(4)
    for lengths in ([(10,)], [(20,)]):
        sites.begin(lengths)
        for length in (lengths[0][0], 7):
            sites.site(torch.tanh(torch.ones(2, length, 4, requires_grad=True)))
    sites.begin([(20,)])
    for site in [sites.site(torch.tanh(torch.ones(2, 5, 4, requires_grad=True))) for _ in range(3)]:
        site.bits = len(site.path)
    other.adapt(sites.adapted())
    other.begin([(30,)])
    found = [other.site(torch.tanh(torch.ones(2, 5, 4, requires_grad=True))) for _ in range(3)]

    assert [(site.path, site.bits) for site in other] == [(site.path, site.bits) for site in sites]
    assert [site.bits for site in found] == [len(site.path) for site in found]
