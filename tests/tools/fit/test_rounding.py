"""What bfloat16 weights lose of small updates: the printed code says it, and its other lines keep them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_code import run_trainer

from actbench import workload as workloads
from actbench.measuring.bench import measure
from actbench.model.measured import Measurement
from actbench.model.records import Built, Case
from actbench.report.advice import needed_bytes
from actbench.tools.fit.codegen import BY_CHANCE, INSTEAD, NEAREST, code_for
from actbench.units import format_bytes, parse_bytes

LLAMA = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "device_profile": "cpu"}
BYTES = {"weights_bytes": 1, "activation_bytes": 1, "peak_bytes": 3}
SAID = Measurement(**BYTES, dtype="bfloat16", built=Built(model_class="LlamaForCausalLM", task="causal-lm"))


@pytest.fixture
def _no_compiler() -> Iterator[None]:
    """Let torchao's step run without the minutes that a compiler takes on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


def instead(code: str) -> str:
    """Return code with the lines that it offers, each in place of the line above it, but for imports."""
    lines: list[str] = []
    for line in code.splitlines():
        if INSTEAD in line:
            line = line.replace(INSTEAD, "")
            if not line.startswith("import ") and lines[-1].lstrip().split("=")[0] == line.lstrip().split("=")[0]:
                lines.pop()
        lines.append(line)
    return "\n".join(lines)


def changed(code: str, case: Case) -> float:
    """Return the share of a model's weights that ten steps of a printed loop change."""
    workload = workloads.load_workload(case)
    model = workload.setup(materialize=True, seed=0).module
    batches = (dict(workload.batch(case.batch_size, seed=seed)) for seed in range(10))
    before = [each.detach().clone() for each in model.parameters()]
    names: dict[str, Any] = {"model": model, "batches": batches}
    exec(code, names)
    after = list(names["setup"].module.parameters())
    moved = sum(int((one.to(other.dtype) != other).sum()) for one, other in zip(before, after, strict=True))
    return moved / sum(each.numel() for each in after)


@pytest.mark.sampled(slow=1)
@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("exact", "bfloat16"),
        ("adam8bit", "bfloat16"),
        ("adam8bit+release", "bfloat16"),
        ("pure:bfloat16+adamfp8", None),
    ],
)
def test_the_shares_of_weights_that_change_are_those_told(scheme: str, dtype: Any) -> None:
    case = Case(**LLAMA, scheme=scheme, dtype=dtype)

    loop = code_for(case, SAID).loop

    told = " ".join(loop.replace("\n# ", " ").split())
    assert f"{100 * NEAREST:.0f} % of a small Llama's weights change" in told
    assert f"with stochastic rounding {100 * BY_CHANCE:.0f} %." in told
    assert changed(loop, case) == pytest.approx(NEAREST, abs=0.015)
    assert changed(instead(loop), case) == pytest.approx(BY_CHANCE, abs=0.015)


def test_weights_of_float32_all_change_and_nothing_is_told_of_them() -> None:
    case = Case(**LLAMA, autocast="bfloat16")

    loop = code_for(case, SAID.model_copy(update={"dtype": "float32"})).loop

    assert "rounds" not in loop
    assert INSTEAD not in loop
    assert changed(loop, case) > 0.999


@pytest.mark.parametrize(
    ("settings", "offered"),
    [
        ({"dtype": "bfloat16"}, "torchao.optim._AdamW("),
        ({"dtype": "bfloat16", "optimizer": "adamw-fused"}, "torchao.optim._AdamW("),
        ({"scheme": "adam4bit+pure:bfloat16"}, "adam4bit,bf16_stochastic_round=true"),
        ({"dtype": "bfloat16", "scheme": "adam8bit:bnb"}, None),
        ({"dtype": "bfloat16", "scheme": "optimizer_offload"}, None),
        ({"dtype": "bfloat16", "scheme": "smaq,on=state"}, None),
        ({"dtype": "bfloat16", "optimizer": "sgd"}, None),
    ],
    ids=str,
)
def test_only_what_can_round_stochastically_is_offered(settings: Any, offered: str | None) -> None:
    code = code_for(Case(**LLAMA, **settings), SAID)

    for text in filter(None, (code.loop, code.trainer)):
        assert "which rounds small updates away" in text
        assert (INSTEAD in text) == (offered is not None)
    if offered:
        assert offered in instead(code.loop)
        assert "bf16_stochastic_round=True" in instead(code.trainer or "")
    else:
        assert "need about twice the memory" in code.loop


@pytest.mark.parametrize("scheme", ["lora:16", "adam8bit:torchao,bf16_stochastic_round=true"])
def test_nothing_is_told_where_nothing_is_lost(scheme: str) -> None:
    assert "rounds" not in code_for(Case(**LLAMA, dtype="bfloat16", scheme=scheme), SAID).loop


def test_a_model_of_ones_own_is_told_by_the_type_of_its_parameters() -> None:
    own = {"model": "own.py:build", "batch_size": 4}

    assert "rounds" in code_for(Case(**own), SAID).loop
    assert "rounds" not in code_for(Case(**own), SAID.model_copy(update={"dtype": "float32"})).loop


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("scheme", ["exact", "checkpoint"])
def test_float32_weights_are_offered_where_there_is_room(scheme: str) -> None:
    settings = {**LLAMA, "device_profile": "rtx-4090", "scheme": scheme, "dtype": "bfloat16"}
    said = measure(Case(**settings))
    exact = measure(Case(**{**settings, "dtype": "float32"}, autocast="bfloat16"))
    tight = said.model_copy(update={"memory_limit_bytes": 2 * needed_bytes(said)})

    loop = code_for(Case(**settings), said).loop

    told = re.search(r"more\n# than this one's (\S+ \S+), but at most (\S+ \S+) of", loop)
    assert told
    assert told[1] == format_bytes(needed_bytes(said))
    assert needed_bytes(exact) <= parse_bytes(told[2].replace(" ", ""))
    assert f"#   actbench measure tiny-llama -s {scheme} -b 4 --sequence-length 64 --autocast bfloat16" in loop
    assert "float32 weights" not in code_for(Case(**settings), tight).loop.lower()


@pytest.mark.slow
@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("scheme", ["exact", "adam8bit"])
def test_trainer_runs_with_what_rounds_stochastically(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(**LLAMA, scheme=scheme, dtype="bfloat16")

    names = run_trainer(case, SAID, tmp_path, monkeypatch, change=instead)

    optimizer = names["trainer"].optimizer
    assert getattr(optimizer, "optimizer", optimizer).bf16_stochastic_round
