"""Plans for a script: what each block of its model holds, and what ``fit`` makes of that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import MeasurementError
from actbench.measuring.failures import failure_of as failure_of_model
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.report.advice import needed_bytes
from actbench.simulator import profiles
from actbench.simulator.join import Joiner
from actbench.simulator.trace import Trace
from actbench.tools.fit import bench as modelbench
from actbench.tools.fit.join import measured as joined_step
from actbench.tools.fit.plan import Plan, candidates_for
from actbench.tools.fit.planner import Goal, Planner
from actbench.tools.fit.records import ANY, EXACT
from actbench.tools.script import planbench, trials

HERE = Path(__file__).parent
ANY_NUMBER = 10**15
SCHEMES = ("checkpoint", "fewbit:2")
ROWS = 2048

HEAD = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import torch
import torch.nn.functional as F
from residual import Residual, batch
model = Residual().cuda()
"""
OPTIMIZER = """
optimizer = torch.optim.AdamW(model.parameters())
"""
LOOP = f"""
data = batch({ROWS}, "cuda")
for _ in range(20):
    F.cross_entropy(model(data["x"]), data["y"]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IN_PARTS = f"""
data = batch({ROWS}, "cuda")
for _ in range(20):
    with torch.no_grad():
        model(data["x"])
    for x, y in zip(data["x"].chunk(4), data["y"].chunk(4)):
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCALED = """
scaler = torch.amp.GradScaler("cuda")
for _ in range(20):
    data = batch(512, "cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(data["x"])
        loss = F.cross_entropy(output, data["y"])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    del loss
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
ADDED_UP = """
for _ in range(20):
    for _ in range(3):
        data = batch(2048, "cuda")
        loss = F.cross_entropy(model(data["x"]), data["y"]) / 3
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
UNEVEN = """
for _ in range(20):
    for rows in (1024, 512):
        data = batch(rows, "cuda")
        F.cross_entropy(model(data["x"]), data["y"]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
EMPTIED = """
for _ in range(20):
    data = batch(512, "cuda")
    F.cross_entropy(model(data["x"]), data["y"]).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
