from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from actbench.measuring.inspection import itemize, trace
from actbench.model.ledger import OUTSIDE, Ledger, SavedTensor
from actbench.packing import savedtensors
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import profiles
from actbench.simulator.card import simulated

ROWS, WIDTH, HIDDEN, CLASSES = 10, 64, 256, 5
FLOAT = 4


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batch() -> Batch:
    return {"x": torch.zeros(ROWS, WIDTH), "y": torch.zeros(ROWS, dtype=torch.long)}


def listed(*layers: nn.Module) -> Ledger:
    """List what a model with a head keeps, and see that it is what the trace sees."""
    setup = TrainingSetup(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), loss=cross_entropy)
    ledger = itemize(setup, make_batch)
    assert ledger.total_bytes == trace(setup, make_batch).total_bytes
    return ledger


def of(ledger: Ledger, module: str) -> list[SavedTensor]:
    return [entry for entry in ledger.entries if entry.module == module]


def test_arguments_of_native_operators_stand_under_their_module_in_the_order_of_the_run():
    ledger = listed(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    assert list(dict.fromkeys(entry.module for entry in ledger.entries)) == ["0", "1", "2", OUTSIDE]
    norm = {entry.argument: entry for entry in of(ledger, "1")}
    assert {entry.operator for entry in norm.values()} == {"NativeLayerNormBackward0"}
    assert norm["input"] == SavedTensor(
        module="1",
        operator="NativeLayerNormBackward0",
        argument="input",
        shape=(ROWS, WIDTH),
        dtype="float32",
        bits=32,
        kept_bytes=ROWS * WIDTH * FLOAT,
    )
    assert norm["result1"].shape == (ROWS, 1)
    assert (norm["weight"].kept_bytes, norm["weight"].reason) == (0, "parameter")


def test_batch_buffers_and_constants_are_not_counted_and_say_what_they_are():
    constant = torch.ones(WIDTH)

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * constant * 3.0

    ledger = listed(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Scaled())

    assert [(entry.argument, entry.reason) for entry in of(ledger, "0")] == [("mat1", "batch")]
    reasons = {entry.argument: entry.reason for entry in of(ledger, "1")}
    assert reasons["running_mean"] == "buffer"
    [factor] = of(ledger, "2")  # and no entry for the number 3.0
    assert (factor.reason, factor.kept_bytes) == ("made before the step", 0)


def test_a_shared_storage_is_counted_once_and_names_the_other_holders():
    ledger = listed(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    [tanh], head = of(ledger, "1"), of(ledger, "2")[0]

    assert tanh.kept_bytes == ROWS * WIDTH * FLOAT
    assert tanh.shared_with == ("2 AddmmBackward0 mat1",)
    assert (head.kept_bytes, head.shared_with) == (0, ("1 TanhBackward0 result",))


def test_the_loss_itself_and_what_a_function_keeps_as_an_attribute_are_listed_too():
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.aside = x * 2
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Doubling.apply(x)

    ledger = listed(nn.Linear(WIDTH, WIDTH), Layer())

    assert [(e.operator, e.kept_bytes, e.reason) for e in of(ledger, "1")] == [
        ("aten.mul.Tensor", ROWS * WIDTH * FLOAT, "held outside of autograd's graph")
    ]
    assert (ledger.entries[-1].reason, ledger.entries[-1].kept_bytes) == ("the loss itself", FLOAT)


class Packing(torch.autograd.Function):
    """Keeps codes of 4 bits and one offset a row in place of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        codes, offsets = x.new_empty(x.numel() // 2, dtype=torch.uint8), x.new_empty(len(x))
        savedtensors.packed(x, codes, offsets)
        ctx.save_for_backward(codes, None, offsets)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Packed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Packing.apply(x)


def test_parts_of_a_packed_tensor_are_one_entry_with_its_shape_and_the_bits_really_kept():
    [entry] = of(listed(nn.Linear(WIDTH, WIDTH), Packed()), "1")

    kept = ROWS * WIDTH // 2 + ROWS * FLOAT
    assert entry == SavedTensor(
        module="1",
        operator="PackingBackward",
        argument="saved_tensors[0], saved_tensors[2]",
        shape=(ROWS, WIDTH),
        dtype="float32",
        bits=8 * kept / (ROWS * WIDTH),
        kept_bytes=kept,
        packed=True,
    )


def never(packed: Any) -> Tensor:
    raise AssertionError("listing must not unpack")


class Hooked(nn.Module):
    """A GELU whose saved tensors are replaced by what ``pack`` makes of them."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, never):
            return F.gelu(x)


class Box:
    def __init__(self, *parts: Tensor) -> None:
        self.parts = {"all": list(parts)}


def half(tensor: Tensor) -> Box:
    kept = tensor.half()
    savedtensors.packed(tensor, kept)
    return Box(kept)


def test_what_hooks_packed_is_seen_without_unpacking_it():
    [entry] = of(listed(nn.Linear(WIDTH, WIDTH), Hooked(half)), "1")

    assert (entry.operator, entry.argument) == ("GeluBackward0", "self")
    assert (entry.shape, entry.dtype, entry.bits, entry.packed) == ((ROWS, WIDTH), "float32", 16, True)
    assert entry.kept_bytes == ROWS * WIDTH * 2


def test_what_hooks_leave_alone_says_why():
    def leave(tensor: Tensor) -> Box:
        savedtensors.left(tensor, "too small to gain")
        return Box(tensor)

    [entry] = of(listed(nn.Linear(WIDTH, WIDTH), Hooked(leave)), "1")

    assert (entry.packed, entry.reason) == (False, "too small to gain")
    assert entry.kept_bytes == ROWS * WIDTH * FLOAT


def leave_all(tensor: Tensor) -> Box:
    savedtensors.left(tensor, f"{tensor.dtype} is not for these hooks")
    return Box(tensor)


class Around(nn.Sequential):
    """Layers whose saved tensors are left as they are by hooks around them, which say why."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(leave_all, never):
            return super().forward(x)


def test_what_is_packed_is_not_said_to_be_left_by_hooks_around_what_packed_it():
    [entry] = of(listed(nn.Linear(WIDTH, WIDTH), Around(Packed())), "1.0")

    assert (entry.packed, entry.reason) == (True, None)
    assert entry.kept_bytes == ROWS * WIDTH // 2 + ROWS * FLOAT


def test_the_first_who_leaves_a_tensor_knows_why():
    class Twice(nn.Module):
        """An output that its own node keeps, and then another one whose hooks have another word for it."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(leave_all, never):
                x = torch.tanh(x)

            def again(tensor: Tensor) -> Box:
                savedtensors.left(tensor, "another reason")
                return Box(tensor)

            with torch.autograd.graph.saved_tensors_hooks(again, never):
                return x * x

    tanh, *_ = of(listed(nn.Linear(WIDTH, WIDTH), Twice()), "1")

    assert tanh.operator == "TanhBackward0"
    assert (tanh.kept_bytes, tanh.reason) == (ROWS * WIDTH * FLOAT, "torch.float32 is not for these hooks")


def test_what_is_in_host_memory_is_listed_and_not_counted():
    def move(tensor: Tensor) -> Tensor:
        return tensor.cpu()

    with simulated(profiles.get("t4")):
        [entry] = of(listed(nn.Linear(WIDTH, WIDTH), Hooked(move)), "1")

    assert (entry.kept_bytes, entry.reason) == (0, "in host memory")


def test_recomputed_tensors_are_a_number():
    class Recomputed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    ledger = listed(nn.Linear(WIDTH, WIDTH), Recomputed(nn.Linear(WIDTH, WIDTH), nn.GELU()))

    assert ledger.recomputed == 2 + 1  # input and weight of the linear layer, input of GELU
    assert sum(entry.kept_bytes for entry in of(ledger, "0")) == ROWS * WIDTH * FLOAT


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_that_keeps_nothing_has_its_loss_alone(frozen: bool):
    model = nn.Sequential(nn.Linear(WIDTH, CLASSES)).requires_grad_(not frozen)
    ledger = itemize(TrainingSetup(model, loss=cross_entropy), make_batch)

    assert (len(ledger.entries) == 1) == frozen
    assert ledger.entries[-1].reason == "the loss itself"
