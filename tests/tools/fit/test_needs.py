"""Copies of a model with a few of its blocks tell what a stack needs on the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from madeup import GIB, measured, simulate
from transformers import Qwen3Config

from actbench import workload as workloads
from actbench.measuring.bench import measure
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure, FailureReason
from actbench.tools.fit.choices import Stack, case_of, choices_for
from actbench.tools.fit.leftout import LEVELS
from actbench.tools.fit.needs import Copies, Needs
from actbench.tools.fit.search import Search
from actbench.workload.names import with_blocks

BLOCKS = 16


def blocks_of(case: Case) -> int:
    return int(case.model.rpartition("=")[2]) if "@" in case.model else BLOCKS


@pytest.mark.parametrize(
    ("specs", "blocks"),
    [
        (("lora:16", "checkpoint"), 16),
        (("gact:L3", "release"), 16),
        *(
            pytest.param(specs, blocks, marks=pytest.mark.slow)
            for specs, blocks in (
                ((), 16),
                (("checkpoint,every=2", "offload"), 16),
                (("checkpoint,every=4",), 32),
                (("selective:compute_intensive,every=2", "adam8bit"), 16),
                (("randomized:0.2", "msln", "autocast:bfloat16"), 16),
                (("pure:bfloat16", "chunked_loss:8", "optimizer_offload"), 16),
            )
        ),
    ],
)
def test_two_copies_tell_the_peak_and_the_time_of_the_whole_model(specs: tuple[str, ...], blocks: int) -> None:
    fields: dict[str, Any] = {"batch_size": 4, "sequence_length": 64, "device_profile": "rtx-4090"}
    case = Case(model=with_blocks("tiny-llama", blocks), **fields)
    stack = frozenset(choices_for(case, {}, names=specs).all)
    copies = Copies(case, blocks)

    told = copies.needs(stack, [measure(copy) for copy in copies.cases(stack)])
    found = Needs.of(measure(case_of(stack, case)))

    assert told is not None
    assert found is not None
    assert told.peak == pytest.approx(found.peak, rel=0.005)
    assert told.seconds == pytest.approx(found.seconds, rel=0.005)
    assert told.weights == pytest.approx(found.weights, rel=1e-6)


@pytest.mark.parametrize(
    ("spec", "blocks", "copies"),
    [
        ("checkpoint", 16, (1, 2)),
        ("checkpoint,every=2", 16, (2, 4)),
        ("checkpoint,every=4", 32, (4, 8)),
        ("checkpoint,every=4", 28, ()),
        ("fewbit:3", 12, ()),
        ("fewbit:3,only=encoder.layer.[0-5]", 64, ()),
        ("checkpoint,every=3+fewbit:3", 24, (3, 6)),
        ("checkpoint,every=3+fewbit:3,only=encoder", 24, ()),
    ],
)
def test_copies_hold_whole_periods_and_are_much_shorter(spec: str, blocks: int, copies: tuple[int, ...]) -> None:
    case = Case(model="roberta-base@hidden_size=64,num_hidden_layers=99", batch_size=1)
    stack = frozenset(choices_for(case, {}, names=[spec]).all)

    expected = [f"roberta-base@hidden_size=64,num_hidden_layers={count}" for count in copies]
    assert [copy.model for copy in Copies(case, blocks).cases(stack)] == expected


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        ("llama-3.1-8b", 32),
        ("gpt2@n_layer=3", 3),
        ("resnet-cifar", None),
        ("gemma-3-1b", None),
        ("whisper-large-v3", None),
    ],
)
def test_a_model_has_as_many_blocks_as_its_config_says_if_they_are_equal(model: str, blocks: int | None) -> None:
    workload = workloads.load_workload(Case(model=model, batch_size=1))
    assert getattr(workload, "equal_blocks", None) == blocks


FACTORS = {
    "checkpoint,every=2": (1, 1, 1, 0.6, 1.15, 1),
    "checkpoint": (1, 1, 1, 0.2, 1.3, 1),
    "gact:L2": (1, 1, 1, 0.3, 1.2, 1),
    "fewbit:4": (1, 1, 1, 0.85, 1.02, 1),
    "msln": (1, 1, 1, 0.9, 0.99, 1),
    "release": (1, 0.1, 1, 1, 1.05, 1),
    "adam8bit:torchao": (1, 1, 0.3, 1, 1, 1.4),
}
"""Of weights, gradients, state, activations, time of the passes and of the update."""


class OfBlocks:
    """Steps that grow evenly with the blocks of their model, from a share that is there without any."""

    share = 0.2

    def __init__(self) -> None:
        self.whole: list[Stack] = []

    def __call__(self, stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
        for case, stack in stacks.items():
            if blocks_of(case) == BLOCKS:
                self.whole.append(stack)
            yield case, self.outcome(case, stack)

    def outcome(self, case: Case, stack: Stack) -> Outcome:
        size = self.share + (1 - self.share) * blocks_of(case) / BLOCKS
        found = [4.0 * size, 4.0 * size, 8.0 * size, 12.0 * size, size, 0.1 * size]
        for choice in stack:
            found = [amount * factor for amount, factor in zip(found, FACTORS[choice.name], strict=True)]
        held = [round(GIB * amount) for amount in found[:4]]
        return measured(held, *found[4:], case.memory_limit_bytes or 0)


def search_of(limit: int, device: OfBlocks, *, copies: bool, jobs: int = 1) -> Search:
    case = Case(model="tiny-llama", batch_size=1, device_profile="rtx-4090", memory_limit_bytes=limit * GIB)
    choices = choices_for(case, {}, names=list(FACTORS))
    search = Search(case, limit * GIB, choices, jobs=jobs, copies=Copies(case, BLOCKS) if copies else None)
    search.run(device)
    return search


@pytest.mark.parametrize("limit", [6, 10, 16, 20])
def test_with_copies_a_search_finds_the_same_and_simulates_fewer_whole_models(limit: int) -> None:
    device, other = OfBlocks(), OfBlocks()
    search, without = search_of(limit, device, copies=True), search_of(limit, other, copies=False)

    assert seconds_of(search) == pytest.approx(seconds_of(without), rel=0.002)
    assert len(device.whole) < 0.7 * len(other.whole)


def seconds_of(search: Search) -> list[float]:
    """Return the time of the fastest stack of each level; 0 if nothing fits."""
    found = [search.fastest(level.training) for level in LEVELS]
    return [0.0 if stack is None else search.seconds(stack) for stack in found]


def test_copies_that_tell_something_else_of_the_exact_step_are_not_asked() -> None:
    class Crooked(OfBlocks):
        def outcome(self, case: Case, stack: Stack) -> Outcome:
            more = {"model": with_blocks(case.model, 3)} if blocks_of(case) == 2 else {}
            return super().outcome(case.model_copy(update=more), stack)

    search, without = (search_of(16, Crooked(), copies=each) for each in (True, False))

    assert list(search.explored) == [frozenset()]
    assert search.outcomes == without.outcomes


@pytest.mark.parametrize("reason", ["unsupported", "timeout"])
def test_copies_of_which_the_exact_step_fails_are_not_asked(reason: FailureReason) -> None:
    class Refused(OfBlocks):
        def outcome(self, case: Case, stack: Stack) -> Outcome:
            found = super().outcome(case, stack)
            return found if blocks_of(case) == BLOCKS else Failure(reason=reason, message="no such config")

    search, without = (search_of(16, Refused(), copies=each) for each in (True, False))

    assert list(search.explored) == [frozenset()]
    assert search.outcomes == without.outcomes


def test_a_folder_whose_config_lists_its_layers_is_searched_whole(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen3Config(num_hidden_layers=BLOCKS, head_dim=16, vocab_size=128, **sizes).save_pretrained(tmp_path / "qwen3")
    settings = {"sequence_length": 64, "device_profile": "rtx-4090", "memory_limit_bytes": 6 * 1024**2}
    case = Case(model=str(tmp_path / "qwen3"), batch_size=8, task="causal-lm", **settings)
    assert getattr(workloads.load_workload(case), "equal_blocks", None) == BLOCKS

    choices = choices_for(case, {}, names=["checkpoint"])
    search = Search(case, 6 * 1024**2, choices, copies=Copies(case, BLOCKS))
    search.run(simulate)

    assert isinstance(search.explored[frozenset()], Failure)
    assert isinstance(search.outcomes[frozenset(choices.all)], Measurement)


def test_where_time_ends_before_the_copies_the_exact_step_is_not_said_to_be_missing() -> None:
    class Ended(OfBlocks):
        def __call__(self, stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
            return super().__call__({case: stack for case, stack in stacks.items() if blocks_of(case) == BLOCKS})

    search = search_of(16, Ended(), copies=True)
    assert frozenset() in search.outcomes
    assert frozenset() not in search.untried


@pytest.mark.parametrize("limit", [10, 16])
@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_a_stack_whose_copy_fails_is_simulated_whole(limit: int, jobs: int) -> None:
    class Failing(OfBlocks):
        def outcome(self, case: Case, stack: Stack) -> Outcome:
            if blocks_of(case) != BLOCKS and "checkpoint" in case.scheme:
                return Failure(reason="timeout", message="too slow")
            return super().outcome(case, stack)

    search, without = (search_of(limit, Failing(), copies=each, jobs=jobs) for each in (True, False))

    assert any("checkpoint" in choice.name for stack in without.outcomes for choice in stack)
    assert seconds_of(search) == pytest.approx(seconds_of(without), rel=0.002)


def test_the_least_that_is_needed_is_simulated_whole_though_nothing_fits() -> None:
    device = OfBlocks()
    search = search_of(3, device, copies=True)

    least = min(device.outcome(search.exact, stack).peak_bytes or 0 for stack in search.seen)
    assert min(outcome.peak_bytes or 0 for outcome in search.outcomes.values()) == least
