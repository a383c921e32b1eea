"""An MLP that runs a piece of the sequence at a time, in the forward and in the backward pass (arXiv 2506.13996)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from actbench.errors import ConversionError
from actbench.methods.checkpointing.firsttensors import FirstTensors
from actbench.methods.tiled.positionwise import in_place_of
from actbench.packing import samplegradients, savedtensors
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.packer import own_tensors
from actbench.packing.precision import cast, wide
from actbench.packing.refusals import first_order, refuse_compiling, refuse_sharded

UNCOMPILABLE = ("an MLP that runs in pieces", "its pieces run again in a backward pass of its own")
"""What cannot be compiled, and why."""

_ALONG = -2
"""The dimension that is cut: positions of the last dimension but one; rows, if there are two dimensions."""


class TiledForward(ReboundForward):
    """A forward that runs in pieces along the sequence and saves only its input; plain outside of training.

    Args:
        module: The MLP: one tensor (..., positions, width) to one of the same shape, each position by itself.
        pieces: How many pieces the positions are cut into; fewer if there are fewer positions.
    """

    recomputes = True
    uncompilable = UNCOMPILABLE

    def __init__(self, module: nn.Module, pieces: int) -> None:
        super().__init__(module)
        self.pieces = pieces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result, (..., positions, width)."""
        module = self.module
        given = [*args, *kwargs.values()]
        is_one = len(given) == 1 and isinstance(given[0], Tensor) and given[0].dim() > 1 and given[0].shape[_ALONG] > 1
        # Without gradients too: re-entrant checkpointing then makes the first run, which must draw the same masks.
        if not (module.training and is_one):
            return self.inner(module, *args, **kwargs)
        refuse_compiling(*self.uncompilable)
        _refuse_hidden(module)
        savedtensors.acted(TiledForward)
        x = given[0]
        trained = [tensor for tensor in dict.fromkeys(own_tensors(module)) if tensor.requires_grad]
        run = _Run(self, module, x, trained)
        if not (torch.is_grad_enabled() and (trained or x.requires_grad)):
            with torch.no_grad():
                return run.first(x)
        savedtensors.left(x, "goes into an MLP that runs in pieces")
        # The input may have no graph while the parameters have one.
        kept = _Kept.apply(x, torch.empty(0, requires_grad=True))
        # trained tensors are arguments, so that autograd takes their gradients from this node
        return _Pieces.apply(kept, run, x.requires_grad, *trained)


class _Kept(torch.autograd.Function):
    """Saves the input before the MLP runs.

    A checkpoint around the MLP stops its second run once the last tensor is saved: so it does not run the MLP, which
    its backward pass does anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, with_graph: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        # a gradient that is None stays so, where zeros would be as large as the input
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient, None


class _Pieces(torch.autograd.Function):
    """The MLP, which saves nothing: it reads the input from the node of :class:`_Kept` before it."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, run: _Run, needs_x: bool, *trained: Tensor) -> Tensor:
        # the node of a Python function is its ctx, so that saved_tensors are unpacked by the hooks that packed them
        ctx.run, ctx.source, ctx.needs_x = run, kept.grad_fn, needs_x
        return run.first(kept)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.source.saved_tensors
        to_x, to_trained = ctx.run.again(x, gradient, ctx.needs_x)
        return to_x, None, None, *to_trained


