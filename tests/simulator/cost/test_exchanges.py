"""Collectives run beside what is computed, on links of a certain rate, and who needs their result waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from actbench.model.estimated import EstimatedTime
from actbench.model.records import Phase
from actbench.simulator.cost.clock import EXCHANGING, estimate
from actbench.simulator.cost.collectives import Collective, CollectiveKind
from actbench.simulator.cost.links import Links, LinkShares, exchanging
from actbench.simulator.cost.queues import IN_ORDER, Turn
from actbench.simulator.cost.rates import Efficiencies, Efficiency, Host, Rates
from actbench.simulator.cost.recorder import Done
from actbench.simulator.cost.work import OperatorWork, exchange

LINKS = Links(peer=1e10, network=4e10, devices=8)
PERFECT = LinkShares(bandwidth=1.0, start=0.0, peer_hop=0.0, network_hop=0.0)
RATES = Rates({"fp32": 1e12}, bandwidth=1e11, link=1e10, launch=0.0, links=LINKS, source="")
KINDS = {"elementwise": Efficiency({}, memory=1.0, ramp=0.0)}
SHARES = Efficiencies(KINDS, Host(1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 0.0, bandwidth=1e10), PERFECT, overlap=20.0)
AHEAD = Turn(is_beside=True, is_free=True)
MS = 1e-3


def compute(seconds: float, turn: Turn = IN_ORDER, phase: Phase = "forward") -> Done:
    return Done(
        phase, OperatorWork("add", "elementwise", moved=round(seconds * RATES.bandwidth), launches=1), False, turn
    )


def send(seconds: float, kind: CollectiveKind, turn: Turn, phase: Phase = "forward") -> Done:
    """Return a collective of two processes of one machine that takes so long."""
    total = seconds * LINKS.peer * (1 if kind == "all-reduce" else 2)
    return Done(phase, exchange(Collective(kind, round(total), (0, 1))), False, turn)


def gathered(blocks: int, phase: Phase, communicating: float, computing: float, first: int = 0) -> list[Done]:
    """Return blocks whose parameters are gathered before each computes."""
    return [
        each
        for place in range(first, first + blocks)
        for each in (
            send(communicating, "all-gather", AHEAD, phase),
            compute(0.0, Turn(needs=place), phase),
            compute(computing, phase=phase),
        )
    ]


def time(done: Sequence[Done], *, asynchronous: bool = True) -> EstimatedTime:
    return estimate(done, RATES, SHARES, asynchronous=asynchronous)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_parameters_are_gathered_while_the_block_before_computes(blocks: int) -> None:
    found = time(gathered(blocks, "forward", 1 * MS, 3 * MS))

    assert found.step_seconds == pytest.approx((1 + 3 * blocks) * MS, rel=1e-3)
    assert found.communication_seconds == pytest.approx(blocks * MS, rel=1e-3)
    assert found.exposed_seconds == pytest.approx(1 * MS, rel=1e-3)


def test_a_slow_link_is_what_a_step_waits_for() -> None:
    found = time(gathered(5, "forward", 3 * MS, 1 * MS))

    assert found.step_seconds == pytest.approx((5 * 3 + 1) * MS, rel=1e-3)
    assert found.exposed_seconds == pytest.approx((5 * 3 - 4) * MS, rel=1e-3)
    waited = next(each for each in found.by_operator if each.name == EXCHANGING)
    assert waited.seconds == found.exposed_seconds


def test_the_next_block_but_one_is_gathered_when_a_block_has_been_copied_out() -> None:
    done = [*gathered(1, "forward", 1 * MS, 10 * MS), *gathered(3, "forward", 1 * MS, 0.1 * MS, first=1)]

    found = time(done)

    # The second and the third are gathered while the first computes, until 11 ms; the fourth only then.
    assert found.step_seconds == pytest.approx((1 + 10 + 1 + 0.1) * MS, rel=1e-3)


def test_gradients_are_scattered_while_the_next_block_computes() -> None:
    def backward(count: int) -> list[Done]:
        pairs = (
            (compute(3 * MS, phase="backward"), send(1 * MS, "reduce-scatter", Turn(is_beside=True), "backward"))
            for _ in range(count)
        )
        return [each for pair in pairs for each in pair]

    found = time([*backward(4), compute(0.5 * MS, phase="optimizer")])

    assert found.step_seconds == pytest.approx((4 * 3 + 1 + 0.5) * MS, rel=1e-3)
    assert found.exposed_seconds == pytest.approx(1 * MS, rel=1e-3)


def test_a_block_waits_until_the_gradients_of_the_one_before_are_scattered() -> None:
    turn = Turn(is_beside=True)
    pair = [compute(1 * MS, phase="backward"), send(5 * MS, "reduce-scatter", turn, "backward")]

    found = time([*pair, *pair, *pair, compute(1 * MS, phase="backward")])

    assert found.step_seconds == pytest.approx((1 + 3 * 5) * MS, rel=1e-3)


def test_a_sum_that_is_needed_at_once_is_waited_for() -> None:
    done = [compute(2 * MS), send(1 * MS, "all-reduce", Turn(is_beside=True)), compute(2 * MS, Turn(needs=0))]

    found = time(done)

    assert found.step_seconds == pytest.approx(5 * MS, rel=1e-3)
    assert found.exposed_seconds == pytest.approx(1 * MS, rel=1e-3)
    assert found.communication_seconds == pytest.approx(1 * MS, rel=1e-3)


def test_what_runs_behind_a_collective_is_no_work_of_the_device() -> None:
    behind = Turn(is_beside=True)
    done = [compute(1 * MS, phase="backward"), send(1 * MS, "reduce-scatter", behind, "backward")]

    found = time([*done, compute(0.5 * MS, behind, "backward"), compute(4 * MS, phase="backward")])

    assert found.step_seconds == pytest.approx(5 * MS, rel=1e-3)


def test_on_a_cpu_nothing_runs_beside_anything_else() -> None:
    found = time(gathered(3, "forward", 1 * MS, 3 * MS), asynchronous=False)

    assert found.step_seconds == pytest.approx(3 * 4 * MS, rel=1e-3)
    assert found.exposed_seconds == pytest.approx(3 * MS, rel=1e-3)


def test_the_parts_of_a_step_and_its_operators_add_up_to_it() -> None:
    done = [*gathered(3, "forward", 2 * MS, 1 * MS), *gathered(3, "backward", 1 * MS, 2 * MS, first=3)]

    found = time([*done, send(1 * MS, "all-reduce", Turn(is_beside=True), "backward"), compute(MS, phase="optimizer")])

    parts = found.forward_seconds + found.backward_seconds + found.optimizer_seconds
    assert parts == pytest.approx(found.step_seconds)
    within = sum(each.seconds for each in found.by_operator if not each.is_beside)
    assert within == pytest.approx(found.step_seconds)
    beside = {each.name: each.calls for each in found.by_operator if each.is_beside}
    assert beside == {"all-gather": 6, "all-reduce": 1}


def test_a_step_of_one_process_says_nothing_of_others() -> None:
    found = time([compute(1 * MS)])

    assert found.communication_seconds is None
    assert found.exposed_seconds is None


@pytest.mark.parametrize(
    ("ranks", "rate"),
    [
        (range(2), 1e10),  # of one machine: its peer links
        (range(8), 1e10),
        (range(16), 1e10),  # all eight network cards of two machines together carry more than a device sends
        (range(0, 16, 8), 4e10 / 8),  # one process a machine has one eighth of its network cards
        (range(0, 32, 4), 4e10 / 4),
        ((0, 1, 8, 9), 4e10 / 4),
    ],
)
def test_a_ring_runs_at_the_rate_of_its_slowest_link(ranks: Sequence[int], rate: float) -> None:
    collective = Collective("all-gather", 10**9, tuple(ranks))

    assert exchanging(collective, LINKS, PERFECT) == pytest.approx(collective.sent_bytes / rate)


def test_what_goes_from_each_to_each_uses_both_kinds_of_links() -> None:
    total, links = 16 * 10**6, Links(peer=1e10, network=8e9, devices=8)

    within = exchanging(Collective("all-to-all", total, tuple(range(8))), links, PERFECT)
    across = exchanging(Collective("all-to-all", total, tuple(range(16))), links, PERFECT)

    assert within == pytest.approx(total * 7 / 8 / 1e10)
    assert across == pytest.approx(8 * total * 8 / 16 / 8e9)  # eight processes of a machine send half of it away


@pytest.mark.parametrize(("kind", "turns"), [("all-gather", 1), ("all-reduce", 2)])
def test_small_collectives_take_the_hops_around(kind: CollectiveKind, turns: int) -> None:
    shares = LinkShares(bandwidth=1.0, start=1e-5, peer_hop=1e-6, network_hop=1e-4)

    for machines in (1, 2, 4):
        found = exchanging(Collective(kind, 0, tuple(range(8 * machines))), LINKS, shares)
        assert found == pytest.approx(1e-5 + turns * (7 * machines * 1e-6 + (machines - 1) * 1e-4))
    assert exchanging(Collective(kind, 10**9, (3,)), LINKS, shares) == 0
