from __future__ import annotations

import math

from torch import nn, optim

from actbench.runs.records import TrainingCase
from actbench.training import MakeOptimizer


def make_optimizer(case: TrainingCase) -> MakeOptimizer:
    """Return the function that makes a run's optimizer for the parameters of a model that are trained."""

    def make(module: nn.Module) -> optim.Optimizer:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        rate, decay = case.learning_rate, case.weight_decay
        match case.optimizer:
            case "adamw":
                return optim.AdamW(trained, lr=rate, weight_decay=decay)
            case "adam":
                return optim.Adam(trained, lr=rate, weight_decay=decay)
            case "sgd":
                return optim.SGD(trained, lr=rate, weight_decay=decay, momentum=case.momentum)

    return make


def rate_factor(case: TrainingCase, step: int, steps: int) -> float:
    """Return what the learning rate of a step, from 0, is multiplied by.

    A function of the step alone, so that a resumed run has nothing to restore.
    """
    if step < case.warmup_steps:
        return (step + 1) / (case.warmup_steps + 1)
    done = step / steps
    match case.schedule:
        case "constant":
            return 1.0
        case "cosine":
            past = (step - case.warmup_steps) / max(1, steps - case.warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * past))
        case "multi_step":
            return math.prod(case.gamma for milestone in case.milestones if done >= milestone)
