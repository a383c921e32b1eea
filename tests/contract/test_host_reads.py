"""After its first step a converted model reads no value on the host, makes no seed there, and asks no generator.

So nothing waits for a device, and a step can be captured as a CUDA graph, whose replays run no Python.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from actbench import scheme as schemes
from actbench.methods.actnn.groups import GroupCodec
from actbench.methods.formats.encoded import Encoded
from actbench.ops import noise
from actbench.packing.hooked import hooks
from actbench.scheme.setup import TrainingSetup

READING = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero"}
MAKING = {"actbench::fresh_seed", "aten::lift_fresh"}


class Watch(TorchDispatchMode):
    """Notes the operators that read a value, make a tensor of a number of the host, or draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in READING | MAKING or torch.Tag.nondeterministic_seeded in func.tags:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def convolutions() -> tuple[nn.Module, dict[str, Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
        nn.GroupNorm(2, 8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 32), nn.LayerNorm(32), nn.Linear(32, 8),
    )  # fmt: skip
    return model, {"input": torch.randn(4, 3, 16, 16)}


def transformer() -> tuple[nn.Module, dict[str, Tensor]]:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=50,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return BertModel(config), {"input_ids": torch.arange(48).reshape(4, 12)}


def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    found = model(**batch)
    (found if isinstance(found, Tensor) else found.last_hidden_state).square().mean().backward()


@pytest.fixture
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hooks look at values as seldom as where a look waits for a device."""
    monkeypatch.setattr(hooks, "is_elsewhere", lambda tensor: True)


@pytest.mark.usefixtures("seeded", "_as_on_a_device")
@pytest.mark.parametrize("make", [convolutions, transformer])
@pytest.mark.parametrize("spec", ["actnn:L2", "gact:L2", "fewbit:3", "randomized:0.2", "smaq,on=activations", "coat"])
def test_no_step_after_the_first_reads_a_value_makes_a_seed_or_asks_a_generator(
    spec: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "_AT_ONCE", 1)
    exact, batch = make()
    model = schemes.build(spec).apply(TrainingSetup(exact.train())).module
    step(model, batch)
    taken = []

    def take(device: torch.device, count: int, take: Any = noise._seeds.take) -> Tensor:
        taken.append(count)
        return take(device, count)

    monkeypatch.setattr(noise._seeds, "take", take)
    monkeypatch.setattr(noise, "mark_seeded", None)  # asks torch's generator
    for codec in (GroupCodec, Encoded):
        monkeypatch.setattr(codec, "lost", None)  # looks at values
    with Watch() as watch:
        for _ in range(2):
            step(model, batch)

    assert watch.seen == []
    assert (len(taken) > 0) == (spec != "fewbit:3")


def test_the_watch_sees_what_it_forbids() -> None:
    with Watch() as watch:
        x = torch.ones(3, device="cpu")
        float(x.sum())
        torch.tensor(3)
        x.uniform_()

    assert watch.seen == ["aten::_local_scalar_dense", "aten::lift_fresh", "aten::uniform_"]
