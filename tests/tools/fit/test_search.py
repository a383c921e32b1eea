"""The search against the whole of what can be put together, on steps that are made up and on simulated ones."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping

import pytest
from madeup import GIB, measured, simulate

from actbench.errors import UsageError
from actbench.model.estimated import OperatorTime
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure
from actbench.tools.fit.choices import Choices, Stack, case_of, choices_for, training_of
from actbench.tools.fit.leftout import EXACT, LEVELS, Level
from actbench.tools.fit.records import step_seconds_of
from actbench.tools.fit.search import Search


class MadeUp:
    """A device on which every choice has factors of its own, and every pair of them disturbs the factors a little."""

    def __init__(self, seed: int, disturbance: float) -> None:
        self._random = random.Random(seed)
        self._disturbance = disturbance
        self._factors: dict[object, list[float]] = {}
        self.calls: list[Stack] = []

    def __call__(self, stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
        for case, stack in stacks.items():
            self.calls.append(stack)
            yield case, self.outcome(stack, case.memory_limit_bytes or 0)

    def outcome(self, stack: Stack, limit: int) -> Measurement:
        found = [4 * GIB, 4 * GIB, 8 * GIB, 12 * GIB, 1.0, 0.1]
        names = sorted(choice.name for choice in stack)
        for name in [*names, *itertools.combinations(names, 2)]:
            found = [amount * factor for amount, factor in zip(found, self._of(name, stack), strict=True)]
        return measured(list(map(round, found[:4])), *found[4:], limit, beyond=(GIB // 2, GIB, GIB // 4))

    def _of(self, name: object, stack: Stack) -> list[float]:
        if name not in self._factors:
            draw, spread = self._random.uniform, self._disturbance
            if isinstance(name, tuple):
                self._factors[name] = [draw(1 - spread, 1 + spread) for _ in range(6)]
            else:
                changes = next(set(choice.changes) for choice in stack if choice.name == name)
                of_model = bool(changes & {"optimizer", "gradients"})
                less = [draw(0.3, 1.0) for _ in range(3)]
                held = [1.0, less[0] if of_model else 1.0, less[1] if of_model else 1.0, 1.0 if of_model else less[2]]
                self._factors[name] = [*held, draw(1.0, 1.3), draw(1.0, 3.0) if of_model else 1.0]
        return self._factors[name]


NAMES = (
    *("checkpoint,every=2", "checkpoint", "offload", "chunked_loss:8", "gact:L2"),
    *("fewbit:4", "msln", "release", "adam8bit", "optimizer_offload"),
)


def all_stacks(choices: Choices, most: int) -> list[Stack]:
    """Return every stack of so many choices that stand together."""
    found: list[Stack] = [frozenset()]
    for size in range(1, most + 1):
        for chosen in itertools.combinations(choices.all, size):
            grown: Stack = frozenset()
            for choice in chosen:
                grown = grown | {choice} if choices.together(grown, choice) else grown
            if len(grown) == size:
                found.append(grown)
    return found


def made_up_case(limit_gib: float) -> Case:
    return Case(model="tiny-llama", batch_size=1, device_profile="rtx-4090", memory_limit_bytes=round(limit_gib * GIB))


def fastest_of_all(device: MadeUp, choices: Choices, limit: int, level: Level) -> float | None:
    outcomes = {stack: device.outcome(stack, limit) for stack in all_stacks(choices, 5)}
    times = [
        step_seconds_of(outcome) or 0.0
        for stack, outcome in outcomes.items()
        if outcome.fits and training_of(stack).is_as_near(level.training)
    ]
    return min(times, default=None)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(8)])
@pytest.mark.parametrize("limit", [10, 16, 22])
def test_nothing_that_can_be_put_together_is_faster(seed: int, limit: int) -> None:
    """Effects are those of the choices alone, up to 3 % for each pair."""
    case = made_up_case(limit)
    choices, device = choices_for(case, {}, names=NAMES), MadeUp(seed, 0.03)
    search = Search(case, limit * GIB, choices)

    search.run(device)

    for level in EXACT, LEVELS[-2]:
        found, best = search.fastest(level.training), fastest_of_all(device, choices, limit * GIB, level)
        assert found is not None or best is None
        assert best is not None or found is None or len(found) > 5  # more than were put together
        if found is not None and best is not None and best < 2 * search.base.seconds:
            assert search.seconds(found) <= best * 1.002


def test_few_of_all_stacks_are_simulated() -> None:
    case = made_up_case(12)
    choices, device = choices_for(case, {}, names=NAMES), MadeUp(0, 0.03)

    Search(case, 12 * GIB, choices).run(device)

    assert len(device.calls) == len(set(device.calls))
    assert len(device.calls) < len(all_stacks(choices, 5)) / 5


def test_where_the_exact_step_fits_nothing_that_saves_is_tried() -> None:
    case = made_up_case(60)
    choices, device = choices_for(case, {"adamw-fused": True}, names=[*NAMES, "autocast:bfloat16"]), MadeUp(0, 0)

    Search(case, 60 * GIB, choices).run(device)

    assert {choice.name for stack in device.calls for choice in stack if not choice.quickens} <= {
        "autocast:bfloat16",
        "--optimizer adamw-fused",
        "adam8bit:torchao",
        "optimizer_offload",
    }


def test_what_makes_a_step_faster_is_found_where_nothing_has_to_be_saved() -> None:
    class Quick(MadeUp):
        def outcome(self, stack: Stack, limit: int) -> Measurement:
            found = super().outcome(stack, limit)
            share = 0.5 if any(choice.name == "fewbit:4" for choice in stack) else 1.0
            assert found.estimated is not None
            saved = (1 - share) * (found.estimated.forward_seconds + found.estimated.backward_seconds)
            seconds = {"step_seconds": found.estimated.step_seconds - saved}
            return found.model_copy(update={"estimated": found.estimated.model_copy(update=seconds)})

    case = made_up_case(60)
    choices = choices_for(case, {}, names=[*NAMES, "autocast:bfloat16"])
    search = Search(case, 60 * GIB, choices)

    search.run(Quick(0, 0))

    exact, approximate = (search.fastest(level.training) for level in (EXACT, LEVELS[-2]))
    assert exact is not None
    assert "fewbit:4" not in {choice.name for choice in exact}
    assert approximate is not None
    assert "fewbit:4" in {choice.name for choice in approximate}


@pytest.mark.parametrize(("model", "faster"), [("resnet18", True), ("vit-base-patch16-224@num_hidden_layers=2", False)])
def test_the_memory_format_is_tried_where_convolutions_take_time(model: str, faster: bool) -> None:
    case = Case(model=model, batch_size=32, meter="simulated", device_profile="v100-16gb")
    names = ["channels_last", "autocast:float16", "checkpoint"]
    search = Search(case, 60 * GIB, choices_for(case, {}, names=names, has_bfloat16=False))

    search.run(simulate)

    tried = {frozenset(choice.name for choice in stack) for stack in search.outcomes}
    fastest = search.fastest(LEVELS[-2].training)
    assert fastest is not None
    assert ("channels_last" in {choice.name for choice in fastest}) == faster
    assert any("channels_last" in names for names in tried) == faster


def test_where_the_optimizers_step_is_the_peak_alone_no_activations_are_compressed() -> None:
    """Weights, gradients and state need 26 GiB in the optimizer's step; the passes need 20."""

    class OfModel(MadeUp):
        def outcome(self, stack: Stack, limit: int) -> Measurement:
            found = super().outcome(stack, limit)
            peaks = found.phase_peaks
            assert peaks is not None
            update = peaks.optimizer_bytes + 10 * GIB
            more = {"phase_peaks": peaks.model_copy(update={"optimizer_bytes": update}), "peak_bytes": update}
            over = update - limit if update > limit else None
            return found.model_copy(update={**more, "over_limit_bytes": over, "activation_bytes": GIB})

    case = made_up_case(25.9)
    choices, device = choices_for(case, {}, names=NAMES), OfModel(0, 0)

    Search(case, case.memory_limit_bytes or 0, choices).run(device)

    needed = [choice for stack in device.calls for choice in stack if not choice.quickens]
    assert {change for choice in needed for change in choice.changes} == {"optimizer", "gradients"}


