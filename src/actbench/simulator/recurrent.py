"""Recurrent layers as cuDNN runs them on a CUDA device: one operator for all layers, directions and steps in time.

torch asks cuDNN how many bytes it needs, and cuDNN documents no formula. The ones here are estimates. They give what
cuDNN said in 2017 of a GRU and an LSTM of four layers (864,000,000 and 736,000,000 bytes of reserve space, 13,169,920
and 17,730,560 of workspace: pytorch issue 2895): for each layer, direction, step and row the gates and the cell of an
LSTM, or twice the gates of a GRU, and the outputs of all layers but the last, whose output is the operator's. The
workspace holds the matrices, and for each layer, direction and row twice the gates, the states and one vector more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actbench.errors import UntraceableError
from actbench.simulator import packed
from actbench.simulator.profiles import DeviceProfile

aten = torch.ops.aten

FORWARD, BACKWARD = aten._cudnn_rnn, aten._cudnn_rnn_backward

# the numbers of cudnnRNNMode_t
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}
"""Vectors of the width of the hidden state that the reserve space holds for each layer, direction, step and row."""

_LSTM = _MODES["lstm"]


@dataclass(frozen=True)
class Recurrence:
    """What decides the bytes of a stack of recurrent layers.

    Attributes:
        mode: cuDNN's number of the kind of layer.
        layers: How many layers there are; each has a forward and, if ``directions`` is 2, a backward direction.
        steps: Steps in time.
        rows: Rows of the batch.
        hidden: Width of the hidden state.
        matrix_elements: Elements of all weights that are no biases.
        drops_out: Whether outputs between layers are dropped out, which keeps them twice.
        itemsize: Bytes of an element.
        positions: Elements of all sequences: steps times rows, but fewer of packed sequences of several lengths.
    """

    mode: int
    layers: int
    directions: int
    steps: int
    rows: int
    hidden: int
    matrix_elements: int
    drops_out: bool
    itemsize: int
    positions: int

    @property
    def reserve_bytes(self) -> int:
        """Bytes that wait for the backward pass, in addition to input, output, hidden states and weights.

        cuDNN is asked by the most steps and rows, so that shorter sequences of a packed batch need no less.
        """
        between = (self.layers - 1) * (2 if self.drops_out else 1)
        vectors = self.layers * _KEPT[self.mode] + between
        return vectors * self.directions * self.steps * self.rows * self.hidden * self.itemsize

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a pass needs while it runs."""
        states = 2 if self.mode == _LSTM else 1
        vectors = self.layers * self.directions * (2 * _GATES[self.mode] + states + 1)
        return (self.matrix_elements + vectors * self.rows * self.hidden) * self.itemsize


def composites() -> dict[str, Callable[..., Any]]:
    """Return what torch's composite operators of recurrent layers do on a CUDA device, by their names."""
    found: dict[str, Callable[..., Any]] = {}
    for name, mode in _MODES.items():
        found[f"{name}.input"] = _layers(name, mode)
        found[f"{name}.data"] = _packed_layers(name, mode)
    return {**found, **packed.composites()}


def fake_forms() -> dict[str, Callable[..., Any]]:
    """Return what cuDNN's operators return, without values, by their names."""
    return {"_cudnn_rnn": _forward, "_cudnn_rnn_backward": _backward}


