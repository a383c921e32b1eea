from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from actbench.errors import ConversionError
from actbench.measuring.inspection import Trace, inspect, trace
from actbench.measuring.inspection.recorder import SavedStorage
from actbench.model.ledger import OUTSIDE
from actbench.model.records import Site, Unreached
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import fake, profiles
from actbench.simulator.card import place, simulated
from actbench.simulator.tracker import StorageTracker

ROWS, WIDTH, HIDDEN, CLASSES = 10, 64, 256, 5
FLOAT, LONG = 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU()
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batch() -> Batch:
    return {"x": torch.zeros(ROWS, WIDTH), "y": torch.zeros(ROWS, dtype=torch.long)}


def traced(model: nn.Module) -> Trace:
    return trace(TrainingSetup(model, loss=cross_entropy), make_batch)


def checkpointed(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def ledger_bytes(model: nn.Module) -> int:
    """Return the activation bytes of a training forward by the ledger of the meters: live after minus live before."""
    mode = fake.fake_mode()
    with fake.faked(model, mode, place()), mode, torch.device(place()):
        batch = make_batch()
        ledger = StorageTracker(host_is_free=True)  # without states of the generator, which no tensor saves
        ledger.add([*model.parameters(), *model.buffers(), *batch.values()])
        before = ledger.live_bytes
        with ledger:
            loss = cross_entropy(model, batch)
        assert loss.requires_grad
        return ledger.live_bytes - before


def test_each_storage_belongs_to_the_module_that_saves_it_first():
    found = traced(blocks())
    assert found.bytes_under("1.norm") == ROWS * WIDTH * FLOAT + 2 * ROWS * FLOAT  # its input, mean and 1 / std
    assert found.bytes_under("1.up") == ROWS * WIDTH * FLOAT
    assert found.bytes_under("1.act") == ROWS * HIDDEN * FLOAT
    assert found.bytes_under("1.down") == ROWS * HIDDEN * FLOAT
    assert found.bytes_under("1") == 2 * ROWS * (WIDTH + HIDDEN + 1) * FLOAT
    assert found.bytes_under("0") == 0  # its input is the batch


def test_what_the_loss_keeps_is_counted_but_belongs_to_no_module():
    found = traced(blocks())
    outside = sum(kept.nbytes for kept in found.kept if kept.owner == OUTSIDE)
    assert outside == (ROWS * CLASSES + 1 + 1) * FLOAT  # log-probabilities, total weight, loss
    assert found.bytes_under("") + outside == found.total_bytes


def test_a_tensor_saved_by_two_modules_is_counted_once_and_says_so():
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    found = traced(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Forked()))
    tanh = SavedStorage(ROWS * WIDTH * FLOAT, owner="1", shared_with=("2.first", "2.second"))
    assert tanh in found.kept
    assert found.bytes_under("2") == 0


def test_a_checkpointed_block_keeps_its_input():
    model = blocks()
    checkpointed(model[1])
    checkpointed(model[2])
    found = traced(model)
    assert found.bytes_under("1") == found.bytes_under("2") == ROWS * WIDTH * FLOAT
    assert found.calls["1.act"] == 1


def test_packed_bytes_belong_to_the_module_whose_tensors_are_packed():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
                return self.act(x)

    found = traced(nn.Sequential(nn.Linear(WIDTH, WIDTH), Packed(), nn.Linear(WIDTH, CLASSES)))
    assert found.bytes_under("1") == found.bytes_under("1.act") == ROWS * WIDTH * 2


def test_what_a_scheme_moves_to_host_memory_is_not_kept_on_the_device():
    def pack(tensor: Tensor) -> Tensor:
        return tensor.cpu()

    class Offloaded(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                return super().forward(x)

    with simulated(profiles.get("t4")):
        found = traced(nn.Sequential(Offloaded(), nn.Linear(WIDTH, CLASSES)))

    assert found.bytes_under("0") == 0


@pytest.mark.parametrize("some_checkpointed", [False, True])
def test_the_total_is_the_activation_bytes_of_the_ledger(some_checkpointed: bool):
    model = blocks()
    if some_checkpointed:
        checkpointed(model[2])
    with simulated(profiles.get("t4")):
        assert traced(model).total_bytes == ledger_bytes(model)


def test_the_total_is_the_activation_bytes_of_the_ledger_with_batch_norm_and_inplace_relu():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.1))
    model.append(nn.Linear(WIDTH, CLASSES))
    with simulated(profiles.get("t4")):
        assert traced(model).total_bytes == ledger_bytes(model)


def test_calls_are_counted_and_a_shared_module_counts_under_its_first_path():
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, CLASSES), act)
    assert traced(model).calls == {"": 1, "0": 1, "1": 2, "2": 1}


def test_tracing_leaves_the_model_and_the_random_state_as_they_were():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES))
    model.eval()
    model[2].train()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [id(p) for p in model.parameters()]
    random = torch.get_rng_state()

    traced(model)

    assert [id(p) for p in model.parameters()] == parameters
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == [False, False, False, True, False]
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_tracing_needs_no_memory_for_the_batch():
    def huge() -> Batch:
        return {"x": torch.zeros(10**9, WIDTH), "y": torch.zeros(10**9, dtype=torch.long)}

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
    assert trace(TrainingSetup(model, loss=cross_entropy), huge).bytes_under("1") == 10**9 * WIDTH * FLOAT


def test_a_model_that_reads_values_is_refused_and_left_without_our_hooks():
    class Reading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    model = nn.Sequential(Reading(WIDTH, CLASSES))
    with pytest.raises(ConversionError, match="looks at the values"):
        traced(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_nothing_is_kept_of_a_frozen_model():
    model = blocks().requires_grad_(False)
    assert [kept.nbytes for kept in traced(model).kept] == [FLOAT]  # the loss itself


def test_a_model_on_the_meta_device_is_traced_alike():
    with torch.device("meta"):
        model = blocks()
    assert traced(model).total_bytes == traced(blocks()).total_bytes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x[None], x[None], x[None])[0][0])


def test_inspect_fills_in_bytes_and_sets_aside_what_never_runs():
    model = Attention()
    found = traced(model)
    sites = tuple(Site(path=path, was="nn.Linear", becomes="other") for path in ("attention.out_proj", "head"))
    earlier = (Unreached(path="x", kind="F.gelu", reason="a function call"),)
    after = Trace((SavedStorage(12, "head", ()),), found.calls)

    reached, unreached = inspect(found, after, TrainingSetup(model, sites=sites, unreached=earlier))

    kept = ROWS * WIDTH * FLOAT
    assert reached == (Site(path="head", was="nn.Linear", becomes="other", bytes_before=kept, bytes_after=12, calls=1),)
    assert unreached[0] == earlier[0]
    assert unreached[1].path == "attention.out_proj"
    assert "read by its parent" in unreached[1].reason


def test_sites_come_in_the_order_of_the_model():
    model = blocks()
    sites = tuple(Site(path=path, was="x", becomes="y") for path in ("2.act", "1.act", "3", "1.up"))
    found = traced(model)
    reached, _ = inspect(found, found, TrainingSetup(model, sites=sites))
    assert [site.path for site in reached] == ["1.up", "1.act", "2.act", "3"]


def test_sites_none_of_which_run_are_an_error():
    model = Attention()
    found = traced(model)
    setup = TrainingSetup(model, sites=(Site(path="attention.out_proj", was="nn.Linear", becomes="other"),))
    with pytest.raises(ConversionError, match=r"attention\.out_proj"):
        inspect(found, found, setup)
