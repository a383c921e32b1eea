"""The lines that fit prints run as they are, and need what was said."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench import workload as workloads
from actbench.measuring.bench import measure
from actbench.measuring.meters import open_meter
from actbench.model.measured import Measurement
from actbench.model.records import Built, Case
from actbench.tools.fit.codegen import code_for


def run(code: str, case: Case, steps: int = 2) -> dict[str, Any]:
    """Run lines on the model of a case and an iterator of its batch so many times, and return their names."""
    workload = workloads.load_workload(case)
    setup = workload.setup(materialize=True, seed=0)
    torch.manual_seed(0)
    batch = dict(workload.batch(case.batch_size, seed=0))
    names = {"model": setup.module, "batches": iter([batch] * steps)}
    exec(code, names)
    return names


LLAMA = {"model": "tiny-llama@num_hidden_layers=4", "batch_size": 4, "sequence_length": 64}
BYTES = {"weights_bytes": 1, "activation_bytes": 1, "peak_bytes": 3}
CAUSAL = Measurement(**BYTES, built=Built(model_class="LlamaForCausalLM", task="causal-lm"))
PICTURES = {"model": "torchvision:resnet18", "batch_size": 4, "image_size": 64}
PLAN = "checkpoint+offload,only=model.layers.[0-1]+msln,only=model.norm/model.layers.[2-3]+chunked_loss:8"
slow = pytest.mark.sampled(slow=2)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flags below, whatever they are
@pytest.mark.parametrize(
    ("settings", "scheme", "others"),
    [
        (LLAMA, "chunked_loss:8+checkpoint", {}),
        (LLAMA, PLAN, {}),
        pytest.param(LLAMA, "exact", {}, marks=slow),
        pytest.param(LLAMA, "accumulate:2+gact:L2", {"optimizer": "adamw-fused"}, marks=slow),
        pytest.param(LLAMA, "lora:16+checkpoint", {}, marks=slow),
        pytest.param(LLAMA, "pure:bfloat16+release", {}, marks=slow),
        pytest.param(LLAMA, "autocast:bfloat16+adam8bit", {}, marks=slow),
        pytest.param(LLAMA, "smaq", {"dtype": "bfloat16"}, marks=slow),
        pytest.param(LLAMA, "checkpoint", {"optimizer": "sgd-momentum", "autocast": "bfloat16"}, marks=slow),
        pytest.param(PICTURES, "actnn:L2", {"optimizer": "sgd"}, marks=slow),
    ],
)
def test_the_loop_runs_and_its_peak_is_what_was_said(settings: Any, scheme: str, others: Any) -> None:
    case = Case(**settings, scheme=scheme, **others, device_profile="cpu")
    said = measure(case)
    code = code_for(case, said)

    taken = {int(state["step"]) for state in run(code.loop, case)["step"].optimizer.state.values() if "step" in state}
    step = run(code.loop, case, steps=0)["step"]  # what is made in steps that the meter does not see cannot be counted
    step.batch = workloads.load_workload(case).batch(case.batch_size, seed=0)
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's products in bfloat16 take workspaces on some processors
        found = open_meter(case.model_copy(update={"meter": "cpu"})).memory(step).peak_bytes

    assert found == pytest.approx(said.peak_bytes, rel=0.02)
    assert taken <= {2}  # each batch is trained on; SGD counts no steps


def test_the_loss_of_float16_is_scaled() -> None:
    case = Case(**LLAMA, scheme="accumulate:2+autocast:float16", device_profile="cpu")

    found = run(code_for(case, CAUSAL).loop, case)

    gradient_was_scaled = found["scaler"].state_dict()["_growth_tracker"] == 2  # a count of steps without overflow
    assert gradient_was_scaled
    assert found["optimizer"].state


@pytest.mark.parametrize(("profile", "device"), [("cpu", "cpu"), ("rtx-4090", "cuda"), (None, "cuda")])
def test_the_scaler_is_that_of_the_device(profile: str | None, device: str) -> None:
    case = Case(**LLAMA, scheme="autocast:float16", device_profile=profile)

    assert f'torch.amp.GradScaler("{device}")' in code_for(case, CAUSAL).loop


TRAINER = [
    "exact",
    "chunked_loss:8+checkpoint+optimizer_offload",
    PLAN,
    pytest.param("accumulate:2+autocast:bfloat16+gact:L2", marks=slow),
    pytest.param("lora:16+checkpoint", marks=slow),
    pytest.param("adam8bit+pure:bfloat16", marks=slow),
    pytest.param("smaq", marks=slow),
]


class Rows(torch.utils.data.Dataset):
    def __init__(self, case: Case) -> None:
        self._batch = workloads.load_workload(case).batch(case.batch_size, seed=0)
        self._rows = case.batch_size

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {name: values[place] for name, values in self._batch.items()}


def run_trainer(
    case: Case,
    measured: Measurement,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Run the lines for Trainer for a step on the CPU, and return their names."""
    monkeypatch.chdir(folder)
    code = code_for(case, measured)
    assert code.trainer is not None, code.why_no_trainer
    setup = workloads.load_workload(case).setup(materialize=True, seed=0)
    names: dict[str, Any] = {"model": setup.module, "data": Rows(case)}
    lines = change(code.trainer).replace(
        '    "out",', '    "out", max_steps=1, report_to=[], save_strategy="no", use_cpu=True,'
    )
    exec(lines, names)
    assert names["trainer"].state.global_step == 1
    return names


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("scheme", TRAINER)
def test_the_lines_for_the_trainer_run(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(**LLAMA, scheme=scheme)

    names = run_trainer(case, CAUSAL, tmp_path, monkeypatch)

    rows = case.batch_size // names["arguments"].gradient_accumulation_steps
    assert names["arguments"].per_device_train_batch_size == rows


def test_trainer_gives_a_model_of_half_types_images_of_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(model="tiny-vit", batch_size=2, scheme="pure:bfloat16")
    built = Built(model_class="ViTForImageClassification", task="image-classification", image_size=(32, 32))

    names = run_trainer(case, Measurement(**BYTES, built=built), tmp_path, monkeypatch)

    batch = names["in_type"]([Rows(case)[place] for place in range(2)])
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("optimizer", "scheme", "made"),
    [
        ("adamw", "adam8bit", "torchao.optim.AdamW8bit(trained, "),
        ("adam", "adam8bit", "torchao.optim.Adam8bit(trained, "),
        ("adam", "adam4bit", "torchao.optim.Adam4bit(trained, "),
        ("adamw", "adam8bit:bnb", "bitsandbytes.optim.AdamW8bit(trained, "),
        ("adamw", "adam8bit:bnb,paged=true", "bitsandbytes.optim.PagedAdamW8bit(trained, "),
        ("adam", "optimizer_offload", "actbench.optim.HostOptimizer(torch.optim.Adam(trained, "),
    ],
)
def test_trainer_is_given_the_optimizer_that_was_simulated(optimizer: Any, scheme: str, made: str) -> None:
    lines = code_for(Case(**LLAMA, optimizer=optimizer, scheme=scheme), CAUSAL).trainer

    assert lines is not None
    assert made in lines
    assert f"import {made.partition('.optim')[0]}" in lines


