"""What predictions learn from simulated stacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actbench import scheme as schemes
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.needs import Needs
from actbench.tools.fit.prediction import Predictions

EXACT = Needs(
    weights=16.0,
    gradients=16.0,
    state=32.0,
    activations=12.0,
    forward=1.0,
    backward=2.0,
    update=8.0,
    lost=0.5,
    passes_seconds=1.0,
    update_seconds=0.25,
)
CHECKPOINT, OFFLOAD, RELEASE, LORA, ADAM8BIT = (
    Choice(spec, schemes.build(spec)) for spec in ("checkpoint", "optimizer_offload", "release", "lora:16", "adam8bit")
)


def learned(*stacks: tuple[tuple[Choice, ...], Needs]) -> Predictions:
    found = Predictions()
    for stack, needs in (((), EXACT), *stacks):
        found.learn(frozenset(stack), needs)
    return found


def needs(predictions: Predictions, *stack: Choice) -> Needs:
    found = predictions.of(frozenset(stack))
    assert found is not None
    return found


@pytest.mark.parametrize("first", ["slow update", "release"])
def test_a_slow_update_is_as_slow_within_the_backward_pass(first: str) -> None:
    slow = (OFFLOAD,), replace(EXACT, state=0.0, update_seconds=10.0)
    within = (RELEASE,), replace(EXACT, gradients=0.0, passes_seconds=1.25, update_seconds=0.0)
    recomputing = (CHECKPOINT,), replace(EXACT, passes_seconds=1.5)
    found = learned(*((slow, within) if first == "slow update" else (within, slow)), recomputing)

    assert needs(found, OFFLOAD, RELEASE).seconds == pytest.approx(11.0)
    assert needs(found, OFFLOAD, RELEASE, CHECKPOINT).seconds == pytest.approx(11.5)


def test_what_disturbs_each_other_in_a_stack_does_so_in_those_that_are_like_it() -> None:
    adapted = replace(EXACT, gradients=0.2, state=0.4, passes_seconds=0.75, update_seconds=0.01)
    packed = replace(EXACT, state=16.0, update_seconds=0.125)
    together = replace(adapted, state=0.2, activations=0.5, passes_seconds=1.75, update_seconds=0.005)
    found = learned(
        ((LORA,), adapted),
        ((CHECKPOINT,), replace(EXACT, activations=1.0, passes_seconds=1.5)),
        ((ADAM8BIT,), packed),
        ((OFFLOAD,), replace(EXACT, state=0.0, update_seconds=10.0)),
        ((LORA, CHECKPOINT, ADAM8BIT), together),
    )

    without, exchanged = needs(found, LORA, CHECKPOINT), needs(found, LORA, CHECKPOINT, OFFLOAD)

    assert without.passes_seconds == exchanged.passes_seconds == pytest.approx(1.75)  # alone they predict 1.125
    assert without.state == pytest.approx(0.4)
    assert exchanged.update_seconds == pytest.approx(0.01 * 10 / 0.25)


def test_what_leaves_little_is_not_taken_out_of_a_stack() -> None:
    found = learned(
        ((CHECKPOINT,), replace(EXACT, activations=1.2)),
        ((OFFLOAD,), replace(EXACT, activations=0.12)),
        ((LORA,), EXACT),
    )
    before = needs(found, CHECKPOINT, LORA)
    found.learn(frozenset((CHECKPOINT, OFFLOAD, LORA)), replace(EXACT, activations=0.12))

    assert needs(found, CHECKPOINT, LORA) == before


def test_the_order_of_simulations_does_not_change_what_an_update_takes() -> None:
    slow = (OFFLOAD,), replace(EXACT, update_seconds=10.0)
    both = (OFFLOAD, RELEASE), replace(EXACT, gradients=0.0, passes_seconds=11.25, update_seconds=0.0)
    release = (RELEASE,), replace(EXACT, gradients=0.0, passes_seconds=1.25, update_seconds=0.0)
    recomputing = (CHECKPOINT,), replace(EXACT, passes_seconds=1.5)

    first, last = learned(slow, release, both, recomputing), learned(both, recomputing, release, slow)

    for stack in ((OFFLOAD, RELEASE), (OFFLOAD, RELEASE, CHECKPOINT), (RELEASE, CHECKPOINT)):
        assert needs(first, *stack) == needs(last, *stack)


def test_gradients_that_wait_packed_are_stepped_after_the_backward_pass() -> None:
    waiting = Choice("smaq,on=gradients/state", schemes.build("smaq,on=gradients/state"))
    found = learned(
        ((waiting,), replace(EXACT, update_seconds=1.25)),
        ((LORA,), replace(EXACT, gradients=0.2, passes_seconds=0.75, update_seconds=0.01)),
    )

    assert needs(found, waiting, LORA).seconds == pytest.approx(0.75 + 0.01 * 1.25 / 0.25)


def test_a_choice_that_leaves_nothing_is_not_taken_out_again() -> None:
    within = replace(EXACT, gradients=0.0, passes_seconds=1.25, update_seconds=0.0)
    both = replace(within, activations=1.0, passes_seconds=2.25)
    found = needs(learned(((RELEASE,), within), ((RELEASE, CHECKPOINT), both)), CHECKPOINT)

    assert (found.gradients, found.activations) == (16.0, 1.0)
    assert (found.passes_seconds, found.update_seconds) == pytest.approx((2.0, 0.25))
