"""Whole runs: what scripts need in evaluations, saves and late batches, simulated and for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers.trainer_utils import EvalLoopOutput
from wholeruns import (
    BEGIN,
    BEGINS_ANEW,
    COMMON,
    ENDINGS,
    FAILS,
    GENERATES,
    GENERATIONS,
    MODELS,
    OF_LIBRARIES,
    TRAINER,
)

from actbench.model.measured import Measurement, RunEvent
from actbench.model.records import Case, Failure
from actbench.model.scripts import Script
from actbench.tools.script.libraries.trainers import completed

QUICK = (
    "keeps outputs",
    "meets its longest batch late",
    "accumulates, and meets its longest batch late",
    "joins scores",
    "resumes twice as large",
)
RESUMES = ("loads a second copy", "resumes twice as large")
METERS = ("cpu", "simulated")
GENERATORS = 2 * 5056
"""Bytes of states of torch's generator that a trainer saves: host memory, which is the card's where that is the CPU."""
GROWS = ("keeps outputs", "sums losses with graphs")

Run = Callable[..., Measurement]


@pytest.fixture
def whole(tmp_path: Path, outcome: Callable[[Case], Measurement | Failure]) -> Run:
    """Return what runs a script of this text whole, or so many steps, for real on the CPU or on a simulated one."""

    def ran(text: str, meter: str, steps: int | None = None) -> Measurement:
        file = tmp_path / "train.py"
        file.write_text(text.replace("FILE", str(tmp_path / "state.pt")))
        script = Script(target=str(file), whole=True, steps=steps)
        profile = "cpu" if meter == "simulated" else None
        found = outcome(
            Case.model_validate(
                {"model": "train.py", "batch_size": 1, "meter": meter, "script": script, "device_profile": profile}
            )
        )
        assert isinstance(found, Measurement), found.message
        return found

    return ran


def parts(found: Measurement) -> dict[str, RunEvent]:
    return {f"{each.part} {(each.line or '').partition(' ')[0]}".strip(): each for each in found.events}


def check_resume(real: Measurement, simulated: Measurement, rel: float) -> None:
    """Check that a simulated run resumed once, with what the real one needs for it, and stepped after that."""
    (expected,) = (each.peak_bytes for each in real.events if each.part == "resume")
    assert [each.peak_bytes for each in simulated.events if each.part == "resume"] == [pytest.approx(expected, rel=rel)]
    assert any(each.part == "resumed step" for each in simulated.events)


@pytest.mark.parametrize(
    ("model", "ending"),
    [
        pytest.param(
            model,
            ending,
            marks=() if model == "perceptron" and ending in QUICK else pytest.mark.sampled(slow=14),
            id=f"{model} {ending}",
        )
        for model in MODELS
        for ending in ENDINGS
    ],
)
def test_all_parts_of_a_run_need_what_they_need_for_real(model: str, ending: str, whole: Run) -> None:
    text = (BEGIN + ENDINGS[ending]).replace("{inner}", MODELS[model])
    real, simulated = whole(text, "cpu"), whole(text, "simulated")

    expected, found = parts(real), parts(simulated)
    largest = max(each.peak_bytes for each in expected.values())
    assert max(each.peak_bytes for each in found.values()) == pytest.approx(largest, rel=0.01)
    assert expected.keys() <= found.keys()
    for part in expected.keys() - {"step", "next step"}:  # what is kept until the real epoch ends is in its last step
        assert found[part].peak_bytes == pytest.approx(expected[part].peak_bytes, rel=0.01), part
    assert any(each.part == "resume" for each in real.events) == (ending in RESUMES)
    assert (simulated.growth is None) == (real.growth is None) == (ending not in GROWS)
    if real.growth is not None and simulated.growth is not None:
        assert simulated.growth.step_bytes == pytest.approx(real.growth.step_bytes, rel=0.01)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("arguments", GENERATIONS.values(), ids=GENERATIONS)
def test_generation_after_training_needs_what_it_needs_for_real(arguments: str, whole: Run) -> None:
    text = GENERATES.replace("{generation}", arguments)
    real, simulated = ({each.part: each.peak_bytes for each in whole(text, meter).events} for meter in METERS)

    assert simulated["evaluation"] == pytest.approx(real["evaluation"], rel=0.01)
    assert real["evaluation"] > 2 * real["step"]


def test_so_many_steps_of_a_run_are_traced_for_real(whole: Run) -> None:
    text = (BEGIN + ENDINGS["keeps outputs"]).replace("{inner}", MODELS["perceptron"])
    found = whole(text, "cpu", steps=9)

    assert {event.part: event.count for event in found.events} == {"first step": 1, "step": 8}
    assert found.growth is not None


LIGHTNING = """
import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trained(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        self.outputs = []

    def training_step(self, batch, i):
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, i):
        self.outputs.append(self.net(batch[0]))

    def on_validation_epoch_end(self):
        torch.cat(self.outputs)
        self.outputs.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)


