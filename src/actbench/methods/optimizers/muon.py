"""Muon with a momentum of 8 bits (Jordan et al. 2024; Liu et al., arXiv 2502.16982)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor, optim

from actbench.methods.formats.encodings import IntGroups
from actbench.methods.optimizers.adam import Group, MatrixAdam, State

_BITS: Final = IntGroups(bits=8, group_size=256, rounding="stochastic")


class Muon8bit(MatrixAdam):
    """``torch.optim.Muon`` for matrices, whose momentum is kept in codes of 8 bits, and Adam for the rest.

    The learning rate of matrices is scaled so that one rate fits Adam's parameters too (``match_rms_adamw``). At each
    step the momentum of one matrix is unpacked, stepped by torch, and packed with stochastic rounding, so that small
    changes are kept on average. The noise is a function of parameter and step.

    Args:
        params: As in :class:`~actbench.methods.optimizers.adam.MatrixAdam`, as are the options.
        matrices: See there.
        options: See there. Weight decay of matrices is always decoupled.
    """

    def __init__(self, params: Any, matrices: Collection[Tensor], **options: Any) -> None:
        super().__init__(params, matrices, **options)
        self._muons = {each: optim.Muon([each], adjust_lr_fn="match_rms_adamw") for each in self.matrices}

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        if parameter not in self.matrices:
            super()._step_one(parameter, gradient, group)
            return
        state, muon = self.state[parameter], self._muons[parameter]
        state["step"] = state.get("step", 0) + 1
        muon.param_groups[0].update({name: group[name] for name in ("lr", "weight_decay")})
        if "codes" in state:
            muon.state[parameter] = {"momentum_buffer": _momentum(gradient, state)}
        muon.step()  # type: ignore[no-untyped-call]
        momentum = muon.state.pop(parameter)["momentum_buffer"]
        seed = self.matrices[parameter] * 1_000_003 + state["step"]
        codes, bounds = _BITS.encode(momentum, torch.full((), seed, dtype=torch.int64, device=momentum.device))
        state["codes"], state["bounds"] = codes, bounds.view(torch.uint8)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, as in torch, which casts it to the type of the parameters; each type holds bytes exactly."""
        super().load_state_dict(state_dict)
        for parameter in self.matrices:
            state = self.state.get(parameter, {})
            state.update({name: state[name].to(torch.uint8) for name in ("codes", "bounds") if name in state})


def _momentum(gradient: Tensor, state: State) -> Tensor:
    return _BITS.decode((state["codes"], state["bounds"].view(torch.int32)), gradient.shape, gradient.dtype)
