"""The simulated peak of models that use one weight several times, whose gradients autograd adds up."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.scheme.microbatches import Batch
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

WORDS, WIDTH = 2000, 128


class Tied(nn.Module):
    """An embedding whose weight is that of the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(words)).relu())


class Repeated(nn.Module):
    """A layer that runs several times: of the sums of its gradients only the first is of a view."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(400, 400), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x).relu()
        return x


class Product(nn.Module):
    """A parameter whose gradients are no views, so that one is added to the other in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(400, 400))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).relu() @ self.weight


def words() -> Batch:
    drawn = torch.randint(0, WORDS, (2, 16))
    return {"input_ids": drawn, "labels": drawn}


def rows() -> Batch:
    return {"x": torch.randn(8, 400)}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=4, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    )


def bert() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=WORDS))


def own_loss(module: nn.Module, batch: Batch) -> Tensor:
    return module(**batch).loss


def word_loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def squares(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch["x"]).square().mean()


MODELS = {
    "tied": (Tied, words, word_loss),
    "twice": (lambda: Repeated(2), rows, squares),
    "three times": (lambda: Repeated(3), rows, squares),
    "product": (Product, rows, squares),
    "gpt2": (gpt2, words, own_loss),
    "bert": (bert, words, own_loss),
}
LONG = {"gpt2", "bert"}
OPTIMIZERS = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(module.parameters()),
}


@pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=pytest.mark.slow if name == "adamw" else ()) for name in OPTIMIZERS]
)
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.slow if name in LONG else []) for name in MODELS]
)
def test_the_peak_is_that_of_the_allocator(model: str, optimizer: str, step_of) -> None:
    build, batch, loss = MODELS[model]

    def peak(meter) -> int:
        return meter.memory(step_of(meter, build().train(), batch, loss, OPTIMIZERS[optimizer])).peak_bytes

    assert peak(SimulatedMeter(profiles.get("cpu"))) == pytest.approx(peak(CpuMeter()), rel=0.001)
