"""vLLM in a simulated training's process: what its engine takes of the card, and what trainers of TRL read of it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.model.scripts import Script
from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation
from actbench.units import MIB

GRPO = Path(__file__).parents[3] / "examples" / "grpo.py"
SMALL = ("--prompt", "16", "--completion", "12", "--batch", "8", "--group", "4")
CARD_BYTES = profiles.get("rtx-4090").memory_bytes
SHARE = 0.25
WEIGHTS_BYTES = 2 * (2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32)  # of tiny_llama

TRAINERS = """
import sys
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

kind, mode, cards, folder = sys.argv[1:]
make, settings = {
    "grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig), "online": (OnlineDPOTrainer, OnlineDPOConfig)
}[kind]
lengths = {"max_new_tokens": 12, "max_length": 32} if kind == "online" else {
    "max_completion_length": 12, "num_generations": 4
}
seen = []


def reward(completions, **more):
    seen.append(more.get("completion_ids"))
    return [1.0 * k for k in range(len(completions))]


trainer = make(
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
    reward_funcs=reward,
    args=settings(
        "out", per_device_train_batch_size=4, use_vllm=True, vllm_mode=mode, vllm_gpu_memory_utilization=0.25,
        vllm_tensor_parallel_size=int(cards), max_steps=4, report_to=[], save_strategy="no", **lengths,
    ),
    train_dataset=Dataset.from_dict({"prompt": ["the cat sat on a mat"] * 32}),
    processing_class=AutoTokenizer.from_pretrained(folder),
)
trainer.train()
"""


@pytest.fixture
def card() -> Iterator[Simulation]:
    with Simulation(profiles.get("rtx-4090")) as found:
        yield found
        layer = torch.nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(3):
            layer(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def engine(folder: Path, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(model=str(folder), gpu_memory_utilization=SHARE, **settings)


def test_an_engine_takes_its_share_and_gives_it_back_in_parts(card: Simulation, tiny_llama: Path) -> None:
    pool = math.ceil(SHARE * CARD_BYTES)
    llm = engine(tiny_llama, enable_sleep_mode=True)
    assert torch.cuda.memory_allocated() == pytest.approx(pool, abs=1024)  # blocks of 512 bytes

    llm.sleep(level=2)
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0

    llm.wake_up(tags=["weights"])
    assert torch.cuda.memory_allocated() == pytest.approx(WEIGHTS_BYTES, abs=512)

    llm.wake_up(tags=["kv_cache"])
    llm.wake_up()
    assert torch.cuda.memory_allocated() == pytest.approx(pool, abs=1024)

    del llm
    assert torch.cuda.memory_allocated() == 0


def test_an_engine_without_sleep_mode_keeps_its_share(card: Simulation, tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    llm.sleep(level=2)

    assert torch.cuda.memory_allocated() == pytest.approx(SHARE * CARD_BYTES, abs=1024)


def test_completions_are_as_long_as_they_may_be(card: Simulation, tiny_llama: Path) -> None:
    from vllm import SamplingParams

    llm = engine(tiny_llama, max_model_len=20)
    ids, text = {"prompt_token_ids": [5, 6, 7]}, "the cat sat on a mat"
    asked = SamplingParams(n=2, max_tokens=12, logprobs=1)
    first, second = llm.generate([ids, text], asked)

    assert first.prompt_token_ids == [5, 6, 7]
    assert len(second.prompt_token_ids) == 6
    assert [[len(each.token_ids) for each in one.outputs] for one in (first, second)] == [[12, 12], [12, 12]]
    assert [len(each) for each in first.outputs[0].logprobs] == [2] * 12
    assert all(token in each for token, each in zip(first.outputs[0].token_ids, first.outputs[0].logprobs, strict=True))
    assert isinstance(first.outputs[0].text, str)
    [unlimited] = llm.generate(ids, SamplingParams(max_tokens=None))
    assert len(unlimited.outputs[0].token_ids) == 17
    [chatted] = llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=4))
    assert len(chatted.prompt_token_ids) > 6
    assert len(chatted.outputs[0].token_ids) == 4


def test_an_engine_that_vllm_would_not_start_is_refused_or_noted(card: Simulation, tiny_llama: Path) -> None:
    from vllm import LLM

    with pytest.raises(ValueError, match="No available memory for the cache blocks"):
        LLM(model=str(tiny_llama), gpu_memory_utilization=1e-6)
    held = torch.empty(int(0.8 * CARD_BYTES), dtype=torch.uint8, device="cuda")
    llm = engine(tiny_llama)

    assert any(note.startswith("vLLM's engine would not start") for note in card.notes)
    del held, llm


def test_who_asks_whether_vllm_is_installed_gets_the_true_answer(card: Simulation) -> None:
    assert importlib.util.find_spec("vllm") is None


@pytest.mark.slow
def test_colocated_completions_add_their_pool_to_the_step(
    tiny_llama: Path, outcome: Callable[[Case], Measurement | Failure], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = 4 * MIB

    def measured(*arguments: str) -> Measurement:
        script = Script(target=str(GRPO), arguments=("--model", str(tiny_llama), *SMALL, *arguments), steps=3)
        case = Case(model="grpo", batch_size=1, meter="simulated", script=script, device_profile="rtx-4090")
        found = outcome(case)
        assert isinstance(found, Measurement), found.message
        return found

    served = measured("--served")
    colocated, asleep = (measured("--colocated", f"{pool / CARD_BYTES}", *more) for more in ((), ("--sleep",)))

    assert colocated.peak_parts is not None
    assert colocated.peak_parts.engine_bytes == pytest.approx(pool, abs=1024)
    assert colocated.peak_bytes - pool == pytest.approx(served.peak_bytes, rel=0.02)
    assert colocated.phase_peaks is not None
    assert asleep.phase_peaks is not None
    of_passes = colocated.phase_peaks.backward_bytes - pool
    assert asleep.phase_peaks.backward_bytes == pytest.approx(of_passes, abs=4096)
    assert asleep.peak_bytes == pytest.approx(served.peak_bytes, rel=0.02)
    assert colocated.timeline is not None
    lines = {each.line for each in colocated.timeline.holders if each.kind == "engine"}
    assert [line for line in lines if line and "grpo.py" in line] == list(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode", "cards"),
    [
        ("grpo", "server", 1),
        ("grpo", "colocate", 2),
        ("rloo", "colocate", 1),
        ("online", "colocate", 1),
        ("online", "server", 1),
    ],
)
def test_trainers_of_trl_run_with_vllm(
    kind: str, mode: str, cards: int, tiny_llama: Path, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(TRAINERS, kind, mode, str(cards), str(tiny_llama), steps=2, processes=cards)

    assert isinstance(found, Measurement), found.message
    assert found.peak_parts is not None
    pool = math.ceil(SHARE * CARD_BYTES) if mode == "colocate" else 0
    assert found.peak_parts.engine_bytes == pytest.approx(pool, abs=1024)
    assert any("greatest length" in note for note in found.warnings)
