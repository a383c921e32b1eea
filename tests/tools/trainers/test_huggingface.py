from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from actbench.errors import ConversionError, SpecError, UsageError
from actbench.measuring.inspection import trace
from actbench.model.records import Site
from actbench.packing import samplegradients
from actbench.scheme import Scheme
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.model import conversion_of, convert
from actbench.tools.trainers.huggingface import ActbenchCallback

TOKENS, BATCH = 16, 8
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 99,
}
NAMES = ["actbench/activation_bytes", "actbench/exact_bytes", "actbench/saved_bytes"]
Plain = Callable[[nn.Module], bool]


def roberta() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**SIZES, num_labels=2, attention_dropout=0.0, hidden_dropout_prob=0.0)
    return transformers.RobertaForSequenceClassification(config)


def rows() -> list[dict[str, Any]]:
    """Return samples whose first token says what their label is."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, 99, (64, TOKENS), generator=generator)
    tokens[:, 0] = 5 + torch.arange(64) % 2
    mask = (torch.arange(TOKENS) < TOKENS - 1).long()  # one of them is padding, or transformers leaves the mask out
    return [{"input_ids": row, "attention_mask": mask, "labels": int(row[0]) - 5} for row in tokens]


def trainer(model: nn.Module, folder: Path, *callbacks: Any, **settings: Any) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 12,
            "per_device_train_batch_size": BATCH,
            "learning_rate": 5e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **settings,
        }
    )
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=rows(), eval_dataset=rows()[:BATCH], callbacks=list(callbacks)
    )


def training_logs(run: transformers.Trainer) -> list[dict[str, Any]]:
    return [entry for entry in run.state.log_history if "loss" in entry]


def kept_bytes(model: nn.Module, count: int = BATCH) -> int:
    def make_batch() -> dict[str, Tensor]:
        tokens = torch.zeros(count, TOKENS, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": tokens + 1, "labels": torch.zeros(count, dtype=torch.long)}

    return trace(TrainingSetup(model, loss=lambda module, given: module(**given).loss), make_batch).total_bytes


class Failing(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError


class Reporter(transformers.TrainerCallback):
    """Sees what a reporter such as TensorBoard's sees."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.seen.append(dict(logs))


@pytest.mark.parametrize(
    "spec",
    [
        "gact:L2",
        *(pytest.param(spec, marks=pytest.mark.sampled(slow=1)) for spec in ("fewbit:3", "actnn:L3", "randomized:0.5")),
    ],
)
def test_training_learns_logs_the_bytes_of_the_ledger_and_leaves_a_plain_model(
    spec: str, tmp_path: Path, is_plain: Plain
) -> None:
    model = roberta()
    parameters = list(model.parameters())
    run = trainer(model, tmp_path, ActbenchCallback(spec))
    run.train()

    losses = [entry["loss"] for entry in training_logs(run)]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert is_plain(model)

    exact, packed = kept_bytes(roberta()), kept_bytes(convert(roberta(), spec))
    logged = [tuple(entry[name] for name in NAMES) for entry in training_logs(run)]
    assert len(set(logged)) == 1
    if spec == "gact:L2":  # which shares other bits out than the average that the ledger takes
        packed = logged[0][0]
    assert logged[0] == (packed, exact, exact - packed)
    assert 0 < packed < exact
    json.dumps(run.state.log_history)


