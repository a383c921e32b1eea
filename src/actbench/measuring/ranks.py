"""The processes that measure one case together, one of each rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from actbench.device.patches import Patches
from actbench.measuring.gradients import Gradients
from actbench.measuring.meters import Meter
from actbench.measuring.processgroup import ALONE, ProcessGroup
from actbench.scheme.base import Scheme
from actbench.scheme.facets import Spread
from actbench.scheme.flat import flat_handles
from actbench.scheme.mesh import DATA

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

_COLLECTIVES: Final = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_THREAD: Final = "pt_gloo_runloop"
_TASKS: Final = Path("/proc/self/task")
_MOST_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 1e-4


class Ranks(ProcessGroup):
    """One of several processes that have joined torch's default process group."""

    are_real = True

    def __init__(self) -> None:
        self.size = distributed.get_world_size()

    def sync_allocations(self) -> AbstractContextManager[None]:
        """Return the context in which the memory of a step is read: see :func:`released_at_once`."""
        return released_at_once()

    def starts(self, mesh: DeviceMesh | None) -> Callable[[], object]:
        """Return a function that makes the ranks begin a step together."""
        if mesh is None or mesh.device_type != "cuda":
            return distributed.barrier
        one = torch.zeros(1, device="cuda")
        return lambda: distributed.all_reduce(one)  # the device waits for the others, the host does not

    def mean(self, gradients: Gradients | None, module: nn.Module, mesh: DeviceMesh | None) -> Gradients | None:
        """Return the mean over the ranks with batches of their own, by name, in host memory; see the base class."""
        missing = torch.tensor(0 if gradients is not None else 1)
        distributed.all_reduce(missing)
        if missing.item() or gradients is None:
            return None
        found: dict[str, Tensor] = {}
        for name, gradient in _named(gradients, module):
            total = gradient.detach().cpu().clone()
            if mesh is not None and DATA in (mesh.mesh_dim_names or ()):
                group = mesh.get_group(DATA)
                distributed.all_reduce(total, group=group)
                total /= group.size()
            found[name] = total
        return found

    def whole(self, gradients: Gradients | None, module: nn.Module) -> Gradients | None:
        """Return whole gradients by name, in host memory, where each rank may hold a part."""
        if gradients is None:
            return None
        if handles := flat_handles(module):
            flattened = _flattened(module, handles)
            return {name: self._joined(gradients.get(each), shape) for name, each, shape in flattened}
        return {
            name: (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()
            for name, gradient in _named(gradients, module)
        }

    def _joined(self, piece: Tensor | None, shape: torch.Size) -> Tensor:
        """Return a tensor of whose elements each rank has the next ones in order, or none."""
        pieces: list[Tensor | None] = [None] * self.size
        distributed.all_gather_object(pieces, None if piece is None else piece.cpu())
        return torch.cat([each.flatten() for each in pieces if each is not None]).view(shape)


def process_group_of(scheme: Scheme, meter: Meter) -> ProcessGroup:
    """Return the processes that measure a scheme here: those of the process group that this process belongs to.

    That is this process alone without a group, in a simulation, and if the scheme needs one process: the others of the
    group then need not take part.
    """
    together = meter.materialize and scheme.facet(Spread) is not None
    if together and distributed.is_initialized() and distributed.get_backend() != "fake":
        return Ranks()
    return ALONE


@contextmanager
def released_at_once() -> Iterator[None]:
    """Let torch's collectives inside the block be the last to hold what gloo's threads worked on.

    Such a thread holds the tensors of a collective, and the copies that gloo makes of them, a moment longer than the
    caller. Then they are freed in a thread that no profiler watches, and would count as alive for ever. Nothing is
    known of asynchronous collectives.
    """
    with Patches() as patches:
        for name in _COLLECTIVES:
            if hasattr(distributed, name):
                patches.set(distributed, name, _waiting(getattr(distributed, name)))
        functional = torch.ops._c10d_functional
        patches.set(functional, "wait_tensor", _waited(functional.wait_tensor))
        yield


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = collective(*args, async_op=True, **kwargs)
        if async_op or work is None:
            return work
        work.wait()
        _wait_for_threads()
        return None  # and here the work is given up, when only this thread has it

    return call


def _waited(wait: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what waits for the result of a functional collective, which it returns."""

    def call(result: Tensor) -> Tensor:
        result = wait(result)
        _wait_for_threads()
        return result

    return call


def _wait_for_threads() -> None:
    """Wait until all threads of gloo's have gone back to waiting for work; Linux says it of each thread."""
    deadline = time.monotonic() + _MOST_SECONDS
    while any(_state(task) == "R" for task in _TASKS.glob("*")) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def _state(task: Path) -> str:
    """Return the letter of what a thread of gloo's does; nothing for other threads, and for one that has ended."""
    try:
        _, _, rest = (task / "stat").read_text().partition(f"({_THREAD}")
    except OSError:
        return ""
    return rest.partition(")")[2].strip()[:1]


def _named(gradients: Gradients, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients by the names of their parameters, in an order that all ranks share."""
    for name, parameter in module.named_parameters():
        if parameter in gradients:
            yield name, gradients[parameter]


def _flattened(module: nn.Module, handles: Iterable[FlatParamHandle]) -> Iterator[tuple[str, nn.Parameter, torch.Size]]:
    """Yield name, parameter and whole shape of each trained parameter that FSDP1 has put into a flat one."""
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    shapes = {
        id(parameter): shape
        for handle in handles
        for parameter, shape in zip(handle.flat_param._params or (), handle.flat_param._shapes, strict=True)
    }
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield clean_tensor_name(name), parameter, shapes[id(parameter)]
