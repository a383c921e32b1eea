from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.runs.records import Evaluation
from actbench.training import Batch


def scores_of(module: nn.Module, batch: Batch) -> Tensor:
    """Return the scores of the classes, ``(batch, classes)``, or of the next token, ``(batch, length, tokens)``."""
    if "images" in batch:
        found: Tensor = module(batch["images"])
        return found
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits: Tensor = module(**inputs).logits
    return logits


def evaluated(module: nn.Module, batches: Iterable[Batch], step: int) -> Evaluation:
    """Return the mean loss and the accuracy over all samples; for language, over all tokens but each first.

    The model is put back into training mode; its gradients and the training's random numbers are left alone.
    """
    loss = hits = 0.0
    count = 0
    with evaluating(module):
        for batch in batches:
            scores, labels = scores_of(module, batch).float(), batch["labels"]
            if scores.dim() == 3:
                scores, labels = scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss += float(F.cross_entropy(scores, labels, reduction="sum"))
            hits += int((scores.argmax(1) == labels).sum())
            count += len(labels)
    return Evaluation(step=step, loss=loss / count, accuracy=hits / count)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode and back, without gradients; random numbers drawn inside do not count."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for child, training in modes.items():
            child.training = training