data = TensorDataset(torch.randn(640, 64))
lightning.Trainer(
    max_epochs=1, accelerator="gpu", devices=1, logger=False, default_root_dir="OUT", enable_progress_bar=False
).fit(Trained(), DataLoader(data, 32, shuffle=True), DataLoader(data, 64))
"""


@pytest.mark.parametrize("meter", METERS)
def test_parts_before_an_error_are_kept(meter: str, whole: Run) -> None:
    found = whole(BEGIN.replace("{inner}", MODELS["perceptron"]) + FAILS, meter)

    assert [each.part for each in found.events] == ["first step", "step", "evaluation"]
    assert found.built is not None
    assert found.built.failed is not None
    assert "failed: KeyError: 'accuracy' (train.py:" in found.built.failed


@pytest.mark.parametrize("meter", METERS)
def test_the_state_of_the_largest_step_is_state_where_later_steps_have_another(meter: str, whole: Run) -> None:
    found = whole(BEGIN.replace("{inner}", MODELS["perceptron"]) + BEGINS_ANEW, meter)

    assert found.peak_parts is not None
    assert found.peak_parts.optimizer_bytes == found.optimizer_bytes
    assert 1.9 * found.weights_bytes < found.optimizer_bytes < 2.1 * found.weights_bytes


def test_an_evaluation_returns_as_many_predictions_as_it_has_samples() -> None:
    predictions = (np.ones((43, 8), np.float32), np.arange(43))
    output = EvalLoopOutput(predictions=predictions, label_ids=None, metrics={}, num_samples=147)
    large = output._replace(predictions=np.ones((43, 2**20), np.float32))

    assert [len(each) for each in completed(lambda: output)().predictions] == [147, 147]
    assert completed(lambda: output)().label_ids is None
    assert len(completed(lambda: large)().predictions) == 43


@pytest.mark.slow
@pytest.mark.parametrize("text", [TRAINER, LIGHTNING], ids=["transformers", "lightning"])
def test_trainers_evaluate_and_save_early(text: str, whole: Run, tmp_path: Path) -> None:
    text = text.replace("OUT", str(tmp_path / "written"))
    real, simulated = whole(text, "cpu"), whole(text, "simulated")

    expected, found = parts(real), parts(simulated)
    evaluations = [part for part in expected if part.startswith("evaluation")]
    assert evaluations
    assert any(part.startswith("save") for part in found)
    for part in evaluations:
        assert found[part].peak_bytes == pytest.approx(expected[part].peak_bytes, rel=0.02), part
    ran = sum(each.count for part, each in found.items() if "step" in part)
    assert ran < sum(each.count for part, each in expected.items() if "step" in part)


@pytest.mark.slow
def test_a_trainer_resumes_once_from_its_checkpoint_with_what_a_new_process_needs(whole: Run, tmp_path: Path) -> None:
    text = TRAINER.replace("OUT", str(tmp_path / "written"))
    simulated = whole(text, "simulated")
    assert not list(tmp_path.glob("written/*"))
    whole(text, "cpu")
    real = whole(text.replace(".train()", f'.train("{tmp_path}/written/checkpoint-15")'), "cpu")

    check_resume(real, simulated, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("library", OF_LIBRARIES)
def test_trainers_evaluate_with_what_they_need_for_real(
    library: str, whole: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    text = (COMMON + OF_LIBRARIES[library]).replace("LLAMA", str(tiny_llama)).replace("OUT", str(tmp_path / "written"))
    real, simulated = whole(text, "cpu"), whole(text, "simulated")

    for kinds in (("evaluation", "generation"), ("first step", "step", "next step"), ("save",)):
        most, found = (max(each.peak_bytes for each in run.events if each.part in kinds) for run in (real, simulated))
        assert found == pytest.approx(most, rel=5e-3, abs=GENERATORS), kinds


@pytest.mark.slow
def test_a_trainer_goes_on_at_the_steps_that_its_callbacks_name(whole: Run, tmp_path: Path) -> None:
    begin, _, made = TRAINER.replace("OUT", str(tmp_path / "written")).rpartition("\nTrainer(")
    unfreezing = f"""
from transformers import TrainerCallback

