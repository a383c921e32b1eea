"""What lets a script's steps need less and costs nothing: as many bytes as a real run saves that follows the advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import RunScript

from actbench.measuring.meters.stepevents import Origin
from actbench.model.measured import Growth, Measurement, Remedy
from actbench.model.records import Case, Failure
from actbench.model.scripts import Script
from actbench.tools.script.answers import remedies
from actbench.tools.script.answers.suggestions import free_remedies, run_bytes
from actbench.tools.script.steps.counting import Step
from actbench.units import GIB, MIB

TRAIN = """
import os
import torch
from torch import nn

CONFIGURED
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for rows in ROWS:
    x = torch.randn(rows, 512, device="cuda")
    LOOP
"""

LOOPS = {
    "zero_grad": (
        "loss = model(x).pow(2).mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()",
        "optimizer.zero_grad(); loss = model(x).pow(2).mean(); loss.backward(); optimizer.step()",
    ),
    "set_to_none": (
        "optimizer.zero_grad(set_to_none=False); loss = model(x).pow(2).mean(); loss.backward(); optimizer.step()",
        "optimizer.zero_grad(); loss = model(x).pow(2).mean(); loss.backward(); optimizer.step()",
    ),
    "del": (
        "optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step(); shown = model(x).detach().abs()",
        "optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step(); model(x).detach().abs()",
    ),
}

ROWS = {"zero_grad": 512, "set_to_none": 512, "del": 4096}

Run = Callable[..., Measurement]


@pytest.fixture
def measured(tmp_path: Path, outcome: Callable[[Case], Measurement | Failure]) -> Run:
    """Return what runs the loop of a kind for real on the CPU, or on a simulated one, as it is or with its remedy."""

    def ran(kind: str, meter: str, *, is_remedied: bool = False) -> Measurement:
        loop = LOOPS[kind][is_remedied]
        file = tmp_path / "train.py"
        file.write_text(TRAIN.replace("CONFIGURED", "").replace("ROWS", f"[{ROWS[kind]}] * 9").replace("LOOP", loop))
        profile = "cpu" if meter == "simulated" else None
        found = outcome(
            Case.model_validate(
                {
                    "model": "train.py",
                    "batch_size": 1,
                    "meter": meter,
                    "script": Script(target=str(file)),
                    "device_profile": profile,
                }
            )
        )
        assert isinstance(found, Measurement), found.message
        return found

    return ran


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize("kind", LOOPS)
def test_a_remedy_saves_what_it_saves_for_real(kind: str, measured: Run) -> None:
    found = measured(kind, "simulated")
    saved = measured(kind, "cpu").peak_bytes - measured(kind, "cpu", is_remedied=True).peak_bytes

    assert [each.kind for each in found.free_remedies] == [kind]
    assert found.free_remedies[0].saved_bytes == pytest.approx(saved, rel=0.02)
    assert not measured(kind, "simulated", is_remedied=True).free_remedies


def test_segments_that_grow_save_the_gaps_that_late_large_batches_leave(run: RunScript) -> None:
    loop = "optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step(); del x"
    text = TRAIN.replace("LOOP", loop).replace("ROWS", "range(4096, 12288, 1024)")
    grown = 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"'
    before, after = (run(text.replace("CONFIGURED", each), steps=8) for each in ("", grown))

    (remedy,) = before.free_remedies
    assert remedy.kind == "expandable_segments"
    assert before.reserved_bytes - after.reserved_bytes == remedy.saved_bytes
    assert not after.free_remedies


def test_what_an_operator_reads_last_is_needed_while_its_result_is_new() -> None:
    """The second largest moment is that of the operator; only what comes after it needs less."""
    events = [(0, 100), (1, 100), (2, 100), (1, 0), (3, 110), (3, 0), (0, 0), (2, 0)]
    step = Step(begun=0, forwards=[(0, 4)], updating=6, ended=8, peak_bytes=310, peak_at=5)
    origins = {0: Origin("", "aten::mul", "train.py:1 x = f()")}
    of_step = remedies.of_step
    (found,) = of_step(step, events, origins=origins, accumulated=(), used={0: 3, 1: 3, 2: 5}, others=frozenset())

    assert (found.kind, found.line, found.saved_bytes) == ("del", "train.py:1 x = f()", 10)


EVALUATES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(rows):
    model.train()
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(rows, 512, device="cuda")).pow(2).mean().backward()
        optimizer.step()


train(1024)
EMPTY
model.eval()
with torch.no_grad():
    for _ in range(2):
        model(torch.randn(6000, 512, device="cuda"))
EMPTY
train(7000)
"""


def test_an_emptied_cache_saves_what_a_run_that_empties_it_needs_less(run: RunScript) -> None:
    before = run(EVALUATES.replace("EMPTY", ""), whole=True)
    after = run(EVALUATES.replace("EMPTY", "torch.cuda.empty_cache()"), whole=True)

    (remedy,) = [each for each in before.free_remedies if each.kind == "empty_cache"]
    assert remedy.line is not None
    assert remedy.line.endswith("model.eval()")
    assert remedy.saved_bytes == run_bytes(before) - run_bytes(after)
    assert not [each for each in after.free_remedies if each.kind == "empty_cache"]


def test_remedies_are_told_where_memory_is_scarce_and_what_is_kept_always() -> None:
    found = Measurement(
        weights_bytes=GIB,
        activation_bytes=GIB,
        peak_bytes=5 * GIB,
        memory_limit_bytes=8 * GIB,
        free_remedies=(Remedy(kind="del", line="train.py:3 y = f(x)", saved_bytes=GIB),),
        growth=Growth(step_bytes=MIB, line="train.py:4 kept.append(y)"),
    )

    growing, dropped = free_remedies(found)
    assert "train.py:4 kept.append(y)" in growing
    assert "(saves 1.00 MiB a step)" in growing
    assert dropped.startswith("what train.py:3 y = f(x) makes")
    assert dropped.endswith("(saves 1.00 GiB)")
    assert len(free_remedies(found.model_copy(update={"memory_limit_bytes": 11 * GIB}))) == 1
