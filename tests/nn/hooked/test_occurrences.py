from __future__ import annotations

import torch

from actbench.nn.hooked.occurrences import Occurrences


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
