"""Which tensors are on the simulated card, and which in host memory.

Tensors on the card are fake CUDA tensors. Large tensors in host memory are fake CPU tensors, and others are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.errors import MeasurementError
from actbench.simulator.operators import composite
from actbench.simulator.recalled import tensors_of
from actbench.simulator.tracker import StorageTracker
from actbench.tools.script.streams import checked

_OTHER_CARD = (
    "tensors are put on cuda:{0}, a card of another process: a run simulates the first process, which has cuda:0, and "
    "cuda:1 to cuda:{1} are those of the others; take the card from the environment variable LOCAL_RANK, or run "
    "a script that puts its layers on several cards with --meter cuda"
)


def address(storage: UntypedStorage) -> int:
    """Return a number of a storage without memory that no other has while it lives; 0 of an empty one."""
    return storage._cdata if storage.nbytes() else 0


def is_on_card(tensor: Any) -> bool:
    """Return whether a value is a tensor on the card."""
    return isinstance(tensor, Tensor) and tensor.device.type == "cuda"


def is_card(device: Any) -> bool:
    """Return whether a device, in any of the forms that torch takes, is the card; a number is one of its kind.

    Raises:
        torch.AcceleratorError: It is a card that is not there.
        MeasurementError: It is the card of another process.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        device = torch.device("cuda", device)
    found = torch.device(device) if isinstance(device, str) else device
    if not isinstance(found, torch.device) or found.type != "cuda":
        return False
    index = torch.cuda.current_device() if found.index is None else found.index
    if checked(index):
        raise MeasurementError(_OTHER_CARD.format(index, torch.cuda.device_count() - 1))
    return True


def is_made_of_others(tensor: Any) -> bool:
    """Return whether a value is a tensor without memory of its own, such as a quantized one or a DTensor."""
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor)


class PlacedTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Counts the bytes on the card: what an operator makes is where its arguments are, else in host memory.

    On a CPU it counts what torch's allocator makes, as a trace of it does: not the memory of numpy and of files, which
    torch cannot resize.
    """

    supports_higher_order_operators = True
    real_form: Callable[[Any], Callable[..., Any] | None] = staticmethod(lambda func: None)
    """Tells the real form of a custom operator, which is run on the card in its place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its result; in inference mode, those that it is composed of.

        An operator on functions, such as ``flex_attention``, is composed of others where nothing is compiled.
        """
        if isinstance(func, HigherOrderOperator):
            with self:
                return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **(kwargs or {}))
        form = self.real_form(func)
        if form is not None and any(map(is_on_card, tensors_of((args, kwargs)))):
            with self:
                return form(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            kernel = composite(func) or func.decompose
            with self:
                made = kernel(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, tensors: Iterable[Tensor], func: Any = None) -> None:
        """Count the storages of tensors that ``func`` made (None: older ones), or that have moved."""
        counted = tensors if self.host_is_free else [each for each in tensors if _is_torchs(each)]
        super().add(counted, func)

    def runs_on_host(self, args: Any, kwargs: Any, found: Sequence[Tensor]) -> bool:
        """Return whether an operator makes ``found``, its results, in host memory."""
        return self.host_is_free and not any(map(is_on_card, found or tensors_of((args, kwargs))))


class Loading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a tracker see operators outside of a fake tensor mode."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator by way of the tracker."""
        return self._tracker.__torch_dispatch__(func, types, args, kwargs)


class CheckedTracker(PlacedTracker):  # type: ignore[no-untyped-call]
    """A tracker that can raise where memory runs out."""

    check: Callable[[], object] = staticmethod(lambda: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.check()
        return result


def _is_torchs(tensor: Tensor) -> bool:
    """Return whether torch's allocator made the memory of a tensor, or would have."""
    if tensor.layout is not torch.strided:  # it has no storage, and is refused where it is counted
        return True
    return is_made_of_others(tensor) or tensor.untyped_storage().resizable()
