"""Which tensors are on the simulated card, and which in host memory.

Tensors on the card are fake CUDA tensors. Large tensors in host memory are fake CPU tensors, and others are real.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor

from actbench.device.streams import checked
from actbench.errors import MeasurementError

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
    """Return whether a device, in any form that torch takes, is the card; a bare index names a CUDA device.

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


def is_wrapper_subclass(tensor: Any) -> bool:
    """Return whether a value is a tensor without memory of its own, such as a quantized one or a DTensor."""
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor)