@pytest.mark.slow
def test_accumulated_batches_are_measured_one_by_one(tmp_path: Path, is_plain: Plain) -> None:
    model = roberta()
    callback = ActbenchCallback("gact:L1", measure_every=1)
    run = trainer(model, tmp_path, callback, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    run.train()

    assert [entry["actbench/exact_bytes"] for entry in training_logs(run)] == [kept_bytes(roberta(), 2)] * 2
    assert is_plain(model)


def test_evaluation_in_the_middle_keeps_nothing_and_logs_nothing(tmp_path: Path) -> None:
    model = roberta()
    run = trainer(model, tmp_path, ActbenchCallback("gact:L1"), max_steps=4, eval_strategy="steps", eval_steps=2)
    run.train()

    evaluations = [entry for entry in run.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2
    assert not any(name in entry for entry in evaluations for name in NAMES)
    assert run.evaluate()["eval_loss"] == pytest.approx(evaluations[-1]["eval_loss"], abs=1e-6)


@pytest.mark.parametrize(
    "spec", ["gact:L2", *(pytest.param(spec, marks=pytest.mark.sampled(slow=1)) for spec in ("fewbit:3", "actnn:L3"))]
)
def test_a_checkpoint_loads_into_the_plain_model_and_a_run_goes_on_from_it(spec: str, tmp_path: Path) -> None:
    model = roberta()
    run = trainer(model, tmp_path, ActbenchCallback(spec), max_steps=4, save_strategy="steps", save_steps=2)
    run.train()
    plain = transformers.RobertaForSequenceClassification.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())

    again = roberta()
    resumed = trainer(again, tmp_path, ActbenchCallback(spec), max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [entry["step"] for entry in training_logs(resumed)] == [1, 2, 3, 4]
    if spec == "fewbit:3":
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())


@pytest.mark.slow
def test_after_an_exception_nothing_is_left_by_a_with_block(tmp_path: Path, is_plain: Plain) -> None:
    model = roberta()
    run = trainer(model, tmp_path, Failing())
    with pytest.raises(ZeroDivisionError), ActbenchCallback("gact:L2+fewbit:3").on(run):
        run.train()

    assert is_plain(model)
    assert not any(isinstance(callback, ActbenchCallback) for callback in run.callback_handler.callbacks)


@pytest.mark.slow
def test_after_an_exception_the_next_run_begins_anew(tmp_path: Path, is_plain: Plain) -> None:
    model = roberta()
    callback, failing = ActbenchCallback("gact:L1"), Failing()
    run = trainer(model, tmp_path, callback, failing, max_steps=3)
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert conversion_of(model) is not None
    callback.close()
    assert is_plain(model)

    with pytest.raises(ZeroDivisionError):
        run.train()
    run.remove_callback(failing)
    run.train()
    assert is_plain(model)


def test_reporters_see_the_numbers_inside_of_the_with_block(tmp_path: Path) -> None:
    reporter = Reporter()
    run = trainer(roberta(), tmp_path, reporter, max_steps=2)
    with ActbenchCallback("fewbit:3").on(run):
        run.train()

    losses = [entry for entry in reporter.seen if "loss" in entry]
    assert len(losses) == 2
    assert all(name in entry for entry in losses for name in NAMES)


def test_mixed_precision_is_measured_as_such(tmp_path: Path, is_plain: Plain) -> None:
    model = roberta()
    run = trainer(model, tmp_path, ActbenchCallback("gact:L1"), max_steps=2, bf16=True)
    run.train()

    exact = training_logs(run)[0]["actbench/exact_bytes"]
    assert kept_bytes(roberta()) / 2 < exact < kept_bytes(roberta())
    assert conversion_of(model) is None


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("spec", ["fewbit:3", "gact:L1"])
def test_activation_checkpointing_of_the_trainer(spec: str, tmp_path: Path, is_plain: Plain) -> None:
    model = roberta()
    run = trainer(model, tmp_path, ActbenchCallback(spec), max_steps=2, gradient_checkpointing=True)
    run.train()

    assert 0 < training_logs(run)[0]["actbench/exact_bytes"] < kept_bytes(roberta())
    assert is_plain(model)


def test_labels_kept_from_the_model_share_bits_out_all_the_same(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = trainer(roberta(), tmp_path, ActbenchCallback("gact:L2"), max_steps=2, label_smoothing_factor=0.1)
        run.train()
    assert training_logs(run)[0]["actbench/saved_bytes"] > 0


def test_sample_ids_are_taken_out_of_the_batch_and_told_to_the_scheme(tmp_path: Path) -> None:
    model, named = roberta(), []
    run = trainer(
        model,
        tmp_path,
        ActbenchCallback("actnn:L3,use_gradient=true", sample_ids="index"),
        max_steps=2,
        remove_unused_columns=False,
    )
    run.train_dataset = [{**row, "index": place} for place, row in enumerate(rows())]
    told = samplegradients._current
    model.register_forward_hook(lambda *_: named.append(told.get().on(torch.device("cpu")).tolist()))
    run.train()

    assert len(named) == 2
    assert len({place for ids in named for place in ids}) == 2 * BATCH
    assert told.get() is None


def test_missing_sample_ids_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    run = trainer(roberta(), tmp_path, ActbenchCallback("actnn:L3,use_gradient=true", sample_ids="index"))
    with pytest.raises(UsageError, match=r"sample_ids='index'.*input_ids.*remove_unused_columns=False"):
        run.train()


def test_what_cannot_be_is_refused(tmp_path: Path, is_plain: Plain) -> None:
    with pytest.raises(SpecError, match="there is no scheme 'fewbits'"):
        ActbenchCallback("fewbits:3")
    with pytest.raises(UsageError, match="measure_every=0"):
        ActbenchCallback("fewbit:3", measure_every=0)
    model = roberta()
    with pytest.raises(ConversionError, match="exact"):
        trainer(model, tmp_path, ActbenchCallback("exact")).train()
    with pytest.raises(ConversionError, match=r"torch_compile=True the model is compiled by torch.compile"):
        trainer(model, tmp_path, ActbenchCallback("fewbit:3"), torch_compile=True).train()
    assert is_plain(model)
    convert(model, "fewbit:3")
    with pytest.raises(ConversionError, match="already converted with 'fewbit:3'"):
        trainer(model, tmp_path, ActbenchCallback("gact")).train()


class WithOptimizer(Scheme):
    """Wraps the optimizer besides changing the model."""

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        changed = setup.changed(setup.module, (Site(path="classifier", was="head", becomes="other"),))
        return replace(changed, make_optimizer=lambda module: torch.optim.SGD(module.parameters()))


def test_a_scheme_that_changes_the_optimizer_is_refused(tmp_path: Path, is_plain: Plain) -> None:
    model = roberta()
    with pytest.raises(ConversionError, match="also changes the optimizer, which a converted model cannot carry"):
        trainer(model, tmp_path, ActbenchCallback(WithOptimizer())).train()
    assert is_plain(model)
