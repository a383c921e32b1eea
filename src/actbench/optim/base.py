"""What all optimizers with packed state have in common, loading of their state included.

Bytes must be loaded as bytes, and torch's own state is packed when it is loaded.
``torch.optim.Optimizer.load_state_dict`` casts every tensor of a parameter's state to the type of the parameter, bytes
too. So states travel through it in :class:`Held`, which it has no rule for, and are complete before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from actbench.codecs.encodings import Encoding
from actbench.errors import UsageError
from actbench.ops import noise
from actbench.optim.storage import Storage, is_packed, storage_of
from actbench.optim.wrapped import called

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
    ours = cast("PackedOptimizer", optimizer)
    own, saved = ours.param_groups, state_dict["param_groups"]
    groups = [_group_of(ours, group, other) for group, other in zip(own, saved, strict=False)]
    numbers = chain.from_iterable(group["params"] for group in groups)
    places = zip(
        numbers,
        ((parameter, new) for group, new in zip(own, groups, strict=False) for parameter in group["params"]),
        strict=False,
    )
    states = dict(state_dict["state"])
    for number, (parameter, group) in places:
        if number in states:
            states[number] = Held(_state_of(ours, parameter, group["encoding"], states[number], number))
    return {**state_dict, "param_groups": groups + saved[len(groups) :], "state": states}


def _group_of(optimizer: PackedOptimizer, own: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    refuse_unsupported(saved)
    if saved.get("decoupled_weight_decay", optimizer.decoupled) != optimizer.decoupled:
        raise UsageError(
            f"the weight decay of the saved state is that of {'Adam' if optimizer.decoupled else 'AdamW'}, and this is "
            f"{type(optimizer).__name__}; load it into the other one"
        )
    kept = {key: own[key] for key in ("encoding", "seed")}
    return {**kept, **{key: value for key, value in saved.items() if key not in TORCHS_OWN}}


def refuse_unsupported(group: dict[str, Any]) -> None:
    """Raise a UsageError if a group of torch's optimizer has options that no packed one has."""
    for option in _UNSUPPORTED:
        if group.get(option):
            raise UsageError(f"{option}=True is not supported by packed optimizers: build the optimizer without it")


