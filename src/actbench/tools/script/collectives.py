"""Collectives of a fake process group, where they matter to a script: objects, and values that are known.

The other processes have what this one has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator import known


class _Done:
    """The work of a collective that is done; stands in for ``Work``, which has no results in a fake group."""

    def __init__(self, work: Any, results: list[Tensor]) -> None:
        self._work, self._results = work, results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that has the results."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def result(self) -> list[Tensor]:
        """Return the results."""
        return self._results


def _adding_up(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let an all-reduce that adds up add values that are known as often as there are processes."""

    def all_reduce(
        tensor: Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        work = own(tensor, op=op, group=group, async_op=async_op)
        value = known.value_of(tensor)
        size = distributed.get_world_size(group)
        if value is not None and op == distributed.ReduceOp.SUM and size > 1:  # -1 where this process is no member
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                value.mul_(size)
        return None if work is None else _Done(work, [tensor])

    return functools.wraps(own)(all_reduce)


def _writing(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let a collective that writes tensors, its first argument, forget their values, or write those of its second."""
    named = tuple(inspect.signature(own).parameters)

    def collective(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        given = dict(zip(named, args, strict=False)) | kwargs
        outputs, source = given[named[0]], known.value_of(given[named[1]])
        for output in [outputs] if isinstance(outputs, Tensor) else outputs:
            value = known.value_of(output)
            if value is None or not isinstance(output, FakeTensor):
                continue
            if source is None or value.numel() % source.numel() or "gather" not in own.__name__:
                known.forget(output)
                continue
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                value.view(-1, source.numel()).copy_(source.reshape(1, -1))
        return result

    return functools.wraps(own)(collective)


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def _scatter_object_list(scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, *_: Any) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _nothing(*_: Any, **__: Any) -> None: ...


def _instead(function: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda own: functools.wraps(own)(function)


CHANGES: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "all_gather": _writing,
    "all_gather_into_tensor": _writing,
    "all_reduce": _adding_up,
    "all_gather_object": _instead(_all_gather_object),
    "broadcast_object_list": _instead(_nothing),
    "gather_object": _instead(_gather_object),
    "monitored_barrier": _instead(_nothing),
    "reduce_scatter": _writing,
    "reduce_scatter_tensor": _writing,
    "scatter_object_list": _instead(_scatter_object_list),
}
"""For functions of ``torch.distributed``, by name, what makes from each the one for a fake group."""
