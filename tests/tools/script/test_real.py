"""Scripts that run for real on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actbench.errors import MeasurementError
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.model.scripts import Script
from actbench.tools.script.real import RealRun

TRAINING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert torch.cuda.is_available()
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(4096, 64))
for (x,) in DataLoader(data, batch_size=128, shuffle=True, num_workers=2, pin_memory=True):
    x = x.to("cuda", non_blocking=True)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(x.device, loss.item(), torch.cuda.max_memory_allocated())
"""
WEIGHTS = (2 * 64 * 256 + 256 + 64) * 4
DATA = 4096 * 64 * 4

Run = Callable[..., Measurement]


@pytest.fixture
def run(tmp_path: Path, outcome: Callable[[Case], Measurement | Failure]) -> Run:
    """Return what runs a script of this text by a meter and returns its measurement."""

    def ran(text: str, meter: str, scheme: str = "exact", **options: Any) -> Measurement:
        file = tmp_path / "train.py"
        file.write_text(text)
        script = Script(target=str(file), **options)
        profile = "cpu" if meter == "simulated" else None
        case = Case.model_validate(
            {"model": script.text, "batch_size": 1, "meter": meter, "script": script, "scheme": scheme}
            | {"device_profile": profile}
        )
        found = outcome(case)
        if isinstance(found, Failure):
            raise MeasurementError(found.message)
        return found

    return ran


@pytest.mark.slow
def test_a_real_run_counts_what_a_simulated_one_does(run: Run) -> None:
    real, simulated = run(TRAINING, "cpu"), run(TRAINING, "simulated")

    assert real.peak_bytes == simulated.peak_bytes > DATA + 4 * WEIGHTS
    assert (real.weights_bytes, real.gradients_bytes) == (WEIGHTS, WEIGHTS)
    assert real.optimizer_bytes == simulated.optimizer_bytes
    assert real.peak_phase == simulated.peak_phase
    assert real.simulated is None
    assert real.peak_parts is not None
    assert sum(real.peak_parts.model_dump().values()) == real.peak_bytes


def test_weights_that_a_library_lays_into_one_block_count_once(run: Run, tmp_path: Path) -> None:
    layer = torch.nn.Linear(512, 512)
    save_file({"weight": layer.weight.detach(), "bias": layer.bias.detach()}, tmp_path / "layer.safetensors")
    text = f"""
import torch
from safetensors.torch import load_file

model = torch.nn.Linear(512, 512)
model.load_state_dict(load_file("{tmp_path}/layer.safetensors"), assign=True)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    real = run(text, "cpu")

    weights = 4 * (512 * 512 + 512)
    assert real.weights_bytes == pytest.approx(weights, rel=0.01)
    assert real.peak_bytes == pytest.approx(2 * weights, rel=0.05)
    assert real.peak_parts is not None
    assert real.peak_parts.weights_bytes >= weights


@pytest.mark.slow
def test_a_data_parallel_model_of_one_card_runs_on_a_cpu(run: Run) -> None:
    text = TRAINING.replace("optimizer =", "model = nn.DataParallel(model)\noptimizer =")

    assert run(text, "cpu").peak_bytes == run(text, "simulated").peak_bytes


@pytest.mark.exhaustive
def test_steps_are_timed_after_those_that_are_read(run: Run) -> None:
    seconds = run(TRAINING, "cpu", steps=2).step_seconds

    assert seconds is not None
    assert len(seconds) == 3
    assert all(each > 0 for each in seconds)


@pytest.mark.slow
def test_real_values_are_computed_and_tensors_say_that_they_are_on_the_cpu(run: Run, tmp_path: Path) -> None:
    run(TRAINING, "cpu", steps=2)

    lines = [line.split() for line in (tmp_path / "out").read_text().splitlines() if line.startswith("cpu")]
    assert len(lines) >= 4
    assert len({loss for _, loss, _ in lines}) > 1
    assert int(lines[2][2]) > WEIGHTS


@pytest.mark.exhaustive
def test_a_scheme_saves_for_real_what_it_saves_simulated(run: Run) -> None:
    exact, half = run(TRAINING, "cpu"), run(TRAINING, "cpu", scheme="adam8bit")

    assert half.optimizer_bytes is not None
    assert exact.optimizer_bytes is not None
    assert half.optimizer_bytes < exact.optimizer_bytes / 2
    assert half.optimizer_bytes == run(TRAINING, "simulated", scheme="adam8bit").optimizer_bytes


@pytest.mark.slow
def test_an_optimizer_that_steps_in_the_backward_pass_is_read_after_it(run: Run) -> None:
    text = TRAINING.replace("    optimizer.step()\n", "").replace(
        "data =", "model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())\ndata ="
    )

    assert run(text, "cpu").peak_bytes == run(text, "simulated").peak_bytes


@pytest.mark.exhaustive
def test_a_script_that_catches_the_end_is_left(run: Run) -> None:
    caught = TRAINING.replace("    optimizer.step()\n", "    try: optimizer.step()\n    except BaseException: pass\n")

    assert run(caught, "cpu").peak_bytes == run(TRAINING, "cpu").peak_bytes


def test_nothing_is_left_behind() -> None:
    before = torch.autograd.profiler.record_function, torch.Tensor.to, torch.cuda.is_available
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    with RealRun(steps=1) as run:
        for _ in range(9):
            weight.sum().backward()
            optimizer.step()

    assert len(run.steps.done) == 4  # one is read, three are timed
    assert (torch.autograd.profiler.record_function, torch.Tensor.to, torch.cuda.is_available) == before


def test_without_a_step_nothing_is_measured() -> None:
    with RealRun() as run:
        torch.ones(8).sum()

    with pytest.raises(MeasurementError, match="no training step ended"):
        run.measurement  # noqa: B018


def test_a_batch_that_no_loader_makes_is_refused(run: Run) -> None:
    loader = TRAINING[TRAINING.index("for (x") : TRAINING.index("    loss")]
    loop = TRAINING.replace(loader, "for _ in range(9):\n    x = torch.randn(8, 64)\n")

    with pytest.raises(MeasurementError, match="this script has no DataLoader that trains"):
        run(loop, "cpu", batch_size=16)
