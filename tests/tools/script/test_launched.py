"""A script that torchrun or accelerate starts: what it is told, what it shares, and what is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from groups import CARD, MODEL, PROCESSES, ddp, fsdp2, on_card, trained
from residual import ROWS, Residual, batch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from actbench.errors import CodeError, MeasurementError, UsageError
from actbench.measuring import bench, processgroup
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.simulator import profiles
from actbench.tools.script import launching
from actbench.tools.script.processes.groups import cards_of_machine, environment


@pytest.mark.slow
def test_a_script_is_told_what_torchrun_tells() -> None:
    before = dict(os.environ)
    with on_card(16):
        assert {name: os.environ[name] for name in environment(16, 8)} == environment(16, 8)
        assert torch.cuda.device_count() == 8
        assert (os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]) == ("8", "2")
        assert distributed.is_torchelastic_launched()
        distributed.init_process_group(device_id=torch.device("cuda", 0))
        assert (distributed.get_rank(), distributed.get_world_size(), distributed.get_backend()) == (0, 16, "nccl")
        assert distributed.is_nccl_available()
        assert distributed.get_world_size(distributed.new_group([0, 3])) == 2
        distributed.barrier()

    assert dict(os.environ) == before
    assert not distributed.is_initialized()


def test_cards_of_a_machine_divide_the_processes() -> None:
    card = profiles.get(CARD)
    assert [cards_of_machine(count, card) for count in (1, 3, 8, 12, 16)] == [1, 3, 8, 6, 8]


@pytest.mark.slow
def test_one_process_may_make_a_group_of_one() -> None:
    found = trained(ddp(), processes=1)

    assert "RANK" not in os.environ
    assert found.mesh is None
    assert found.peak_bytes > 0


@pytest.mark.slow
def test_others_have_what_this_process_has() -> None:
    with on_card():
        distributed.init_process_group("cpu:gloo,cuda:nccl")
        objects, numbers = [None] * PROCESSES, [torch.zeros(2, device="cuda") for _ in range(PROCESSES)]
        distributed.all_gather_object(objects, {"rows": 3})
        assert objects == [{"rows": 3}] * PROCESSES

        distributed.broadcast_object_list(objects)
        assert objects == [{"rows": 3}] * PROCESSES

        rows, on_host = torch.tensor([3, 5], device="cuda"), torch.tensor(7)
        distributed.all_reduce(rows)
        distributed.all_reduce(on_host)
        assert rows.tolist() == [12, 20]
        assert on_host.item() == 28
        distributed.all_reduce(rows, op=distributed.ReduceOp.MAX)
        assert rows.tolist() == [12, 20]

        gathered = torch.zeros(8, dtype=torch.int64, device="cuda")
        distributed.all_gather_into_tensor(gathered, rows)
        assert gathered.tolist() == [12, 20] * 4

        distributed.all_gather(numbers, torch.nn.Linear(4, 2).cuda().bias.detach())
        assert numbers[3].tolist() == [1, 1]  # plausible, as of all that follows from weights
        loss = nn.Linear(4, 1).cuda()(torch.ones(4, device="cuda")).sum()
        assert distributed.all_reduce(loss, async_op=True).get_future().wait()[0] is loss


@pytest.mark.slow
def test_a_sampler_shares_out_the_data() -> None:
    with on_card():
        distributed.init_process_group("nccl")
        data = TensorDataset(torch.arange(32))
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
        assert [rows.tolist() for (rows,) in loader] == [[0, 4], [8, 12], [16, 20], [24, 28]]


@pytest.mark.slow
def test_batches_of_large_data_move_to_the_card() -> None:
    with on_card(1):
        data = TensorDataset(torch.randn(1024, 512))
        (rows,) = next(iter(DataLoader(data, batch_size=64)))
        before = torch.cuda.memory_allocated()
        assert rows.device.type == "cpu"
        assert rows.to("cuda").device.type == "cuda"
        moved = rows.to("cuda")
        assert torch.cuda.memory_allocated() - before == moved.nbytes


@pytest.mark.slow
def test_random_states_go_to_the_card_and_back() -> None:
    """As accelerate gives all processes the state of the first."""
    with on_card():
        distributed.init_process_group("nccl")
        generator = torch.Generator()
        before = generator.get_state()
        on_the_card = before.to("cuda")
        distributed.broadcast(on_the_card, 0)
        generator.set_state(on_the_card.cpu())
        assert torch.equal(generator.get_state(), before)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 8, "rank": 0}, "group of 8 processes.*first of 4.*--gpus 8"),
        ({"world_size": 4, "rank": 2}, "takes rank 2"),
    ],
)
def test_groups_of_other_processes_are_refused(options: dict[str, int], message: str) -> None:
    with on_card(), pytest.raises(MeasurementError, match=message):
        distributed.init_process_group("nccl", init_method="tcp://localhost:29511", **options)


@pytest.mark.slow
def test_a_process_of_a_group_simulates_no_other() -> None:
    with on_card():
        distributed.init_process_group("nccl")
        with pytest.raises(UsageError, match="a simulation inside of another"):
            on_card().__enter__()


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_engines_that_are_installed_are_refused(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{engine}.py").write_text(
        "import torch\ndef initialize():\n    torch.distributed.init_process_group('nccl')\n"
    )
    script = tmp_path / "train.py"
    script.write_text(f"import {engine}\n{engine}.initialize()\n")
    monkeypatch.setattr(sys, "path", [*sys.path])

    with on_card(), pytest.raises(MeasurementError, match=f"(?i){engine}.* is not simulated"):
        launching.run(Script(target=str(script), processes=PROCESSES), print)
    sys.modules.pop(engine)


def test_engines_that_are_missing_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import deepspeed.ops\n")

    with on_card(), pytest.raises(MeasurementError, match=r"DeepSpeed is not simulated.*\(train.py:1"):
        launching.run(Script(target=str(script)), print)


def test_a_script_for_torchrun_says_what_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nrank = int(os.environ['LOCAL_RANK'])\n")

    with on_card(1), pytest.raises(MeasurementError, match=r"LOCAL_RANK.*torchrun; give --gpus N"):
        launching.run(Script(target=str(script)), print)

    script.write_text("print({}['other'])\n")
    with on_card(1), pytest.raises(CodeError, match="KeyError"):
        launching.run(Script(target=str(script)), print)


def accelerated(**options: Any) -> Measurement:
    """Return what a step of a loop needs that accelerate has prepared."""
    with on_card() as card:
        accelerator = Accelerator(**options)
        data = TensorDataset(*batch(16 * ROWS * PROCESSES).values())
        model = Residual()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, ROWS, shuffle=True))
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            assert accelerator.gather_for_metrics(loss.detach()).tolist() == [1] * PROCESSES
    return card.measurement


@pytest.fixture
def no_state_left() -> Iterator[None]:
    """Accelerate remembers the processes that it found."""
    PartialState._reset_state()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    yield
    PartialState._reset_state()
    AcceleratorState._reset_state()
    GradientState._reset_state()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_state_left")
def test_accelerate_wraps_a_model_by_itself() -> None:
    assert accelerated().peak_bytes == pytest.approx(trained(ddp()).peak_bytes, rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_state_left")
def test_accelerate_shares_a_model_out() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    found, expected = accelerated(fsdp_plugin=plugin), trained(fsdp2())

    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=1e-3)
    assert found.optimizer_bytes == pytest.approx(expected.optimizer_bytes, rel=1e-3)


@pytest.mark.exhaustive
def test_a_script_of_eight_billion_parameters_needs_what_measure_says(tmp_path: Path) -> None:
    script = MODEL.parent / "scripts" / "fsdp.py"
    sizes = {"vocab": 128256, "dim": 4096, "layers": 32, "heads": 32, "hidden": 14336}
    own = tmp_path / "own.py"
    own.write_text(
        "import importlib.util\n"
        "import torch\n"
        "import torch.nn.functional as F\n"
        f"spec = importlib.util.spec_from_file_location('fsdp_script', {str(script)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "def loss(model, batch):\n"
        "    logits = model(batch['tokens'][:, :-1])\n"
        "    return F.cross_entropy(logits.flatten(0, 1).float(), batch['tokens'][:, 1:].flatten())\n"
        "def build():\n"
        f"    model = module.Transformer(**{sizes!r})\n"
        f"    batch = lambda n: {{'tokens': torch.randint(0, {sizes['vocab']}, (n, 1025))}}\n"
        "    return model, batch, loss, lambda model: torch.optim.AdamW(model.parameters(), fused=True)\n"
    )
    case = Case(model=f"{own}:build", scheme="fsdp:8,mixed=bf16", batch_size=1, meter="simulated", device_profile=CARD)
    with processgroup.leave_fake_group():
        expected = bench.Session(case).memory()

    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    arguments = (*words, "--length", "1024", "--batch-size", "1")
    with on_card(8) as card:
        launching.run(Script(target=str(script), arguments=arguments, processes=8), print)

    logits_bytes = 1024 * sizes["vocab"] * 2  # which the script holds in a variable until its next forward pass
    assert card.peak_bytes == pytest.approx(expected.peak_bytes + logits_bytes, rel=1e-4)
    assert card.measurement.weights_bytes == pytest.approx(expected.weights_bytes, rel=1e-3)
    assert card.measurement.optimizer_bytes == pytest.approx(expected.optimizer_bytes, rel=1e-3)