"""
CRITIC = """
critic = torch.nn.Linear(512, 1).cuda()
optimizer = torch.optim.AdamW([*model.parameters(), *critic.parameters()])
for _ in range(20):
    x = torch.randn(64, 512, device="cuda")
    (model(x).square().mean() + critic(x).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TWICE = """
for _ in range(20):
    x = torch.randn(64, 512, device="cuda")
    (model(x) - model(x + 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts here: autograd, which has run in this process, does not go with a fork."""
    monkeypatch.setattr(trials.Forked, "__init__", lambda trial, run: vars(trial).update(run=run))
    monkeypatch.setattr(trials.Forked, "outcome", lambda trial: trial.run(None))


def case_of(folder: Path, *parts: str, limit: int = ANY_NUMBER) -> Case:
    """Return the case of a script that is made of these parts."""
    file = folder / "train.py"
    file.write_text("".join(parts))
    script = Script(target=str(file))
    settings: dict[str, Any] = {"device_profile": "rtx-4090", "memory_limit_bytes": limit}
    return Case(model=script.text, script=script, batch_size=1, gradient_quality=False, **settings)


MODEL = Case(
    model=f"{HERE / 'residual.py'}:build",
    batch_size=ROWS,
    device_profile="rtx-4090",
    memory_limit_bytes=ANY_NUMBER,
    gradient_quality=False,
)


def outcome(case: Case) -> Outcome:
    """Return what is simulated of a script, or of a model."""
    try:
        return planbench.Session(case).memory() if case.script else modelbench.Session(case).memory()
    except Exception as error:
        return planbench.failure_of(error) if case.script else failure_of_model(error)


def measured(case: Case, scheme: str = "exact") -> Measurement:
    found = outcome(case.model_copy(update={"scheme": scheme}))
    assert isinstance(found, Measurement), found
    return found


def simulate(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
    for case in plans:
        yield case, outcome(case)


def planner_of(case: Case, schemes: tuple[str, ...] = SCHEMES) -> Planner:
    changes = planbench.CHANGES if case.script else None
    planner = Planner(case, candidates_for(case, {}, names=schemes, changes=changes), simulate)
    planner.run()
    return planner


def effects(found: Measurement) -> list[tuple[object, ...]]:
    """Return of each block what does not depend on the batch and the loss of the step before, which a loop may hold."""
    assert found.blocks is not None
    return [
        (
            each.path,
            each.kind,
            each.after_bytes - each.before_bytes,
            each.forward_peak_bytes - each.before_bytes,
            pytest.approx(each.backward_peak_bytes - each.done_bytes, abs=1024),  # a block or two
            each.output_bytes,
            each.keeps_input,
            each.keeps_output,
            pytest.approx(each.forward_seconds, rel=1e-6),
            pytest.approx(each.backward_seconds, rel=1e-6),
        )
        for each in found.blocks.blocks
    ]


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    "scheme", ["exact", "checkpoint,only=layers.1", pytest.param("gact:L2", marks=pytest.mark.slow)]
)
def test_blocks_of_a_script_hold_and_take_what_those_of_the_model_do(scheme: str, tmp_path: Path) -> None:
    of_script = measured(case_of(tmp_path, HEAD, OPTIMIZER, LOOP), scheme)
    of_model = measured(MODEL, scheme)

    assert len(effects(of_model)) == 3
    assert effects(of_script) == effects(of_model)


@pytest.mark.slow
def test_the_last_micro_batch_counts_and_evaluation_does_not(tmp_path: Path) -> None:
    of_script = measured(case_of(tmp_path, HEAD, OPTIMIZER, IN_PARTS))
    of_model = measured(MODEL.model_copy(update={"batch_size": ROWS // 4}))

    assert of_script.built is not None
    assert of_script.built.micro_batches == 4
    assert [each[:4] for each in effects(of_script)] == [each[:4] for each in effects(of_model)]
    assert [each[-2] for each in effects(of_script)] == [each[-2] for each in effects(of_model)]


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("parts", [(HEAD, CRITIC), (HEAD, OPTIMIZER, TWICE)], ids=["two models", "twice"])
def test_what_is_no_chain_of_blocks_has_no_readings(parts: tuple[str, ...], tmp_path: Path) -> None:
    assert measured(case_of(tmp_path, *parts)).blocks is None


ACTIONS = ("checkpoint", "gact:L2", "offload")


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("loop", [SCALED, ADDED_UP, LOOP], ids=["scaled", "added up", "usual"])
def test_a_joined_plan_is_that_of_the_script_simulated_whole(loop: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, HEAD, OPTIMIZER, loop)
    exact, profile = measured(case), profiles.get("rtx-4090")
    base = trace_of(exact)

    def spec(plan: tuple[str, ...]) -> str:
        places = {each: [path for path, one in zip(base.blocks, plan, strict=True) if one == each] for each in ACTIONS}
        return "+".join(f"{each},only={'/'.join(found)}" for each, found in places.items() if found)

    joiner = Joiner(base, {each: trace_of(measured(case, spec((each,) * 3))) for each in ACTIONS})
    for plan in (("exact", "checkpoint", "gact:L2"), ("offload", "gact:L2", "exact")):
        whole = measured(case, spec(plan))
        joined = joined_step(exact, joiner, plan, profile, ANY_NUMBER, ())

        assert joined.phase_peaks == whole.phase_peaks
        assert (joined.peak_bytes, joined.activation_bytes) == (whole.peak_bytes, whole.activation_bytes)
        assert joined.estimated is not None
        assert whole.estimated is not None
        off = 0.002 if loop == ADDED_UP else 1e-6  # the first micro-batch's copies to the host wait for others
        assert joined.estimated.step_seconds == pytest.approx(whole.estimated.step_seconds, rel=off)


def trace_of(found: Measurement) -> Trace:
    assert found.trace is not None
    return Trace.unpacked(found.trace)


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("loop", [UNEVEN, EMPTIED, IN_PARTS], ids=["uneven", "emptied", "evaluated"])
def test_a_step_that_its_last_micro_batch_does_not_tell_has_no_trace(loop: str, tmp_path: Path) -> None:
    found = measured(case_of(tmp_path, HEAD, OPTIMIZER, loop))

    assert found.blocks is not None
    assert found.trace is None


def test_plans_of_a_script_are_joined(tmp_path: Path) -> None:
    case = case_of(tmp_path, HEAD, OPTIMIZER, LOOP)
    planner = Planner(case, candidates_for(case, {}, names=["checkpoint"], changes=planbench.CHANGES), simulate)
    planner.run()
    simulated = len(planner.outcomes)
    plans = planner.space.of_some(EXACT, ANY_NUMBER)

    planner.tried(plans, ANY_NUMBER)

    joined = [each for each in planner.found if each.is_joined]
    assert len(joined) == len(planner.outcomes) - simulated > 0
    planner.prove(joined[:1])
    assert planner.errors == [0.0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("limit", [ANY_NUMBER, 600 * 2**20])
def test_a_scheme_needs_what_it_needs_if_the_script_itself_applies_it(limit: int, tmp_path: Path) -> None:
    """Reserved bytes too: what the first step, without the scheme, left is not there, and state is made as it is."""
    spec = "fewbit:2,only=layers.0+checkpoint,only=layers.[1-2]"
    line = f'import actbench\nmodel = actbench.convert(model, "{spec}")\n'
    planned = measured(case_of(tmp_path, HEAD, OPTIMIZER, LOOP, limit=limit), spec)
    pasted = measured(case_of(tmp_path, HEAD, line, OPTIMIZER, LOOP, limit=limit))

    assert (planned.peak_bytes, planned.reserved_bytes) == (pasted.peak_bytes, pasted.reserved_bytes)


@pytest.mark.exhaustive
def test_the_plan_of_a_script_fits_and_is_that_of_the_model(tmp_path: Path) -> None:
    of_script, of_model = planner_of(case_of(tmp_path, HEAD, OPTIMIZER, LOOP)), planner_of(MODEL)
    most, least = of_script.exact_step.need, of_script.space.least(ANY)
    assert least is not None

    for level, share in ((EXACT, 0.6), (ANY, 0.8)):
        goal = Goal(level, round(least.peak + share * (most - least.peak)))
        for planner in (of_script, of_model):
            planner.pursue([goal])
        found, other = of_script.fastest(goal), of_model.fastest(goal)
        assert found is not None
        assert other is not None
        assert found.case.script is not None
        assert found.need == needed_bytes(found.measured) <= goal.limit < most
        assert found.case.scheme == other.case.scheme != "exact"
        assert found.need == pytest.approx(other.need, rel=0.001)
        assert found.seconds == pytest.approx(other.seconds, rel=0.001)


@pytest.mark.exhaustive
def test_a_script_without_blocks_has_plans_of_its_whole_model(tmp_path: Path) -> None:
    planner = planner_of(case_of(tmp_path, HEAD, OPTIMIZER, TWICE), ("fewbit:2", "gact:L2"))
    least = planner.space.least(ANY)
    assert least is not None

    planner.pursue([Goal(ANY, round(1.05 * least.peak))])

    assert planner.space.blocks.paths == ()
    found = planner.fastest(Goal(ANY, ANY_NUMBER))
    assert found is not None
    assert {each.case.scheme for each in planner.found} >= {"exact", "fewbit:2", "gact:L2"}


@pytest.mark.exhaustive
def test_micro_batches_of_a_script_all_take_the_time_of_a_plan(tmp_path: Path) -> None:
    planner = planner_of(case_of(tmp_path, HEAD, OPTIMIZER, IN_PARTS), ("checkpoint",))
    least = planner.space.least(EXACT)
    assert least is not None
    assert any(least.actions)

    found = planner.tried([least], ANY_NUMBER)

    assert found is not None
    assert found.seconds == pytest.approx(least.seconds, rel=0.01)
    assert found.measured.peak_bytes == pytest.approx(least.peak, rel=0.005)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    ("script", "naming"),
    [
        ("raise ValueError('no data')\n", "failed: ValueError: no data"),
        ("print(1)\n", "no optimizer of torch has stepped"),
    ],
)
def test_a_script_that_fails_or_never_trains_has_no_plan(script: str, naming: str, tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=f"the exact step cannot be simulated: .*{naming}"):
        planner_of(case_of(tmp_path, script))