def _state_of(
    optimizer: PackedOptimizer, parameter: Tensor, encoding: str | None, saved: dict[str, Any], number: int
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, packed_name in optimizer.moments.items():
        if packed_name in saved:
            state[packed_name] = _bytes(saved[packed_name], parameter, encoding, f"state {number}: {packed_name}")
        elif isinstance(saved.get(name), Tensor):
            values = saved[name].to(device=parameter.device, dtype=torch.float32, copy=True)
            if encoding is None or not is_packed(parameter):
                state[name] = values
            else:
                values = values.sqrt_() if name in optimizer.roots else values
                state[packed_name] = storage_of(encoding).pack(values.flatten())
    if "step" in saved or any(name in state for name in optimizer.moments.values()):
        # SGD of torch counts no steps; what it has made a buffer in is not the first one.
        state["step"] = torch.as_tensor(saved.get("step", 1.0), dtype=torch.float32, device="cpu").clone()
    return state


def _bytes(packed: Tensor, parameter: Tensor, encoding: str | None, what: str) -> Tensor:
    if encoding is None:
        raise UsageError(f"{what} is packed, and its group has encoding=None; build the optimizer as it was saved")
    expected = storage_of(encoding).packed_bytes(parameter.numel())
    if packed.dtype != torch.uint8 or packed.shape != (expected,):
        raise UsageError(
            f"{what} must be {expected} bytes as {encoding!r}, found {packed.dtype} {tuple(packed.shape)}; build the "
            "optimizer as it was saved"
        )
    return packed.to(device=parameter.device, copy=True)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Group = dict[str, Any]
State = dict[str, Tensor]


class PackedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is packed, and which computes in float32 as torch's does.

    What it adds to the options of a group: ``encoding``, in which the state is stored, such as ``smaq`` or ``int:6``
    (:mod:`actbench.codecs.encodings`), None for float32; and ``seed``, of the noise of rounding. The noise is a
    function of the seed, the parameter's place and the step, so a resumed run goes on with the same bits, and so do all
    replicas of a parallel run.

    The state of a parameter is ``packed_…``, one vector of bytes for each moment with the elements in the order of
    ``parameter.flatten()``, and ``step``. :func:`actbench.optim.storage.is_packed` says of which parameters; that of
    the others is torch's, in float32.

    Class attributes: twin: The optimizer of torch whose updates these are. moments: How each moment that torch keeps is
    called where it is packed. roots: Those that are stored as their root. decoupled: Whether weight decay is apart from
    the gradient; None where it never is.
    """

    twin: ClassVar[type[torch.optim.Optimizer]]
    moments: ClassVar[dict[str, str]]
    roots: ClassVar[frozenset[str]] = frozenset()
    decoupled: ClassVar[bool | None] = None

    def __init__(self, params: Any, options: Group, encoding: str | Encoding | None, seed: int) -> None:
        self.twin([torch.empty(0)], **options)  # what torch refuses is refused in its words
        super().__init__(params, {**options, "encoding": encoding, "seed": seed})
        self.defaults["encoding"] = _spec_of(encoding)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch.

        Raises:
            UsageError: There is no such encoding, or a parameter is of a type that is not computed in float32.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            group["encoding"] = _spec_of(group["encoding"])
            for parameter in group["params"]:
                _check(parameter)
        except UsageError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient, and return what the closure returns, if there is one.

        Raises:
            UsageError: A gradient is sparse.
        """
        loss = called(closure)
        self._check_gradients()
        number = 0
        for group in self.param_groups:
            storage = storage_of(group["encoding"]) if group["encoding"] is not None else None
            others = []
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                if storage is not None and is_packed(parameter) and self._has_moments(group):
                    self._step_packed(parameter, group, storage, number)
                else:
                    others.append(parameter)
            self._step_others(others, group)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what :meth:`state_dict` of this class gave, or that of the twin of torch, whose state is packed.

        Raises:
            UsageError: The state is of other encodings or of options that are not supported.
        """
        hook = self.register_load_state_dict_pre_hook(prepared)  # the last one: after those of the user
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        for parameter, value in self.state.items():
            if isinstance(value, Held):
                self.state[parameter] = value.values

    def _check_gradients(self) -> None:
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UsageError(f"parameter {number} has a sparse gradient; give its layer sparse=False")

    def _has_moments(self, group: Group) -> bool:
        return True

    def _step_packed(self, parameter: Tensor, group: Group, storage: Storage, number: int) -> None:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, device="cpu")
            for name in self.moments.values():
                state[name] = storage.zeros(parameter.numel(), parameter.device)
        state["step"] += 1
        step = state["step"].item()
        assert parameter.grad is not None
        values, gradient = parameter.detach().contiguous().view(-1), parameter.grad.contiguous().view(-1)
        self._update(values, gradient, group, storage, state, _seed_of(group["seed"], number, int(step)), step)
        if not parameter.is_contiguous():
            parameter.copy_(values.view(parameter.shape))
        else:
            increment_version(parameter)  # kernels write past autograd, which has to notice

    def _update(
        self, p: Tensor, g: Tensor, group: Group, storage: Storage, state: State, seed: int, step: float
    ) -> None:
        raise NotImplementedError

    def _step_others(self, parameters: list[Tensor], group: Group) -> None:
        """Step parameters whose state is float32, by torch's own function."""
        raise NotImplementedError


def in_float32(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors, those of half types as copies in float32."""
    return [parameter.detach().float() for parameter in parameters]


def write_back(values: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Write what :func:`in_float32` gave, and was changed, to where it is a copy of."""
    for value, parameter in zip(values, parameters, strict=True):
        if value.dtype != parameter.dtype:
            parameter.copy_(value)


def _seed_of(seed: int, number: int, step: int) -> int:
    """Return the seed of the noise of a parameter's step: another one for each number below 2**32 and step."""
    return noise.signed(noise.mixed((noise.mixed(seed) ^ number) + (step << 32)))


def _spec_of(encoding: str | Encoding | None) -> str | None:
    spec = encoding.spec if isinstance(encoding, Encoding) else encoding
    if spec is not None:
        storage_of(spec)
    return spec


def _check(parameter: Tensor) -> None:
    if parameter.dtype not in FLOATS:
        raise UsageError(
            f"a parameter is {parameter.dtype}; packed optimizers compute in float32, for parameters that are float32, "
            "float16 or bfloat16"
        )
    if hasattr(parameter, "device_mesh"):
        raise UsageError(
            "a parameter is a DTensor, as FSDP2 makes them: its state would be that of one shard and could not be put "
            "together again; use torch's optimizer there"
        )
