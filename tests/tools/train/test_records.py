from __future__ import annotations

import hashlib
import json

from actbench.tools.train.records import Trained, TrainingCase

# A case as files had it before runs could have several processes, parts of a batch, clipping or a tokenizer.
OLD = {
    "model": "m", "data": "digits", "scheme": "exact", "device": "cpu", "batch_size": 4, "epochs": None, "steps": 2,
    "optimizer": "adamw", "learning_rate": 0.1, "weight_decay": 0.0, "momentum": 0.0, "schedule": "constant",
    "milestones": [0.5, 0.75], "gamma": 0.1, "warmup_steps": 0, "evaluate_every": None, "task": "auto",
    "sequence_length": None, "image_size": None, "attention": "sdpa", "dtype": "float32", "autocast": None,
    "weights": "random", "seed": 0,
}  # fmt: skip


def test_runs_of_old_files_keep_their_keys() -> None:
    written = json.dumps(OLD, separators=(",", ":"))

    assert TrainingCase(**OLD).key() == hashlib.sha256(written.encode()).hexdigest()[:16]


def test_each_new_field_makes_another_run() -> None:
    base = TrainingCase(**OLD)
    changes = (
        {"tokenizer": "t"},
        {"max_grad_norm": 1.0},
        {"gradient_accumulation": 2},
        {"processes": 2},
        {"strategy": "ddp"},
    )

    assert len({base.model_copy(update=change).key() for change in ({}, *changes)}) == 6


def test_outcomes_of_old_files_are_read() -> None:
    old = {
        "kind": "trained", "metric": "accuracy", "steps": 2, "losses": [2.0, 1.0], "step_seconds": [0.5, 0.5],
        "evaluations": [{"step": 2, "loss": 1.0, "accuracy": 0.5}], "weights_bytes": 1, "activation_bytes": 2,
        "peak_bytes": 3,
    }  # fmt: skip

    assert Trained.model_validate(old).score == 0.5
