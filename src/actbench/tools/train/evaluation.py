"""The metrics of a finished model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.measuring.inspection.recorder import mode_set
from actbench.scheme.microbatches import Batch
from actbench.tools.train.processes import ProcessGroup
from actbench.tools.train.records import Evaluation, Metric


def f1(predicted: Tensor, labels: Tensor) -> float:
    """Return the harmonic mean of precision and recall of class 1, for classes (n,) int64; 0 without that class."""
    hits = int(((predicted == 1) & (labels == 1)).sum())
    claimed = int((predicted == 1).sum()) + int((labels == 1).sum())
    return 2 * hits / claimed if claimed else 0.0


def correlation(predicted: Tensor, labels: Tensor) -> float:
    """Return the mean of Pearson's and Spearman's correlation, as STS-B is scored (Wang et al. 2018, arXiv 1804.07461).

    Both arguments are (n,), floating point. The result is NaN where one of them is constant.
    """
    return (_pearson(predicted, labels) + _pearson(_ranks(predicted), _ranks(labels))) / 2


def _pearson(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def _ranks(x: Tensor) -> Tensor:
    """Return ranks from 1; equal values share their mean."""
    _, places, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts - 1) / 2
    return ranks[places]


@dataclass
class Tally:
    """What a model predicted of the samples of one process; single predictions are kept for metrics that need them."""

    metric: Metric
    loss: float = 0.0
    hits: int = 0
    count: int = 0
    predicted: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Add some samples.

        Args:
            scores: Of classes ``(n, classes)``, of the next token ``(n, length, tokens)``, or numbers ``(n, 1)``.
            labels: Classes ``(n,)``, tokens ``(n, length)``, or numbers ``(n,)``.
        """
        scores = scores.float()
        if labels.is_floating_point():
            predicted = scores.squeeze(1)
            self.loss += float(F.mse_loss(predicted, labels, reduction="sum"))
        else:
            if scores.dim() == 3:
                scores, labels = scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            self.loss += float(F.cross_entropy(scores, labels, reduction="sum"))
            predicted = scores.argmax(1)
            self.hits += int((predicted == labels).sum())
        self.count += len(labels)
        if self.metric in ("f1", "correlation"):
            self.predicted.append(predicted.cpu())
            self.labels.append(labels.cpu())


def scores_of(module: nn.Module, batch: Batch) -> Tensor:
    """Return the scores of the classes, ``(batch, classes)``, or of the next token, ``(batch, length, tokens)``."""
    if "images" in batch:
        found: Tensor = module(batch["images"])
        return found
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits: Tensor = module(**inputs).logits
    return logits


def evaluated(
    module: nn.Module, batches: Iterable[tuple[Batch, int]], step: int, metric: Metric, group: ProcessGroup
) -> Evaluation:
    """Return how good a model is after ``step`` steps, on all samples; for language, on all tokens but each first.

    ``batches`` are this process's share, with how many rows of each count. Training mode, gradients and the training's
    random numbers are left as they were.
    """
    mine = Tally(metric)
    with evaluating(module):
        for batch, rows in batches:
            scores = scores_of(module, batch)
            mine.add(scores[:rows], batch["labels"][:rows])
    return _judged(group.all_gather(mine), step, metric)


def _judged(tallies: list[Tally], step: int, metric: Metric) -> Evaluation:
    count = sum(tally.count for tally in tallies)
    found: dict[str, float] = {"loss": sum(tally.loss for tally in tallies) / count}
    if metric != "correlation":
        found["accuracy"] = sum(tally.hits for tally in tallies) / count
    if metric in ("f1", "correlation"):
        predicted = torch.cat([part for tally in tallies for part in tally.predicted])
        labels = torch.cat([part for tally in tallies for part in tally.labels])
        found[metric] = f1(predicted, labels) if metric == "f1" else correlation(predicted, labels)
    return Evaluation(step=step, **found)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, without gradients; random numbers drawn inside do not count."""
    devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    with mode_set(module, training=False), torch.no_grad(), torch.random.fork_rng(list(devices)):
        yield