@pytest.mark.parametrize(
    ("scheme", "lines"),
    [
        ("channels_last", ["model = model.to(memory_format=torch.channels_last)"]),
        ("pure:bfloat16", ["model = model.to(torch.bfloat16)"]),
        ("accumulate:3", ["    per_device_train_batch_size=2,", "    gradient_accumulation_steps=3,"]),
        ("autocast:float16", ["    fp16=True,"]),
        ("lora:8+checkpoint", ['model = actbench.convert(model, "lora:8+checkpoint")']),
        ("smaq,on=state+checkpoint", ['    callbacks=[ActbenchCallback("checkpoint")],']),
        ("smaq", ['    callbacks=[ActbenchCallback("smaq,on=activations")],']),
    ],
)
def test_trainer_is_told_what_a_scheme_changes(scheme: str, lines: list[str]) -> None:
    code = code_for(Case(**LLAMA, scheme=scheme), CAUSAL).trainer

    assert code is not None
    assert set(lines) <= set(code.splitlines())


def test_what_trainer_cannot_do_is_said() -> None:
    code = code_for(Case(**LLAMA, scheme="checkpoint+release"), CAUSAL)

    assert code.trainer is None
    assert code.why_no_trainer == "release changes gradients, which Trainer does itself"
    maps = code_for(Case(**LLAMA, scheme="smaq,on=maps"), CAUSAL)
    assert maps.why_no_trainer == "smaq,on=maps changes gradients, which Trainer does itself"


