from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from actbench.codecs.encodings import Encoding
from actbench.ops.smaqstep import rules as steprules
from actbench.optim.base import Group, PackedOptimizer, State, in_float32, write_back
from actbench.optim.storage import Storage


class Adam(PackedOptimizer):
    """Adam (Kingma, Ba 2014, arXiv 1412.6980) with packed moments; the second one as its root.

    With ``smaq`` both take 1.625 bytes a parameter, where float32 takes 8. The second moment itself would not do on its
    linear scale: small ones become zero, and a first moment divided by them goes anywhere.

    Args:
        params: As in torch.
        lr: As in torch, as are the next three.
        betas: Decay of the first and of the second moment.
        eps: Added to the divisor.
        weight_decay: L2 penalty.
        maximize: As in torch.
        encoding: How the moments are stored; None for float32.
        seed: Of the noise of rounding. Replicas of a parallel run must have the same.

    Raises:
        ValueError: torch does not take such an option.
        UsageError: There is no such encoding, or it cannot hold state.
    """

    twin: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    moments: ClassVar[dict[str, str]] = {"exp_avg": "packed_exp_avg", "exp_avg_sq": "packed_root_exp_avg_sq"}
    roots: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        encoding: str | Encoding | None = "smaq",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, encoding, seed)

    def _update(
        self, p: Tensor, g: Tensor, group: Group, storage: Storage, state: State, seed: int, step: float
    ) -> None:
        rule = steprules.adam_rule(step, decoupled=self.decoupled, **_numbers(group))
        storage.adam(p, g, state["packed_exp_avg"], state["packed_root_exp_avg_sq"], seed, rule)

    def _step_others(self, parameters: list[Tensor], group: Group) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.tensor(0.0, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        values, states = in_float32(parameters), [self.state[parameter] for parameter in parameters]
        numbers = _numbers(group)
        beta1, beta2 = numbers.pop("betas")
        adam(
            values,
            in_float32(parameter.grad for parameter in parameters if parameter.grad is not None),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            decoupled_weight_decay=self.decoupled,
            **numbers,
        )
        write_back(values, parameters)


class AdamW(Adam):
    """AdamW (Loshchilov, Hutter 2017, arXiv 1711.05101) with packed moments: :class:`Adam` with decoupled weight decay.

    Arguments and errors are those of :class:`Adam`; ``weight_decay`` is the coefficient of the decay.
    """

    twin: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        encoding: str | Encoding | None = "smaq",
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, encoding=encoding, seed=seed)


def _numbers(group: Group) -> dict[str, Any]:
    names = ("betas", "eps", "weight_decay", "maximize")
    return {"lr": float(group["lr"]), **{name: group[name] for name in names}}
