"""What all optimizers with packed state have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from actbench.errors import UsageError
from actbench.methods.formats.encodings import Encoding
from actbench.methods.formats.optim.loading import Held, prepared
from actbench.methods.formats.optim.shards import first_of, local_gradient, local_of, refuse_unknown_shards, saved_from
from actbench.methods.formats.optim.storage import Storage, is_packed, storage_of
from actbench.ops import noise
from actbench.scheme.wrapped import called

Group = dict[str, Any]
State = dict[str, Tensor]


class PackedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is packed, and which computes in float32 as torch's does.

    Its groups have two more options: ``encoding``, in which the state is stored, such as ``smaq`` or ``int:6``
    (:mod:`actbench.methods.formats.encodings`), None for float32; and ``seed``, the seed of the noise of rounding. The
    noise is a function of the seed, the parameter's place among those with packed state and the step, so a resumed run
    goes on with the same bits, and so do all processes with copies of a parameter.

    The state of a parameter is ``packed_…``, one vector of bytes for each moment with the elements in the order of
    ``parameter.flatten()``, and ``step``. :func:`actbench.methods.formats.optim.storage.is_packed` says which
    parameters have packed state; the state of the others is torch's, in float32. A parameter may be a DTensor that is
    spread by rows, as FSDP2 makes them: each process has the state of its own rows, and noise is that of the whole
    (:mod:`actbench.methods.formats.optim.shards`).

    Class attributes: twin: The optimizer of torch whose updates these are. moments: The name of each of torch's moments
    when it is packed. roots: The moments that are stored as their root. decoupled: Whether weight decay is apart from
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
            UsageError: There is no such encoding, or a parameter is of a type that is not computed in float32, or a
                DTensor that is not spread by rows.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            group["encoding"] = _spec_of(group["encoding"])
            for parameter in group["params"]:
                _check(parameter)
                if group["encoding"] is not None and is_packed(parameter):
                    refuse_unknown_shards(parameter)
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
        for place, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UsageError(f"parameter {place} has a sparse gradient; give its layer sparse=False")
        number = 0
        for group in self.param_groups:
            storage = storage_of(group["encoding"]) if group["encoding"] is not None else None
            others = []
            for parameter in group["params"]:
                number += is_packed(parameter)  # alone: of processes that share layers, only some have the biases
                if parameter.grad is None:
                    continue
                if storage is not None and is_packed(parameter) and self._has_moments(group):
                    self._step_packed(parameter, group, storage, number)
                else:
                    others.append(parameter)
            self._step_others(others, group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, the same for any number of processes.

        Packed state is returned as uint8 rows of whole blocks: a view of the optimizer's memory where possible, a
        DTensor for a DTensor. If the blocks do not end with rows of the parameter, it is one vector; that of a DTensor
        is gathered and packed anew, so all processes must call this.
        """
        found = super().state_dict()
        numbered = {
            number: (parameter, group)
            for saved, group in zip(found["param_groups"], self.param_groups, strict=True)
            for number, parameter in zip(saved["params"], group["params"], strict=True)
        }
        state = {
            number: {name: self._saved(name, value, *numbered[number]) for name, value in of.items()}
            for number, of in found["state"].items()
        }
        return {**found, "state": state}

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state that this process holds, as it lies; the same number of processes loads it as it is."""
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what :meth:`state_dict` or :meth:`local_state_dict` gave, or the twin's of torch, which is packed.

        State of a parameter that is a DTensor may be a DTensor that is spread in the same way, or a whole.

        Raises:
            UsageError: The state is of other encodings or of options that are not supported, or spread otherwise.
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

    def _has_moments(self, group: Group) -> bool:
        return True

    def _saved(self, name: str, value: Tensor, parameter: Tensor, group: Group) -> Tensor:
        if name not in self.moments.values():
            return value
        return saved_from(value, parameter, storage_of(group["encoding"]))

    def _step_packed(self, parameter: Tensor, group: Group, storage: Storage, number: int) -> None:
        state, own, first = self.state[parameter], local_of(parameter.detach()), first_of(parameter)
        if "step" not in state:
            state["step"] = torch.tensor(0.0, device="cpu")
            for name in self.moments.values():
                state[name] = storage.zeros(own.numel(), own.device, first)
        state["step"] += 1
        step = state["step"].item()
        values, gradient = own.contiguous().view(-1), local_gradient(parameter).contiguous().view(-1)
        # another seed of the noise for each number below 2**32 and step
        seed = noise.signed(noise.mixed((noise.mixed(group["seed"]) ^ number) + (int(step) << 32)))
        at = Place(seed, first, step)
        self._update(values, gradient, group, storage, state, at)
        if not own.is_contiguous():
            own.copy_(values.view(own.shape))
        increment_version(parameter)  # kernels write past autograd, which has to notice

    def _update(self, p: Tensor, g: Tensor, group: Group, storage: Storage, state: State, at: Place) -> None:
        raise NotImplementedError

    def _step_others(self, parameters: list[Tensor], group: Group) -> None:
        """Step parameters whose state is float32, by torch's own function."""
        raise NotImplementedError


class Place(NamedTuple):
    """Where and when a parameter is stepped.

    Attributes:
        seed: Of the noise.
        first: Index in the whole parameter of the first element that this process holds.
        step: Which step it is, from 1.
    """

    seed: int
    first: int
    step: float


def in_float32(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors as float32; tensors of half types are copied."""
    return [parameter.detach().float() for parameter in parameters]


def write_back(values: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Write the changed copies of :func:`in_float32` back to the tensors that they are copies of."""
    for value, parameter in zip(values, parameters, strict=True):
        if value.dtype != parameter.dtype:
            parameter.copy_(value)


def _spec_of(encoding: str | Encoding | None) -> str | None:
    spec = encoding.spec if isinstance(encoding, Encoding) else encoding
    if spec is not None:
        storage_of(spec)
    return spec


def _check(parameter: Tensor) -> None:
    if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UsageError(
            f"a parameter is {parameter.dtype}; packed optimizers compute in float32, for parameters that are float32, "
            "float16 or bfloat16"
        )
