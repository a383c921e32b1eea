"""Collectives of a fake process group, where they matter to a script: objects, and values that are known.

The other processes have what this one has. What only another process knows, and this one waits for, is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp, distributed_c10d

from actbench.device.works import Work, Works
from actbench.errors import MeasurementError
from actbench.simulator import known

Named = dict[str, Any]
"""The arguments of a collective, by name, those that it was not given too."""

Fill = Callable[[Named], object]
"""Writes into the tensors of a collective, as far as values are known, what all processes would have written there."""

_REFUSED = (
    "torch.distributed.{} is not simulated: {}; run the script with --meter cuda, or leave the call out where one "
    "process is simulated"
)


Change = Callable[[Callable[..., Any], Works], Callable[..., Any]]
"""Makes from a function of ``torch.distributed`` the one for a fake group, whose works are held."""


def _writing(output: str, fill: Fill) -> Change:
    """Return the change of a collective that writes the tensors of its argument ``output``."""

    def change(own: Callable[..., Any], works: Works) -> Callable[..., Any]:
        signature = inspect.signature(own)

        def collective(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            held = [*(each for each in _flat(list(given.values())) if each.is_cuda), *_stacked(given)]
            result = own(*args, **kwargs)
            with torch.no_grad():
                fill(given)
            if isinstance(result, distributed.Work) and not isinstance(result, distributed_c10d._IllegalWork):
                return Work(result, list(_flat(given[output])), works.begin(held))
            works.free()
            return result

        return functools.wraps(own)(collective)

    return change


def _stacked(given: Named) -> list[Tensor]:
    """Make the tensor in which NCCL gathers into a list of tensors of one shape, or scatters from one.

    Of several shapes each has its own transfer, without such a tensor.
    """
    for name in ("tensor_list", "input_list"):
        parts = given.get(name) or ()
        if parts and all(each.is_cuda and each.shape == parts[0].shape for each in parts):
            return [parts[0].new_empty((len(parts), *parts[0].shape), requires_grad=False)]
    return []


def _flat(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for each in tensors:
            yield from _flat(each)


def _write(output: Tensor, value: Tensor | None) -> None:
    """Write values into a tensor whose own are known; unknown ones (None) make it forget those of a fake tensor."""
    own = known.value_of(output)
    if own is None or not own.numel():
        return
    if value is None:
        known.forget(output)
        return
    with torch._C._DisableTorchDispatch():
        own.copy_(value.reshape(1, -1).expand(own.numel() // value.numel(), -1).reshape(own.shape))


def _reduced(value: Tensor, op: Any, processes: int) -> Tensor | None:
    """Return the values that processes with the same values reduce to; None for an operation that is not known."""
    with torch._C._DisableTorchDispatch():
        if op == ReduceOp.SUM:
            return value * processes
        if op == ReduceOp.PRODUCT:
            return value**processes
        if op == ReduceOp.BXOR:
            return value * (processes % 2)
    same = (ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR)
    return value if any(op == each for each in same) else None


def _reduce(tensors: str) -> Fill:
    def fill(given: Named) -> None:
        processes = distributed.get_world_size(given["group"])
        if processes < 1:  # -1 where this process is not a member
            return
        for tensor in _flat(given[tensors]):
            value = known.value_of(tensor)
            if value is not None:
                _write(tensor, _reduced(value, given["op"], processes))

    return fill


def _reduce_at(given: Named) -> None:
    if _is_here(given, "dst"):
        _reduce("tensor")(given)


def _gather(output: str, source: str) -> Fill:
    """Each output, or each part of it, gets the source; of several sources each its own."""

    def fill(given: Named) -> None:
        source_values = [known.value_of(each) for each in _flat(given[source])]
        for place, tensor in enumerate(_flat(given[output])):
            value = source_values[place % len(source_values)]
            fits = value is not None and value.numel() and not tensor.numel() % value.numel()
            _write(tensor, value if fits else None)

    return fill


def _scatter(given: Named) -> None:
    parts = given["scatter_list"] if _is_here(given, "src") else None
    _write(given["tensor"], known.value_of(parts[0]) if parts else None)


def _exchange(given: Named) -> None:
    """The first part is for the first process, which this one is: so each of the others sends its first, too."""
    inputs, outputs = given.get("input_tensor_list"), given.get("output_tensor_list")
    if inputs is not None:
        for tensor in outputs or ():
            first = known.value_of(inputs[0])
            _write(tensor, first if first is not None and first.shape == tensor.shape else None)
        return
    value, sizes = known.value_of(given["input"]), given["input_split_sizes"] or given["output_split_sizes"]
    if value is None or (sizes and len(set(sizes)) > 1):
        _write(given["output"], None)
        return
    with torch._C._DisableTorchDispatch():
        first = value.reshape(-1)[: value.numel() // max(1, distributed.get_world_size(given["group"]))].clone()
    _write(given["output"], first)


def _forget(output: str) -> Fill:
    def fill(given: Named) -> None:
        for tensor in _flat(given[output]):
            known.forget(tensor)

    return fill


def _is_here(given: Named, role: str) -> bool:
    """Return whether the process that a collective names as ``src`` or ``dst`` is this one, the first."""
    return not (given[role] or given.get(f"group_{role}"))


def _receive(own: Callable[..., Any], _: Works) -> Callable[..., Any]:
    """Let what comes from any process come from the last one; a fake group names none."""
    signature = inspect.signature(own)

    def recv(*args: Any, **kwargs: Any) -> int:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        named = given.arguments
        if named["src"] is None and named.get("group_src") is None:
            named["src"] = distributed.get_world_size(named["group"]) - 1
        source: int = own(*given.args, **given.kwargs)
        _forget("tensor")(named)
        return source

    return functools.wraps(own)(recv)


def _all_gather_object(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: Sequence[Any] | None = None, *_: Any, **__: Any
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _gather_single(tensor: Tensor, gather_tensor: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Gather into parts of a tensor: a fake group cannot gather into one."""
    parts = None if gather_tensor is None else list(gather_tensor.view(-1, *tensor.shape))
    return distributed.gather(tensor, parts, *args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None: ...


def _instead(function: Callable[..., Any]) -> Change:
    return lambda own, works: functools.wraps(own)(function)


def refused(name: str, why: str) -> Change:
    """Return the change of a function of ``torch.distributed`` that raises a MeasurementError."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise MeasurementError(_REFUSED.format(name, why))

    return lambda own, works: functools.wraps(own)(refuse)


CHANGES: Final[Mapping[str, Change]] = {
    "all_gather": _writing("tensor_list", _gather("tensor_list", "tensor")),
    "all_gather_coalesced": _writing("output_tensor_lists", _gather("output_tensor_lists", "input_tensor_list")),
    "all_gather_into_tensor": _writing("output_tensor", _gather("output_tensor", "input_tensor")),
    "all_gather_object": _instead(_all_gather_object),
    "all_gather_single": _writing("output_tensor", _gather("output_tensor", "input_tensor")),
    "all_reduce": _writing("tensor", _reduce("tensor")),
    "all_reduce_coalesced": _writing("tensors", _reduce("tensors")),
    "all_to_all": _writing("output_tensor_list", _exchange),
    "all_to_all_single": _writing("output", _exchange),
    "broadcast": _writing("tensor", _nothing),  # all have what this process has
    "broadcast_object_list": _instead(_nothing),
    "gather": _writing("gather_list", _gather("gather_list", "tensor")),
    "gather_object": _instead(_gather_object),
    "gather_single": _instead(_gather_single),
    "irecv": _writing("tensor", _forget("tensor")),
    "monitored_barrier": _instead(_nothing),
    "recv": _receive,
    "recv_object_list": refused("recv_object_list", "what another process sends is known to that one only"),
    "reduce": _writing("tensor", _reduce_at),
    "reduce_scatter": _writing("output", _forget("output")),
    "reduce_scatter_single": _writing("output", _forget("output")),
    "reduce_scatter_tensor": _writing("output", _forget("output")),
    "scatter": _writing("tensor", _scatter),
    "scatter_object_list": _instead(_scatter_object_list),
    "send_object_list": _instead(_nothing),
    "shrink_group": refused("shrink_group", "all processes of a simulated group stay"),
}
"""The changes of functions of ``torch.distributed``, by name."""
