"""What the shell completes, and what is said of a mistyped command."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("typed", "has", "lacks"),
    [
        ("actbench conv", "convert", "fit"),
        ("actbench measure -s chec", "checkpoint", "fewbit"),
        ("actbench measure -s fewbit:3+chec", "fewbit:3+checkpoint", "\ncheckpoint"),
        ("actbench run --scheme adam8", "adam8bit", "checkpoint"),
        ("actbench train --scheme fewb", "fewbit", "checkpoint"),
        ("actbench fit --base lor", "lora", "checkpoint"),
        ("actbench fit -s lor", "lora", "checkpoint"),
        ("actbench run --device-profile rtx-40", "rtx-4090", "a100-80gb"),
        ("actbench fit --device-profile a100", "a100-80gb", "rtx-4090"),
        ("actbench measure roberta", "roberta-base", "resnet50"),
        ("actbench fit llama-3.2", "llama-3.2-1b", "resnet50"),
        ("actbench convert roberta", "roberta-base", "resnet50"),
        ("actbench sweep quick", "quickstart", "resnet50"),
        ("actbench sweep resnet5", "resnet50", "quickstart"),
        ("actbench measure --optimizer sgd-", "sgd-momentum", "adamw"),
        ("actbench fit --optimizer adamw-", "adamw-fused", "sgd"),
        ("actbench fit --optimizer adamw --optimizer sgd-", "sgd-momentum", "adamw"),
    ],
)
def test_the_shell_completes_values(
    cli: Any, monkeypatch: pytest.MonkeyPatch, typed: str, has: str, lacks: str
) -> None:
    monkeypatch.setenv("_ACTBENCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    ended = cli()

    assert has in ended.out.split()
    assert lacks not in ended.out
    assert ended.err == ""


@pytest.mark.parametrize(
    ("typed", "naming"),
    [("runn", "No such command 'runn'. Did you mean 'run'?"), ("mesure", "Did you mean 'measure'?")],
)
def test_a_mistyped_command_gets_the_closest_one(cli: Any, typed: str, naming: str) -> None:
    ended = cli(typed, "train.py")

    assert ended.status == 2
    assert naming in " ".join(ended.err.replace("│", " ").split())


def test_a_command_that_is_like_none_gets_no_hint(cli: Any) -> None:
    assert "Did you mean" not in cli("xyzzy").err
