"""Loading the state of optimizers with packed state.

Bytes must be loaded as bytes, and torch's own state is packed when it is loaded.
``torch.optim.Optimizer.load_state_dict`` casts every tensor of a parameter's state to the type of the parameter, bytes
too. So states pass through that function in :class:`Held`, which it does not cast, and are complete before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actbench.errors import UsageError
from actbench.methods.formats.optim.shards import first_of, loaded_from, own_values, spread_as
from actbench.methods.formats.optim.storage import is_packed, storage_of

_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")
TORCHS_OWN = frozenset({*_UNSUPPORTED, "foreach", "fused", "decoupled_weight_decay"})
"""Options of torch's groups that packed ones do not have."""


class Held:
    """A parameter's state, which torch passes on as it is."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values


def prepared(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict for this optimizer: a hook of torch, which goes on with what it returns.

    Options that only these optimizers have are kept where the saved groups have none.

    Raises:
        UsageError: The state is not one that this optimizer can have.
    """
    ours: Any = optimizer
    own, saved = ours.param_groups, state_dict["param_groups"]
    # not strict: torch refuses another number of groups or parameters behind this hook, in its own words
    groups = [_group_of(ours, group, other) for group, other in zip(own, saved, strict=False)]
    states = dict(state_dict["state"])
    for mine, group in zip(own, groups, strict=False):
        for parameter, number in zip(mine["params"], group["params"], strict=False):
            if number in states:
                states[number] = Held(_state_of(ours, parameter, group["encoding"], states[number], number))
    return {**state_dict, "param_groups": groups + saved[len(groups) :], "state": states}


def _group_of(optimizer: Any, own: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    refuse_unsupported(saved)
    if saved.get("decoupled_weight_decay", optimizer.decoupled) != optimizer.decoupled:
        other = "Adam" if optimizer.decoupled else "AdamW"
        raise UsageError(
            f"the saved state is of {other}, whose weight decay differs from that of this {type(optimizer).__name__}; "
            f"load the state into {other}"
        )
    kept = {key: own[key] for key in ("encoding", "seed")}
    return {**kept, **{key: value for key, value in saved.items() if key not in TORCHS_OWN}}


def refuse_unsupported(group: dict[str, Any]) -> None:
    """Raise a UsageError if a group of torch's optimizer has options that no packed one has."""
    for option in _UNSUPPORTED:
        if group.get(option):
            raise UsageError(f"{option}=True is not supported by packed optimizers: build the optimizer without it")


def _state_of(
    optimizer: Any, parameter: Tensor, encoding: str | None, saved: dict[str, Any], number: int
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, packed_name in optimizer.moments.items():
        what = f"state {number}: {packed_name if packed_name in saved else name}"
        if packed_name in saved:
            if encoding is None:
                raise UsageError(
                    f"{what} is packed, and its group has encoding=None; build the optimizer as it was saved"
                )
            state[packed_name] = loaded_from(saved[packed_name], parameter, encoding, what)
        elif isinstance(saved.get(name), Tensor):
            values = own_values(saved[name], parameter, what)
            if encoding is None or not is_packed(parameter):
                state[name] = spread_as(values, parameter)
            else:
                values = values.sqrt_() if name in optimizer.roots else values
                state[packed_name] = storage_of(encoding).pack(values.flatten(), first_of(parameter))
    if "step" in saved or any(name in state for name in optimizer.moments.values()):
        # SGD of torch counts no steps; what it has made a buffer in is not the first one.
        state["step"] = torch.as_tensor(saved.get("step", 1.0), dtype=torch.float32, device="cpu").clone()
    return state