def test_what_trains_adapters_is_tried_where_there_are_adapters() -> None:
    case = made_up_case(60)
    choices, device = choices_for(case, {}, names=[*NAMES, "lora:16"]), MadeUp(0, 0)

    Search(case, 60 * GIB, choices).run(device)

    assert frozenset({"lora:16"}) in {frozenset(choice.name for choice in stack) for stack in device.calls}
    needed = [choice for stack in device.calls for choice in stack if not choice.quickens]
    assert {change for choice in needed for change in choice.changes} == {"optimizer", "parameters"}  # both fit


def test_a_scheme_that_the_model_refuses_for_one_list_is_tried_with_another() -> None:
    class Refusing(MadeUp):
        def __call__(self, stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
            for case, outcome in super().__call__(stacks):
                refused = "functions=relu" in case.scheme
                yield case, Failure(reason="nothing-converted", message="none") if refused else outcome

    case, names = made_up_case(10), ("fewbit:3,functions=relu", "fewbit:2,functions=relu", "fewbit:3,functions=gelu")
    choices, device = choices_for(case, {}, names=names), Refusing(0, 0)

    Search(case, 10 * GIB, choices).run(device)

    tried = {choice.name for stack in device.calls for choice in stack}
    assert {"fewbit:3,functions=gelu"} <= tried
    assert "fewbit:2,functions=relu" not in tried


def test_values_that_save_more_than_two_that_fit_are_left_out() -> None:
    class Halving(MadeUp):
        """Micro-batches that save what they promise."""

        def _of(self, name: object, stack: Stack) -> list[float]:
            parts = int(name.partition(":")[2]) if str(name).startswith("accumulate") else 1
            return [1.0, 1.0, 1.0, 1 / parts, 1.0, 1.0]

    case = made_up_case(23).model_copy(update={"batch_size": 64})  # of 28.5 GiB
    names = [f"accumulate:{parts}" for parts in (2, 4, 8, 16, 32, 64)]
    choices, device = choices_for(case, {}, names=names), Halving(0, 0)

    Search(case, 23 * GIB, choices).run(device)

    assert [choice.name for stack in device.calls for choice in stack] == ["accumulate:2", "accumulate:4"]


def test_of_what_the_model_refuses_no_second_value_is_tried() -> None:
    case = made_up_case(12)
    choices, device = choices_for(case, {}, names=["checkpoint", "chunked_loss:8", "chunked_loss:32"]), MadeUp(0, 0)
    tried: list[str] = []

    def refusing(stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
        for case, stack in stacks.items():
            tried.append(case.scheme)
            if "chunked_loss" in case.scheme:
                yield case, Failure(reason="nothing-converted", message="there is no head")
            else:
                yield from device({case: stack})

    Search(case, 12 * GIB, choices).run(refusing)

    assert sum("chunked_loss" in scheme for scheme in tried) == 1


def test_a_scaled_loss_and_gradients_that_are_stepped_at_once_do_not_stand_together() -> None:
    choices = choices_for(
        made_up_case(12), {}, names=["autocast:float16", "autocast:bfloat16", "release", "accumulate:2"]
    )
    float16, bfloat16, release, accumulate = choices.all

    assert not choices.together(frozenset({float16}), release)
    assert choices.together(frozenset({bfloat16}), release)
    assert choices.together(frozenset({float16}), accumulate)


@pytest.mark.parametrize(("has_bfloat16", "tried"), [(True, {"autocast:bfloat16"}), (False, {"autocast:float16"})])
def test_one_half_type_is_tried_under_autocast(has_bfloat16: bool, tried: set[str]) -> None:
    choices = choices_for(made_up_case(12), {}, has_bfloat16=has_bfloat16)

    assert {choice.name for choice in choices.all if choice.kind == "autocast"} == tried


def test_parameters_of_a_half_type_are_further_from_exact_training_than_autocast() -> None:
    choices = choices_for(made_up_case(12), {}, names=["autocast:bfloat16", "pure:bfloat16"])
    autocast, pure = (choice.training for choice in choices.all)

    assert autocast.is_as_near(pure)
    assert not pure.is_as_near(autocast)


def test_gradients_are_not_taken_where_the_step_itself_scales_its_loss() -> None:
    case = made_up_case(12).model_copy(update={"autocast": "float16"})

    assert "release" not in {choice.name for choice in choices_for(case, {}).all}


def test_what_time_does_not_suffice_for_is_told() -> None:
    case = made_up_case(12)
    choices, device = choices_for(case, {}, names=NAMES), MadeUp(0, 0)

    def two(stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
        yield from itertools.islice(device(stacks), max(0, 2 - len(device.calls)))

    search = Search(case, 12 * GIB, choices)
    search.run(two)

    assert len(search.outcomes) == 2
    assert frozenset() in search.outcomes
    assert search.untried


PARTS = ("checkpoint", "gact:L2", "chunked_loss:8", "release", "accumulate:2")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [12, 24])
def test_on_a_small_model_nothing_that_is_put_together_by_hand_is_faster(limit: int) -> None:
    settings = {"sequence_length": 64, "device_profile": "rtx-4090", "memory_limit_bytes": limit * 1024**2}
    case = Case(model="tiny-llama", batch_size=8, **settings)
    choices = choices_for(case, {}, names=PARTS)
    search = Search(case, limit * 1024**2, choices, max_slowdown=10)

    search.run(simulate)
    stacks = {case_of(stack, case): stack for stack in all_stacks(choices, 5)}
    by_hand = {
        stacks[tried]: outcome
        for tried, outcome in simulate({c: s for c, s in stacks.items() if s not in search.outcomes})
    }

    found = search.fastest(LEVELS[-2].training)
    assert found is not None
    times = [step_seconds_of(o) for o in by_hand.values() if isinstance(o, Measurement) and o.fits]
    assert search.seconds(found) <= min(time for time in times if time is not None) * 1.002 if times else True


@pytest.mark.parametrize(("seed", "jobs"), [(0, 1), (1, 4)])
def test_the_order_in_which_simulations_end_decides_nothing(seed: int, jobs: int) -> None:
    """On a cluster they end in any order, and what is tried next must be what one machine would try."""
    shuffled = random.Random(seed)

    class AnyOrder(MadeUp):
        def __call__(self, stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
            ended = list(super().__call__(stacks))
            shuffled.shuffle(ended)
            return iter(ended)

    case, found = made_up_case(12), []
    choices = choices_for(case, {}, names=NAMES)
    factors = MadeUp(seed, 0.1)
    for device in (factors, AnyOrder(seed, 0.1), AnyOrder(seed, 0.1)):
        device.outcome = factors.outcome  # type: ignore[method-assign]
        search = Search(case, 12 * GIB, choices, jobs=jobs)
        search.run(device)
        found.append((list(search.outcomes.items()), search.untried, device.calls))

    assert len(found[0][0]) > 10
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("spec", ["ddp:8", "fsdp:8,mixed=bf16", "zero1:2", "tp:4", "checkpoint+fsdp:8"])
def test_schemes_that_spread_the_model_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match=f"--scheme {re.escape(spec)}: a fit is of one process, and .* spreads it"):
        choices_for(made_up_case(12), {}, names=["checkpoint", spec])


@pytest.mark.parametrize(
    ("operator", "is_tried"), [("_foreach_lerp_", True), ("_fused_rms_norm", True), ("_fused_adamw_", False)]
)
def test_a_fused_optimizer_is_tried_unless_the_models_own_is_one(operator: str, is_tried: bool) -> None:
    case = Case(model="own.py:build", batch_size=1)
    step = measured([GIB, GIB, 2 * GIB, GIB], 1.0, 0.1, 10 * GIB)
    assert step.estimated
    operators = {"by_operator": (OperatorTime(name=operator, calls=1, seconds=0.1),)}
    seen = step.model_copy(
        update={"optimizer": "AdamW", "dtype": "float32", "estimated": step.estimated.model_copy(update=operators)}
    )
    choices = choices_for(case, {"adamw-fused": True}, names=[]).suited(case, seen)

    assert [choice.optimizer for choice in choices.all] == ["adamw-fused"] * is_tried
    assert bool(choices.kept) is not is_tried
