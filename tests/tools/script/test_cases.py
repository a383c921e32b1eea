"""The scripts, their arguments and their folders fit each other; scripts know nothing of actbench."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import CASES, SCRIPTS, ScriptCase, Size
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

FILES = sorted(SCRIPTS.glob("*.py"))


def test_every_script_has_a_case() -> None:
    imported = {"gpt_model.py"}
    targets = {case.target for case in CASES}

    assert {path.name for path in FILES} == {target for target in targets if target.endswith(".py")} | imported
    assert all(importlib.util.find_spec(target) for target in targets if not target.endswith(".py"))
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scripts_know_nothing_of_actbench(path: Path) -> None:
    text = path.read_text()
    ast.parse(text)

    assert "actbench" not in text
    assert "simul" not in text


@pytest.mark.parametrize("size", ["tiny", "real"])
@pytest.mark.parametrize("case", [case for case in CASES if case.target.endswith(".py")], ids=lambda case: case.name)
def test_arguments_are_those_of_the_script(case: ScriptCase, size: Size) -> None:
    text = (SCRIPTS / case.target).read_text()
    words = case.arguments(size, dict.fromkeys(case.folders(size), "folder"))
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]

    for flag in flags:
        assert f'"{flag}"' in text or f"{flag.removeprefix('--')} = " in text or f"{flag.removeprefix('--')}, " in text
    assert all(f'"{name}"' in text for name in case.environment(size))


def test_the_large_model_takes_no_room(llama_8b: Path) -> None:
    weights = llama_8b / "model.safetensors"
    numbers = 0
    with safe_open(weights, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            rows, *columns = file.get_slice(name).get_shape()
            numbers += rows * (columns[0] if columns else 1)
        row = file.get_slice("model.layers.31.mlp.down_proj.weight")[0:1]

    assert numbers == 8_030_261_248
    assert row.dtype == torch.bfloat16
    assert row.count_nonzero() == 0
    assert weights.stat().st_size > 2 * numbers
    assert weights.stat().st_blocks * 512 < 2**20
    assert AutoConfig.from_pretrained(llama_8b).num_hidden_layers == 32


def test_commands_name_folders_that_are_there(
    command: Callable[[ScriptCase, Size], list[str]], tiny_llama: Path, chats: Path
) -> None:
    (case,) = (case for case in CASES if case.name == "trl_sft")
    words = command(case, "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], return_dict=False)

    assert words[:2] == ["-m", "trl.scripts.sft"]
    assert str(tiny_llama) in words
    assert str(chats) in words
    assert tokenizer.decode(ids) == "<|start|> user the cat <|end|>"
