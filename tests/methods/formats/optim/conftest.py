from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.tools.train.data import generated

LENGTH, WIDTH, BATCH, STEPS = 48, 96, 16, 300

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Layer(nn.Module):
    """Attention to what is before and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LetterModel(nn.Module):
    """Scores of the next letter, of 310,000 parameters.

    A place is told its letter together with the one before: of these pairs most are in no batch, so that rows of the
    embedding have gradients now and then, as words have.
    """

    def __init__(self) -> None:
        super().__init__()
        letters = len(generated.ALPHABET)
        self.pairs, self.places = nn.Embedding(letters**2, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, ids: Tensor) -> Tensor:
        pairs = F.pad(ids, (1, 0))[:, :-1] * len(generated.ALPHABET) + ids
        x = self.pairs(pairs) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.layers(x)))

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(make_optimizer: MakeOptimizer, seed: int, steps: int = STEPS) -> Iterator[tuple[LetterModel, float]]:
    """Yield the model and its loss before each step; the caller may stop."""
    torch.manual_seed(seed)
    data, model = generated.load_text(LENGTH).train.inputs, LetterModel()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = model.loss(data[torch.randint(len(data), (BATCH,), generator=random)])
        yield model, loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


@pytest.fixture
def losses() -> Callable[..., list[float]]:
    """Give a function that trains and returns the losses up to one that is not a number."""

    def run(make_optimizer: MakeOptimizer, seed: int = 0, steps: int = STEPS) -> list[float]:
        found = []
        for _, loss in train(make_optimizer, seed, steps):
            found.append(loss)
            if loss != loss:
                break
        return found

    return run


@pytest.fixture
def validation_loss() -> Callable[[MakeOptimizer, int], float]:
    """Give a function that trains 300 steps from a seed and returns the loss on text that was not trained on."""

    def run(make_optimizer: MakeOptimizer, seed: int) -> float:
        *_, (model, _) = train(make_optimizer, seed)
        with torch.no_grad():
            return float(model.loss(generated.load_text(LENGTH).validation.inputs))

    return run