def test_the_command_measures_the_same_case() -> None:
    limit = 3 * 1024**3
    settings = {"dtype": "bfloat16", "optimizer": "sgd", "device_profile": "t4", "memory_limit_bytes": limit}
    case = Case(**LLAMA, **settings, scheme="checkpoint")

    assert code_for(case, CAUSAL).command == (
        f"actbench measure {LLAMA['model']} -s checkpoint -b 4 --sequence-length 64 --dtype bfloat16 --optimizer sgd "
        f"--memory-limit {limit}B --meter cuda"
    )


def test_what_a_shell_would_read_otherwise_is_quoted() -> None:
    words = shlex.split(code_for(Case(**LLAMA, scheme=PLAN), CAUSAL).command)

    assert words[words.index("-s") + 1] == PLAN
    assert f"'{PLAN}'" in code_for(Case(**LLAMA, scheme=PLAN), CAUSAL).command


def test_a_case_without_a_limit_has_none_in_its_command() -> None:
    assert "--memory-limit" not in code_for(Case(**LLAMA, scheme="checkpoint", device_profile="t4"), CAUSAL).command


def test_a_models_own_optimizer_is_not_replaced_in_the_code() -> None:
    case = Case(model="own.py:build", batch_size=4)
    measured = Measurement(**BYTES, optimizer="SGD", dtype="float32", built=Built(model_class="Net"))

    code = code_for(case, measured)
    known = code_for(case, measured.model_copy(update={"optimizer": "AdamW"}))
    named = code_for(case.model_copy(update={"optimizer": "adamw-fused"}), measured)

    assert "make_optimizer=make_optimizer," in code.loop
    assert "make_optimizer, from the model to its SGD" in code.loop
    assert "optimizers=(make_optimizer(model), None)" in str(code.trainer)
    assert "make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-5)," in known.loop
    assert "fused=True" in named.loop
    assert "--optimizer adamw-fused" in named.command


def test_a_models_own_loss_is_not_replaced_in_the_code() -> None:
    case = Case(model="own.py:build", batch_size=4)
    code = code_for(case, Measurement(**BYTES, dtype="float32", built=Built(model_class="Net")))
    module = torch.nn.Linear(8, 2)
    before = module.weight.clone()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    exec(code.loop, {"model": module, "loss": loss, "batches": [{"x": torch.randn(4, 8)}]})

    assert "def loss" not in code.loop
    assert "loss, the function that own.py:build returns, " in code.loop
    assert not torch.equal(module.weight, before)
    assert "Trainer calls no loss of own.py:build" in str(code.trainer)


def test_the_command_names_a_type_that_the_model_does_not_bring() -> None:
    case = Case(model="own.py:build", batch_size=4, dtype="float32", optimizer="adamw")

    assert "--dtype float32 --optimizer adamw" in code_for(case, CAUSAL).command


@pytest.mark.parametrize(
    ("scheme", "optimizer", "rate"),
    [
        ("checkpoint", None, "2e-5"),
        ("lora:8+checkpoint", None, "2e-4"),
        ("qlora:8", None, "2e-4"),
        ("lora:8+adam8bit", None, "2e-4"),
        ("lora:8+optimizer_offload", "adam", "2e-4"),
        ("checkpoint", "sgd-momentum", "0.01"),
    ],
)
def test_the_learning_rate_is_one_of_what_is_trained(scheme: str, optimizer: Any, rate: str) -> None:
    code = code_for(Case(**LLAMA, optimizer=optimizer, scheme=scheme), CAUSAL)

    assert code.trainer is not None
    rates = re.findall(r"\b(?:lr|learning_rate)=([\d.e-]+)", code.loop + code.trainer)
    assert set(rates) == {rate}