def forward_bytes(profile: DeviceProfile, args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``_cudnn_rnn``: the workspace, and a copy of an input in another order."""
    return _workspace(profile, _recurrence(args)) + _copied(args[0], batch_first=args[10])


def backward_bytes(profile: DeviceProfile, args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``_cudnn_rnn_backward``: of the input's gradient, then of the weights'."""
    x, batch_first, wanted = args[0], args[14], args[21]
    hx, cx, output, of_output, of_hy, of_cy = args[4:10]
    # _cudnn_rnn_backward of aten/src/ATen/native/cudnn/RNN.cpp makes undefined gradients zeros
    zeros = [of for of, given in ((output, of_output), (hx, of_hy), (cx, of_cy)) if given is None and of is not None]
    always = _workspace(profile, _recurrence(_of_forward(args))) + _copied(x, batch_first=batch_first)
    copied = 0 if of_output is None else _copied(of_output, batch_first=batch_first)
    # the copy goes before the weights' gradients come (_cudnn_rnn_backward_input, then _weight of RNN.cpp)
    made_later = sum(map(_bytes, args[1])) if wanted[3] else 0
    return sum(map(_bytes, zeros)) + always + max(copied - made_later, 0)


def flops(func: Any, args: tuple[Any, ...]) -> int:
    """Return the operations of the products of matrices; a backward pass has two for each of a forward pass."""
    found = _recurrence(_of_forward(args) if func._overloadpacket is BACKWARD else args)
    return 2 * found.matrix_elements * found.positions * (2 if func._overloadpacket is BACKWARD else 1)


def kernels(func: Any, args: tuple[Any, ...]) -> int:
    """Return how many kernels run one after the other: a product and the gates, for each layer, direction and step."""
    found = _recurrence(_of_forward(args) if func._overloadpacket is BACKWARD else args)
    return 2 * found.layers * found.directions * found.steps


def _layers(name: str, mode: int) -> Callable[..., Any]:
    def run(
        x: Tensor,
        hidden: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        batch_sizes: Sequence[int] = (),
    ) -> tuple[Tensor, ...]:
        hx, cx = (hidden, None) if isinstance(hidden, Tensor) else hidden
        x, hx, cx, *weights = _cast([x, hx, cx, *weights])
        _check(name, x, hx, cx)
        flat = weights[0].detach()  # torch keeps all weights in one tensor, and this stands for it
        shape = (mode, hx.shape[2], 0, layers, batch_first)
        options: tuple[Any, ...] = (*shape, dropout, train, bidirectional, [*batch_sizes], None)
        # the weights of a layer and direction: two matrices, and with biases two vectors
        outputs = FORWARD.default(x, weights, 4 if has_biases else 2, flat, hx, cx, *options)
        return tuple(outputs[: 2 if cx is None else 3])

    return run


def _packed_layers(name: str, mode: int) -> Callable[..., Any]:
    run = _layers(name, mode)

    def run_packed(x: Tensor, batch_sizes: Tensor, *options: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = run(x, *options, False, packed.numbers(batch_sizes))
        return found

    return run_packed


def _cast(tensors: list[Any]) -> list[Any]:
    """Return tensors in the type of autocast, as copies; weights are cast anew in each pass."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return [each.to(dtype) if each is not None and each.dtype == torch.float32 else each for each in tensors]


def _check(name: str, x: Tensor, hx: Tensor, cx: Tensor | None) -> None:
    if cx is not None and cx.shape[2] != hx.shape[2]:
        raise UntraceableError(
            f"{name}: what cuDNN keeps of projections (proj_size) is not known; measure it with --meter cuda"
        )
    if x.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cuda"):
        raise UntraceableError(
            f"{name}: cuDNN does not take bfloat16 from torch, which then runs step by step; take float32, float16 or "
            "--autocast, or measure it with --meter cuda"
        )


def _of_forward(args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of ``_cudnn_rnn`` among those of its gradient."""
    # by the schemas: between them are the outputs and their gradients
    return (*args[:6], *args[10:20])


def _recurrence(args: Sequence[Any]) -> Recurrence:
    """Return what decides the bytes, from the arguments of ``_cudnn_rnn``."""
    x, weights, _, _, _, _, mode, hidden, _, layers, batch_first, dropout, train, bidirectional, sizes = args[:15]
    # cuDNN pads packed sequences: it is asked for as many steps and rows as the longest and the first have
    if sizes:
        steps, rows, positions = len(sizes), sizes[0], sum(sizes)
    else:
        rows, steps = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
        positions = rows * steps
    matrices = sum(each.numel() for each in weights if each.dim() > 1)
    directions, drops_out = 2 if bidirectional else 1, bool(dropout and train)
    return Recurrence(
        mode, layers, directions, steps, rows, hidden, matrices, drops_out, x.element_size(), positions=positions
    )


def _workspace(profile: DeviceProfile, recurrence: Recurrence) -> int:
    return recurrence.workspace_bytes if profile.workspaces else 0


def _copied(tensor: Tensor, *, batch_first: bool) -> int:
    in_time = tensor.transpose(0, 1) if batch_first else tensor
    return 0 if in_time.is_contiguous() else _bytes(tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _forward(*args: Any) -> tuple[Tensor, ...]:
    x, _, _, flat, hx, cx = args[:6]
    batch_first, train = args[10], args[12]
    found = _recurrence(args)
    width = found.directions * found.hidden
    output = x.new_empty((found.positions, width) if args[14] else (found.steps, found.rows, width))
    cy = hx.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    reserve = x.new_empty(found.reserve_bytes if train else 0, dtype=torch.uint8)
    return output.transpose(0, 1) if batch_first else output, hx.new_empty(hx.shape), cy, reserve, flat


def _backward(*args: Any) -> tuple[Any, ...]:
    if not args[16]:
        raise UntraceableError(
            "a recurrent layer in eval mode has no backward pass in cuDNN: call .train() on it, or run it under "
            "torch.no_grad()"
        )
    x, weights, hx, cx, batch_first, wanted = args[0], args[1], args[4], args[5], args[14], args[21]
    in_time = x.transpose(0, 1) if batch_first else x
    dx = x.new_empty(in_time.shape)
    dcx = None if cx is None else cx.new_empty(cx.shape)
    flat = x.new_empty(sum(each.numel() for each in weights) if wanted[3] else 0)
    parts = flat.split([each.numel() for each in weights]) if wanted[3] else ()
    of_weights = [part.view(each.shape) for part, each in zip(parts, weights, strict=False)]
    return dx.transpose(0, 1) if batch_first else dx, hx.new_empty(hx.shape), dcx, of_weights
