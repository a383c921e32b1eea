from __future__ import annotations

from torch import nn, optim

from actbench import defaults
from actbench.records import Optimizer
from actbench.training import MakeOptimizer

# Rates that fine-tuning runs commonly use; no byte and no second depends on them.
ADAM_RATE = 2e-5
SGD_RATE = 1e-2
MOMENTUM = 0.9


def make_optimizer(name: Optimizer | None) -> MakeOptimizer:
    """Return the function that makes the named optimizer for the parameters of a model that are trained.

    Args:
        name: ``adamw`` (None too), ``adam``, ``sgd`` (no state) or ``sgd-momentum`` (one buffer per parameter).
    """

    def make(module: nn.Module) -> optim.Optimizer:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        match name or defaults.OPTIMIZER:
            case "adamw":
                return optim.AdamW(trained, lr=ADAM_RATE)
            case "adam":
                return optim.Adam(trained, lr=ADAM_RATE)
            case "sgd":
                return optim.SGD(trained, lr=SGD_RATE)
            case "sgd-momentum":
                return optim.SGD(trained, lr=SGD_RATE, momentum=MOMENTUM)

    return make