class Unfreeze(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.bert.encoder.requires_grad_(state.global_step >= 12)

class Grow(TrainerCallback):
    def __init__(self, step):
        self.step = step
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            state.kept = torch.zeros(2**20, device="cuda")

trainer = Trainer({made.replace(".train()", "")}
trainer.add_callback(Unfreeze())
trainer.add_callback(Grow(14))
trainer.train()
"""
    real, simulated = (
        {step: each.peak_bytes for step, each in parts(whole(begin + unfreezing, meter)).items() if "step" in step}
        for meter in ("cpu", "simulated")
    )
    assert max(simulated.values()) == pytest.approx(max(real.values()), rel=0.01)
    begin = begin.replace("num_train_epochs=1", "num_train_epochs=1000")
    found = whole(begin + unfreezing.replace("12", "9000").replace("14", "11000"), "simulated")
    assert max(each.peak_bytes for each in found.events if "step" in each.part) == max(simulated.values())
    assert sum(each.count for each in found.events if "step" in each.part) < 9000


@pytest.mark.slow
def test_a_trainer_of_lightning_resumes_once_from_its_checkpoint(whole: Run, tmp_path: Path) -> None:
    text = LIGHTNING.replace("OUT", str(tmp_path / "written"))
    simulated = whole(text, "simulated")
    assert not list(tmp_path.glob("written/*"))
    whole(text, "cpu")
    (saved,) = tmp_path.glob("written/**/*.ckpt")
    again = text.replace("max_epochs=1", "max_epochs=2").replace(
        "DataLoader(data, 64))", f"DataLoader(data, 64), ckpt_path={str(saved)!r})"
    )
    real = whole(again, "cpu")

    check_resume(real, simulated, rel=0.01)


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
data = DataLoader(TensorDataset(torch.randn(640, 64)), 64)
model, optimizer, data = accelerator.prepare(model, optimizer, data)


def train():
    for (x,) in data:
        optimizer.zero_grad()
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()


train()
accelerator.save_state("OUT")
accelerator.load_state("OUT")
train()
"""

RESUMED = (
    LIGHTNING.rpartition("lightning.Trainer(")[0]
    + """
loader = DataLoader(data, 32)
for path in (None, "OUT/last.ckpt"):
    trainer = lightning.Trainer(
        max_epochs=1 if path is None else 2, accelerator="gpu", devices=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Trained(), loader, ckpt_path=path)
    trainer.save_checkpoint("OUT/last.ckpt")
"""
)

DISTRIBUTED = """
import torch
import torch.distributed.checkpoint as checkpoints
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)


def train():
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(64, 64, device="cuda")).pow(2).mean().backward()
        optimizer.step()


train()
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
checkpoints.save(state, checkpoint_id="OUT")
checkpoints.load(state, checkpoint_id="OUT")
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
del state
train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "text"),
    [("accelerate", ACCELERATE), ("lightning", RESUMED), ("torch", DISTRIBUTED)],
    ids=["accelerate", "lightning", "torch.distributed"],
)
def test_a_resume_by_a_library_is_a_part_of_the_run(library: str, text: str, whole: Run, tmp_path: Path) -> None:
    pytest.importorskip(library)
    real, simulated = (whole(text.replace("OUT", str(tmp_path / meter)), meter) for meter in ("cpu", "simulated"))

    check_resume(real, simulated, rel=0.02)
    assert any(each.part == "save" for each in simulated.events)
    assert not list((tmp_path / "simulated").glob("*")), "nothing is written"


@pytest.mark.slow
def test_a_trainer_without_callbacks_runs_to_its_end(whole: Run, tmp_path: Path) -> None:
    begin, _, made = TRAINER.replace("OUT", str(tmp_path / "written")).rpartition("\nTrainer(")
    removed = "\nfor each in list(trainer.callback_handler.callbacks):\n    trainer.remove_callback(each)\n"
    text = f"{begin}\ntrainer = Trainer({made.replace('.train()', '')}{removed}trainer.train()\n"

    assert {each.part for each in whole(text, "simulated").events} >= {"first step", "step"}


@pytest.mark.slow
def test_a_trainer_finds_its_checkpoint_again(whole: Run, tmp_path: Path) -> None:
    begin, _, made = TRAINER.replace("OUT", str(tmp_path / "written")).rpartition("\nTrainer(")
    made = made.replace(".train()", "")
    ending = f"""
from transformers.trainer_utils import get_last_checkpoint
trainer = Trainer({made}
trainer.train()
del trainer
trainer = Trainer({made}
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
print(len(BertForMaskedLM.from_pretrained(get_last_checkpoint(arguments.output_dir)).state_dict()))
"""
    real, simulated = (
        [each.peak_bytes for each in whole(begin + ending, meter).events if each.part == "resume"]
        for meter in ("cpu", "simulated")
    )

    assert len(real) == 1
    assert simulated == [pytest.approx(peak, rel=0.01) for peak in (*real, *real)]
