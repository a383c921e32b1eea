from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import Card
from cases import Folders, ScriptCase, Size
from fakescript import TRAIN
from tokenizers import Tokenizer, models, pre_tokenizers
from trainings import RunScript
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from actbench.device.card import simulated_device
from actbench.model.measured import Measurement
from actbench.model.meters import MeterName
from actbench.model.records import Case, Failure
from actbench.model.scripts import Script
from actbench.run.isolated import IsolatedSession
from actbench.run.processes import ForkServer
from actbench.units import MIB

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "two", "dogs", "near", "our", "river"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)
TINY_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
MODULE = "import sys\nprint('module', sys.argv[1:])\n"
SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@pytest.fixture
def card() -> Iterator[Card]:
    counters = Card()
    with simulated_device(counters):
        yield counters


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Return the server that starts processes of scripts: autograd forbids forks of a process that it ran in."""
    with ForkServer("actbench.tools.script.bench") as found:
        yield found


@pytest.fixture
def outcome(server: ForkServer, tmp_path: Path) -> Callable[[Case], Measurement | Failure]:
    """Return what measures a case of a script in a process; what it prints goes to files ``out`` and ``err``."""
    for name in ("out", "err"):
        (tmp_path / name).touch()

    def measured(case: Case) -> Measurement | Failure:
        with IsolatedSession(server, case, 300.0, printed=str(tmp_path)) as session:
            return session.memory()

    return measured


@pytest.fixture
def run(tmp_path: Path, outcome: Callable[[Case], Measurement | Failure]) -> RunScript:
    """Return what runs a script of this text and returns its outcome."""

    def ran(
        text: str,
        *arguments: str,
        scheme: str = "exact",
        search: bool = False,
        meter: MeterName = "simulated",
        limit: int | None = None,
        **options: Any,
    ) -> Any:
        file = tmp_path / "train.py"
        file.write_text(text)
        script = Script(target=str(file), arguments=arguments, **options)
        case = Case(
            model=script.text,
            batch_size=1,
            script=script,
            scheme=scheme,
            meter=meter,
            device_profile="rtx-4090" if meter == "simulated" else None,
            find_largest_batch=search,
            memory_limit_bytes=64 * MIB if search else limit,
        )
        return outcome(case)

    return ran


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script in the current folder, which also holds the module ``package.inner``; its steps are made up."""
    for name in ("BENCH", "FOLLOWED_UP", "FULLY_ANSWERED"):
        monkeypatch.setattr(f"actbench.tools.script.command.{name}", "fakescript")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(MODULE)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """Return the folder of a small Llama of bfloat16: config, tokenizer, random weights."""
    folder = tmp_path / "tiny-llama"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(_llama(TINY_LLAMA), dtype=torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    """Return the folder of a Llama of eight billion parameters: its weights are zeros that take no room on the disk."""
    folder = tmp_path / "llama-8b"
    config = _llama(LLAMA_8B)
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    write_tokenizer(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    write_zeros(folder / "model.safetensors", model.state_dict())
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Return the folder of a data set: 64 conversations of two messages in ``train.jsonl``."""
    folder = tmp_path / "chats"
    folder.mkdir()
    lines = []
    for i in range(64):
        words = [WORDS[i * k % len(WORDS)] for k in range(1, 20 + i)]
        messages = [
            {"role": "user", "content": " ".join(words[:10])},
            {"role": "assistant", "content": " ".join(words[10:])},
        ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def command(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ScriptCase, Size], list[str]]:
    """Return what makes the words after ``python`` or ``actbench run``, and the folders and variables that they need.

    The script's own outputs go into the current folder, so that folder is a temporary one.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))

    def made(case: ScriptCase, size: Size) -> list[str]:
        for name, value in case.environment(size).items():
            monkeypatch.setenv(name, value)
        folders: Folders = {name: str(request.getfixturevalue(name)) for name in case.folders(size)}
        return case.command(size, folders)

    return made


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words, which knows chats, into ``folder``."""
    special = ["<|pad|>", "<|start|>", "<|end|>", "<|unknown|>"]
    vocabulary = {word: i for i, word in enumerate([*special, "user", "assistant", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )
    fast.save_pretrained(folder)


def write_zeros(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file of zeros with the names, shapes and dtypes of ``tensors``: the file is all hole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + math.prod(tensor.shape) * tensor.element_size()
        dtype = SAFETENSORS[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _llama(sizes: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
