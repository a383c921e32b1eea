"""Plans against whole simulations: of all plans of small spaces, of stacks made by hand, and of what runs for real."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from marks import slow_or_exhaustive
from surveyed import ANY_NUMBER, measured, planner_of, simulate

from actbench import scheme as schemes
from actbench.machine import now, provenance
from actbench.model.blocks import BlockReading
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case
from actbench.report.advice import needed_bytes
from actbench.tools.convert.model import conversion_of, convert
from actbench.tools.fit.plan import Action, Plan, candidates_for
from actbench.tools.fit.planner import Goal, Planner
from actbench.tools.fit.records import ANY, EXACT, LEVELS, FitRecord
from actbench.workload import load_workload

TEXT = {"sequence_length": 64}
MODELS: dict[str, dict[str, int]] = {
    "tiny-llama@num_hidden_layers=2": TEXT,
    "tiny-llama@num_hidden_layers=3": TEXT,
    "tiny-llama@num_hidden_layers=3,hidden_size=128": TEXT,
    "tiny-llama@num_hidden_layers=2,vocab_size=4096": TEXT,
    "tiny-gpt2@n_layer=2": TEXT,
    "tiny-gpt2@n_layer=3": TEXT,
    "tiny-gpt2@n_layer=3,n_embd=128": TEXT,
    "tiny-bert@num_hidden_layers=2": TEXT,
    "tiny-bert@num_hidden_layers=3": TEXT,
    "tiny-bert@num_hidden_layers=3,intermediate_size=512": TEXT,
    "tiny-roberta@num_hidden_layers=2": TEXT,
    "tiny-roberta@num_hidden_layers=4": TEXT,
    "tiny-distilbert@n_layers=2": TEXT,
    "tiny-distilbert@n_layers=3": TEXT,
    "tiny-t5@num_layers=1": TEXT,
    "tiny-t5@num_layers=2": TEXT,
    "tiny-vit@num_hidden_layers=2": {},
    "tiny-vit@num_hidden_layers=4": {},
    "qwen3-0.6b@num_hidden_layers=2,hidden_size=128,intermediate_size=384,vocab_size=512": TEXT,
    "qwen3-0.6b@num_hidden_layers=3,hidden_size=128,intermediate_size=256,vocab_size=2048": TEXT,
    "gemma-3-1b@num_hidden_layers=3,hidden_size=128,intermediate_size=512,vocab_size=512": TEXT,
    "mistral-7b@num_hidden_layers=3,hidden_size=128,intermediate_size=512,vocab_size=512,head_dim=32,"
    "num_attention_heads=4,num_key_value_heads=2": TEXT,
    "modernbert-base@num_hidden_layers=4,hidden_size=128,intermediate_size=192,num_attention_heads=4,vocab_size=512,"
    "pad_token_id=3,bos_token_id=1,eos_token_id=2,cls_token_id=1,sep_token_id=2": TEXT,
    "deberta-v3-base@num_hidden_layers=2,hidden_size=128,intermediate_size=256,num_attention_heads=2,vocab_size=512,"
    "pooler_hidden_size=128": TEXT,
    "mamba-130m@num_hidden_layers=3,hidden_size=64,vocab_size=512": TEXT,
    "whisper-small@encoder_layers=2,decoder_layers=2,d_model=64,encoder_ffn_dim=128,decoder_ffn_dim=128,"
    "encoder_attention_heads=2,decoder_attention_heads=2": {},
    "resnet-cifar": {},
    "inception-cifar": {},
    "squeezenet1_1": {"image_size": 64},
    "resnet18": {"image_size": 64},
}
"""Small real models, with the settings of their cases."""


SCHEMES = ("checkpoint", "actnn:L2")
BLOCKS = 3  # of which every plan is simulated; what is done with the others is left as it is
FURTHER = {
    *("tiny-llama@num_hidden_layers=3", "tiny-gpt2@n_layer=3", "tiny-bert@num_hidden_layers=3"),
    *("tiny-roberta@num_hidden_layers=4", "tiny-distilbert@n_layers=3", "tiny-t5@num_layers=2"),
    *("tiny-vit@num_hidden_layers=4", "tiny-llama@num_hidden_layers=2,vocab_size=4096"),
    *("tiny-gpt2@n_layer=2", "mamba-130m", "inception-cifar", "squeezenet1_1", "resnet"),
    *("qwen3-0.6b@num_hidden_layers=3", "gemma-3-1b", "mistral-7b", "modernbert-base", "deberta-v3-base"),
}
"""Deeper models of a kind, and others of which every plan takes long to simulate."""


@functools.cache
def surveyed(model: str) -> Planner:
    return planner_of(model, SCHEMES, batch_size=16, **MODELS[model])


def singles(planner: Planner) -> list[Action]:
    return [action for action in planner.space.ways[0].actions if len(action) < 2]


def simulated(plan: Plan, planner: Planner, limit: int = ANY_NUMBER) -> Measurement:
    """Return the whole simulation of a plan."""
    case = plan.case(planner.exact, planner.space.blocks.whole).model_copy(update={"memory_limit_bytes": limit})
    if isinstance(known := planner.outcomes.get(case), Measurement):
        return known
    ((_, outcome),) = simulate({case: plan})
    assert isinstance(outcome, Measurement), (case.scheme, outcome)
    return outcome


def seconds_of(found: Measurement) -> float:
    assert found.estimated is not None
    return found.estimated.step_seconds


def kinds() -> list[Any]:
    return slow_or_exhaustive(MODELS, lambda model: any(map(model.startswith, FURTHER)))


@pytest.mark.parametrize("model", kinds())
def test_the_answer_is_within_one_percent_of_the_fastest_of_all_plans(model: str) -> None:
    planner = surveyed(model)
    count = len(planner.space.blocks.paths)
    assert count, model
    free = range(max(0, count - BLOCKS), count)
    everything = []
    for chosen in itertools.product(singles(planner), repeat=len(free)):
        actions = (frozenset[object](),) * (count - len(free)) + chosen
        plan = Plan(actions=actions if any(actions) else ())
        found = simulated(plan, planner)
        everything.append((found.peak_bytes, needed_bytes(found), seconds_of(found)))
    low, high = min(need for _, need, _ in everything), max(need for _, need, _ in everything)

    for share in (0.1, 0.4, 0.7, 1.0):
        limit = round(low + share * (high - low))
        planner.pursue([Goal(ANY, limit)])
        found = planner.fastest(Goal(ANY, limit))
        best = min(seconds for _, need, seconds in everything if need <= limit)
        assert found is not None
        assert found.need <= limit
        assert found.seconds <= 1.01 * best


def some_plans(planner: Planner, count: int, seed: int = 0) -> list[Plan]:
    """Return plans with random actions on all blocks."""
    chance, blocks = random.Random(seed), len(planner.space.blocks.paths)
    options = list(planner.space.ways[0].actions)
    return [Plan(actions=tuple(chance.choice(options) for _ in range(blocks))) for _ in range(count)]


def predicted(plan: Plan, planner: Planner) -> tuple[float, float]:
    """Return the peak and the seconds that the parts of a plan add up to."""
    setting = next(
        each
        for each in planner.space.settings(ANY)
        if each.around == plan.around and not each.rest and set(plan.actions) <= set(each.actions)
    )
    actions = plan.actions or (frozenset(),) * len(planner.space.blocks.paths)
    found = setting.plan([setting.actions.index(action) for action in actions])
    return found.peak, found.seconds


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("model", "within"),
    [
        ("tiny-llama@num_hidden_layers=3", 0.005),
        ("tiny-gpt2@n_layer=3", 0.005),
        ("tiny-vit@num_hidden_layers=4", 0.005),
        ("tiny-roberta@num_hidden_layers=4", 0.005),
        ("resnet-cifar", 0.02),
        ("squeezenet1_1", 0.02),
    ],
)
def test_predictions_are_near_the_whole_simulation(model: str, within: float) -> None:
    planner = surveyed(model)

    for plan in some_plans(planner, 6):
        found, (peak, seconds) = simulated(plan, planner), predicted(plan, planner)
        assert peak == pytest.approx(found.peak_bytes, rel=within), plan.case(planner.exact, planner.space.blocks.whole)
        assert seconds_of(found) <= 1.01 * seconds


def test_an_optimizer_does_the_same_in_each_way_of_computing_with_the_same_state() -> None:
    planner = planner_of("resnet18", ("autocast:bfloat16", "adam8bit:torchao"), batch_size=64)
    first, other = (each for each in planner.space.ways if each.parts == 1)
    assert [choice.name for choice in other.around] == ["autocast:bfloat16"]
    assert other.changes == first.changes != {}
    together = Plan(other.around.union(*other.changes))
    whole = planner.space.blocks.whole
    assert together.case(planner.exact, whole) not in planner.outcomes  # it was not simulated

    found = simulated(together, planner).phase_peaks, simulated(Plan(other.around), planner).phase_peaks
    (costs,) = other.changes.values()
    assert found[0].optimizer_bytes - found[1].optimizer_bytes == costs.update


@pytest.mark.slow
def test_within_one_limit_fewer_simulations_of_other_ways_of_computing_give_the_same_answer() -> None:
    settings = {"meter": "simulated", "device_profile": "a100-80gb", "gradient_quality": False, **TEXT}
    case = Case(model="tiny-roberta@num_hidden_layers=6", batch_size=256, memory_limit_bytes=ANY_NUMBER, **settings)
    names = ("checkpoint", "msln", "wtacrs:0.3", "lora:4", "autocast:bfloat16", "pure:bfloat16")
    known: dict[Case, Outcome] = {}

    def remembered(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        known.update(simulate({case: plan for case, plan in plans.items() if case not in known}))
        yield from ((case, known[case]) for case in plans)

    def answered(within: float) -> tuple[Planner, int]:
        """Return a planner with an answer, and how many simulations it was made from."""
        planner = Planner(case, candidates_for(case, {}, names=names), remembered)
        planner.start()
        planner.begin()
        planner.look_further(within * planner.exact_step.need)
        count = len(planner.outcomes)
        planner.answer(round(0.9 * planner.exact_step.need), LEVELS)
        return planner, count

    (every, most), (few, count) = answered(0.0), answered(0.9)

    assert count < most
    limit = round(0.9 * every.exact_step.need)
    for level in LEVELS:
        best, found = every.fastest(Goal(level, limit)), few.fastest(Goal(level, limit))
        assert best is None or (found is not None and found.seconds <= 1.005 * best.seconds)


@pytest.mark.slow
def test_what_a_loss_in_pieces_holds_in_any_micro_batch_is_predicted() -> None:
    schemes_around = ("accumulate:2", "accumulate:4", "chunked_loss:8")
    planner = planner_of("tiny-llama@num_hidden_layers=2,vocab_size=8192", schemes_around, batch_size=16, **TEXT)

    both = [each for each in planner.space.settings(EXACT) if len(each.around) == 2]

    def peaks(parts: int) -> tuple[float, float]:
        (plan,) = (Plan(each.around) for each in both if f"accumulate:{parts}" in {one.name for one in each.around})
        return predicted(plan, planner)[0], simulated(plan, planner).peak_bytes

    assert len(both) == 2
    said, peak = peaks(2)
    assert said == pytest.approx(peak, rel=0.001)
    said, peak = peaks(4)  # of more parts than the fewest nothing is simulated: what may not shrink does not
    assert peak <= said <= 1.05 * peak


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("tiny-llama@num_hidden_layers=4,hidden_size=256,intermediate_size=1024,num_attention_heads=4", TEXT),
        ("tiny-roberta@num_hidden_layers=4,hidden_size=256,intermediate_size=1024", TEXT),
        ("tiny-gpt2@n_layer=4,n_embd=256", TEXT),
        ("resnet-cifar", {}),
    ],
)
def test_the_cpu_needs_what_was_simulated(model: str, settings: dict[str, int]) -> None:
    planner = planner_of(model, SCHEMES, batch_size=16, **settings)

    for plan in some_plans(planner, 3):
        case = plan.case(planner.exact, planner.space.blocks.whole).model_copy(update={"memory_limit_bytes": None})
        real = measured(case.model_copy(update={"meter": "cpu", "device_profile": None}))
        like_it = measured(case.model_copy(update={"device_profile": "cpu"}))
        assert real.peak_bytes == pytest.approx(like_it.peak_bytes, rel=0.02), case.scheme


def by_hand(planner: Planner) -> list[Plan]:
    """Return uniform, first-k, last-k and every-n plans of each single action."""
    blocks = len(planner.space.blocks.paths)
    found = []
    for action in singles(planner):
        chosen = [range(blocks), *(range(count) for count in range(1, blocks))]
        chosen += [range(count, blocks) for count in range(1, blocks)]
        chosen += [range(start, blocks, step) for step in (2, 3) for start in (0, 1)]
        found += [
            Plan(actions=tuple(action if place in places else frozenset() for place in range(blocks)))
            for places in chosen
            if action
        ]
    return found


@pytest.mark.exhaustive
def test_no_stack_made_by_hand_is_faster() -> None:
    planner = planner_of("tiny-llama@num_hidden_layers=8", ("checkpoint", "gact:L2", "fewbit:2"), batch_size=16, **TEXT)
    hand = by_hand(planner)
    assert len(hand) >= 54
    needs = [(needed_bytes(found), seconds_of(found)) for found in (simulated(plan, planner) for plan in hand)]
    low, high = min(need for need, _ in needs), max(need for need, _ in needs)

    for share in (0.0, 0.25, 0.5, 0.75):
        limit = round(low + share * (high - low))
        planner.pursue([Goal(ANY, limit)])
        found = planner.fastest(Goal(ANY, limit))
        assert found is not None
        assert found.seconds <= min(seconds for need, seconds in needs if need <= limit) * (1 + 1e-9)


@pytest.mark.exhaustive
def test_where_the_allocator_loses_more_with_mixed_plans_one_action_on_some_blocks_is_found() -> None:
    planner = planner_of("tiny-llama@num_hidden_layers=6", ("checkpoint", "fewbit:2"), batch_size=16, **TEXT)

    def losing(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        for case, outcome in simulate(plans):
            assert isinstance(outcome, Measurement)
            lost = outcome.peak_bytes // 12 if len(plans[case].candidates) > 1 else 0
            yield case, outcome.model_copy(update={"reserved_bytes": outcome.peak_bytes + lost})

    planner.simulate = losing
    least = planner.space.least(ANY)
    assert least is not None
    goal = Goal(ANY, round(least.peak + 0.4 * (planner.exact_step.need - least.peak)))
    planner.pursue([goal])
    found, count = planner.fastest(goal), len(planner.outcomes)
    by_hand = planner.tried(planner.space.of_some(ANY, goal.limit)[:2], goal.limit)

    assert found is not None
    assert by_hand is not None
    assert found.seconds <= by_hand.seconds
    assert len(planner.outcomes) == count


@pytest.mark.exhaustive
def test_more_memory_is_never_slower_and_no_plan_is_over_its_budget() -> None:
    planner = planner_of("tiny-llama@num_hidden_layers=2", SCHEMES, batch_size=16, **TEXT)
    exact = planner.found[0].need
    planner.frontiers((EXACT, ANY))
    curves = {}
    for level in (EXACT, ANY):
        least = planner.space.least(level)
        assert least is not None
        budgets = [round(least.peak + share / 10 * (exact - least.peak)) for share in range(11)]
        found = [planner.fastest(Goal(level, budget)) for budget in budgets]
        assert all(each.need <= budget for each, budget in zip(found, budgets, strict=True) if each is not None)
        curves[level] = [each.seconds if each else math.inf for each in found]
        assert curves[level] == sorted(curves[level], reverse=True)
        assert curves[level][-1] < math.inf
    assert all(two <= one for one, two in zip(curves[EXACT], curves[ANY], strict=True))


@pytest.mark.slow
def test_a_plan_with_ranges_is_the_same_case_everywhere() -> None:
    planner = surveyed("tiny-llama@num_hidden_layers=3")
    (checkpoint,) = (action for action in singles(planner) if {choice.name for choice in action} == {"checkpoint"})
    (actnn,) = (action for action in singles(planner) if {choice.name for choice in action} == {"actnn:L2"})
    case = Plan(actions=(checkpoint, checkpoint, actnn)).case(planner.exact, planner.space.blocks.whole)
    assert "checkpoint,only=model.layers.[0-1]" in case.scheme

    assert Case.model_validate_json(case.model_dump_json()) == case
    found = measured(case)
    record = FitRecord(case=case, outcome=found, recipe="fit", recorded_at=now(), **provenance("actbench fit"))
    assert FitRecord.model_validate_json(record.model_dump_json()) == record
    assert schemes.build(record.case.scheme).spec == case.scheme

    exact = measured(planner.exact).blocks
    assert exact is not None
    assert found.blocks is not None
    changed = [one != two for one, two in zip(map(held, exact.blocks), map(held, found.blocks.blocks), strict=True)]
    assert changed == [True, True, True]
    module = load_workload(case).setup(materialize=True, seed=0).module
    conversion = conversion_of(convert(module, case.scheme))
    assert conversion is not None
    assert {site.path.split(".")[2] for site in conversion.sites} == {"0", "1", "2"}


def held(block: BlockReading) -> int:
    return block.after_bytes - block.before_bytes