class _Run:
    """One call of the MLP: the conditions of its first run, for the second.

    Both runs are given twins of the trained tensors. So autocast, which keeps the cast copy of a parameter, keeps none
    that was made without a graph; and hooks of parameters see the sum of the gradients of the pieces, once.
    """

    def __init__(self, bound: TiledForward, module: nn.Module, x: Tensor, trained: Sequence[Tensor]) -> None:
        self._bound, self._module, self._trained = bound, module, trained
        self._tensors = FirstTensors(module)
        kinds = [kind for kind in dict.fromkeys(("cpu", x.device.type)) if torch.amp.is_autocast_available(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._cpu_state = torch.get_rng_state()
        started = getattr(getattr(torch, x.device.type, None), "_initialized", False)  # a simulated one never is
        self._device = x.device.type
        self._devices, self._states = get_device_states(x) if started else ([], [])
        self._samples = samplegradients.current() if x.dim() > 2 else None  # else pieces have other rows

    def first(self, x: Tensor) -> Tensor:
        """Return the result, beneath autograd."""
        result: Tensor | None = None
        with in_place_of(self._module, self._twins()):
            for start, length in self._cuts(x):
                found = self._bound.inner(self._module, _cut(x, start, length))
                if result is None:
                    result = found.new_empty(*x.shape[:-1], found.shape[-1])
                # torch.cat would hold all pieces beside the whole
                result.narrow(_ALONG, start, length).copy_(found)
                del found  # else it exists beside the next piece
        assert result is not None
        return result

    def again(self, x: Tensor, gradient: Tensor, needs_x: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of x and of the trained tensors, which are summed over pieces in float32 at least."""
        twins = self._twins()
        to_x = torch.empty_like(x) if needs_x else None
        sums: list[Tensor | None] = [None] * len(twins)
        with self._as_first(), in_place_of(self._module, twins):
            for start, length in self._cuts(x):
                piece = _cut(x.detach(), start, length).requires_grad_(needs_x)
                asked = [*([piece] if needs_x else []), *twins.values()]
                found = self._slopes(piece, _cut(gradient, start, length), asked)
                if to_x is not None:
                    to_x.narrow(_ALONG, start, length).copy_(found.pop(0))
                _add(sums, found)
                del found
        for index, tensor in enumerate(self._trained):
            sums[index] = cast(sums[index], tensor.dtype)
        return to_x, sums

    def _slopes(self, piece: Tensor, gradient: Tensor, asked: list[Tensor]) -> list[Any]:
        with torch.enable_grad():
            found = self._bound.inner(self._module, piece)
        return list(torch.autograd.grad(found, asked, gradient, allow_unused=True))

    def _twins(self) -> dict[Tensor, Tensor]:
        return {tensor: _twin(tensor) for tensor in self._trained}

    def _cuts(self, x: Tensor) -> Iterator[tuple[int, int]]:
        """Yield start and length of each piece."""
        size = x.shape[_ALONG]
        longest = -(-size // self._bound.pieces)
        return ((start, min(longest, size - start)) for start in range(0, size, longest))

    @contextmanager
    def _as_first(self) -> Iterator[None]:
        """Give the module its parameters, its types and its random numbers of the first run."""
        with ExitStack() as stack:
            stack.enter_context(self._tensors.given())
            stack.enter_context(samplegradients.as_of(self._samples))
            # entered before states are set: it puts back those of the backward pass, which draws on from there
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._device))
            torch.set_rng_state(self._cpu_state)
            set_device_states(self._devices, self._states, device_type=self._device)
            # also where it was off: a backward pass has the autocast of its caller
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield


def _cut(x: Tensor, start: int, length: int) -> Tensor:
    """Return a piece, contiguous as what a module takes views of: a copy, if there are several rows."""
    return x.narrow(_ALONG, start, length).contiguous()


def _twin(tensor: Tensor) -> Tensor:
    """Return a leaf of the same memory."""
    twin = tensor.detach()
    return nn.Parameter(twin) if isinstance(tensor, nn.Parameter) else twin.requires_grad_()


def _add(sums: list[Tensor | None], found: list[Tensor | None]) -> None:
    """Add the gradients of a piece, and forget each at once."""
    for index, tensor in enumerate(found):
        if tensor is not None:
            total = sums[index]
            # zeros, not the first gradient itself, which may be a part of the gradient of the result
            total = torch.zeros_like(tensor, dtype=wide(tensor.dtype)) if total is None else total
            sums[index] = total.add_(tensor)
        found[index] = None


def _refuse_hidden(module: nn.Module) -> None:
    """Raise a ConversionError where FSDP gathers parameters inside the MLP, or hides them: their gradient were lost."""
    for child in module.children():
        refuse_sharded(child, *_SHARDED)
    for part in module.modules():
        if any(isinstance(value, Tensor) and value.requires_grad for value in vars(part).values()):
            raise ConversionError(f"FSDP1 does not go with {_SHARDED[0]}: it hides parameters of the MLP; take FSDP2")


_SHARDED = ("tiled_mlp", "layers inside an MLP are sharded by themselves; shard the MLP, or the block around it")
