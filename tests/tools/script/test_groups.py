"""A script as the first of several processes: what it is told, what it shares, and what each process needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from groups import CARD, MODEL, PROCESSES, ddp, fsdp2, on_card, trained
from residual import ROWS, Block, Residual, batch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from actbench.errors import UntraceableError
from actbench.measuring import bench, processgroup
from actbench.model.measured import Measurement, Mesh
from actbench.model.records import Case


def measured(scheme: str) -> Measurement:
    case = Case(model=f"{MODEL}:build", scheme=scheme, batch_size=ROWS, meter="simulated", device_profile=CARD, seed=0)
    with processgroup.leave_fake_group():
        return bench.Session(case).memory()


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=0)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cuda", (PROCESSES,), mesh_dim_names=("tp",))
    model.cuda()
    for block in [part for part in model.modules() if isinstance(part, Block)]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("wrap", "scheme"),
    [
        (fsdp2(), f"fsdp:{PROCESSES}"),
        (fsdp2(mp_policy=HALF), f"fsdp:{PROCESSES},mixed=bf16"),
        (fsdp2(reshard_after_forward=False), f"fsdp:{PROCESSES},reshard=false"),
        (ddp(gradient_as_bucket_view=True), f"ddp:{PROCESSES}"),
    ],
)
def test_a_process_needs_what_measure_says(wrap: Callable[[nn.Module], nn.Module], scheme: str) -> None:
    found, expected = trained(wrap), measured(scheme)

    # a loop holds the loss of the step before, of one block, until the next one is there
    assert found.peak_bytes - expected.peak_bytes in (0, 512)
    assert found.weights_bytes == expected.weights_bytes
    assert found.optimizer_bytes == expected.optimizer_bytes
    assert found.gradients_bytes == expected.gradients_bytes
    assert found.communication == expected.communication
    assert found.mesh == expected.mesh == Mesh(dp=PROCESSES)
    assert found.peak_parts is not None
    assert expected.peak_parts is not None
    assert found.peak_parts.communication_bytes == expected.peak_parts.communication_bytes


@pytest.mark.slow
def test_gradients_beside_their_buckets_take_as_much_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")  # workspaces that stay move no peak
    beside, inside = trained(ddp()), trained(ddp(gradient_as_bucket_view=True))

    assert beside.peak_bytes - inside.peak_bytes == pytest.approx(inside.gradients_bytes, rel=1e-3)
    assert beside.peak_parts is not None
    assert beside.peak_parts.communication_bytes == pytest.approx(inside.gradients_bytes, rel=1e-3)


@pytest.mark.exhaustive
def test_a_static_graph_and_a_search_for_unused_parameters_need_the_same() -> None:
    plain = trained(ddp())

    for found in (trained(ddp(static_graph=True)), trained(ddp(find_unused_parameters=True))):
        assert found.peak_bytes == plain.peak_bytes
        assert found.gradients_bytes == plain.gradients_bytes


def test_a_model_has_its_own_name_in_a_wrapper() -> None:
    found = trained(ddp())

    assert found.built is not None
    assert found.built.model_class == "Residual"


@pytest.mark.exhaustive
def test_flat_parameters_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")  # workspaces that stay move no peak
    flat, rows = trained(fsdp1), trained(fsdp2())

    assert flat.peak_bytes == pytest.approx(rows.peak_bytes, rel=0.03)  # blocks are cut elsewhere, by elements
    assert flat.weights_bytes == pytest.approx(rows.weights_bytes, rel=1e-3)
    assert flat.optimizer_bytes == pytest.approx(rows.optimizer_bytes, rel=1e-3)


@pytest.mark.slow
def test_shares_are_copied_in_a_mesh_of_two_dimensions() -> None:
    def wrap(model: nn.Module) -> nn.Module:
        return fsdp2(mesh=init_device_mesh("cuda", (2, 2), mesh_dim_names=("copies", "shares")))(model)

    copied, shared = trained(wrap), trained(fsdp2())

    assert copied.weights_bytes == 2 * shared.weights_bytes
    assert copied.mesh == Mesh(dp=4)
    assert {each.kind for each in copied.communication} == {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.slow
def test_offloaded_shares_are_in_host_memory() -> None:
    found = trained(fsdp2(offload_policy=CPUOffloadPolicy()))

    assert (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes) == (0, 0, 0)


@pytest.mark.slow
def test_layers_are_shared_out_by_a_plan() -> None:
    found = trained(tensor_parallel, foreach=False)  # torch steps shared and whole tensors one by one only

    blocks = sum(each.numel() for each in Block().parameters() if each.dim() == 2) * 3 * 4
    whole = sum(each.numel() for each in Residual().parameters()) * 4
    assert found.mesh == Mesh(dp=1, tp=PROCESSES)
    assert found.weights_bytes == pytest.approx(whole - blocks * (1 - 1 / PROCESSES), rel=1e-2)


@pytest.mark.slow
def test_layers_may_be_shared_in_both_ways() -> None:
    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in [part for part in model.modules() if isinstance(part, Block)]:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fsdp2(mesh=mesh["dp"])(model)

    assert trained(wrap).mesh == Mesh(dp=2, tp=2)


@pytest.mark.exhaustive
def test_a_hook_of_the_users_averages_in_half_precision() -> None:
    def wrap(model: nn.Module) -> nn.Module:
        wrapped = ddp(gradient_as_bucket_view=True)(model)
        assert isinstance(wrapped, DistributedDataParallel)
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return wrapped

    found, exact = trained(wrap), trained(ddp(gradient_as_bucket_view=True))

    (half,), (full,) = found.communication, exact.communication
    assert half.kind == full.kind == "all-reduce"
    assert half.sent_bytes == pytest.approx(full.sent_bytes / 2, rel=1e-3)


@pytest.mark.slow
def test_micro_batches_are_averaged_once() -> None:
    with on_card() as card:
        distributed.init_process_group("nccl")
        model = DistributedDataParallel(Residual().cuda(), device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(16):
            given = batch(ROWS, "cuda")
            if step % 2:
                F.cross_entropy(model(given["x"]), given["y"]).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with model.no_sync():
                    F.cross_entropy(model(given["x"]), given["y"]).backward()

    assert sum(each.calls for each in card.measurement.communication) == len(model.reducer._buckets)
    assert list(model.state_dict()) == [f"module.{name}" for name in Residual().state_dict()]


def test_parameters_without_a_gradient_are_an_error_as_in_torch() -> None:
    class Half(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    with on_card():
        distributed.init_process_group("nccl")
        model = DistributedDataParallel(Half().cuda())
        x = batch(ROWS, "cuda")["x"]
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            model(x)


def test_what_cannot_be_averaged_is_refused() -> None:
    with on_card():
        distributed.init_process_group("nccl")
        with pytest.raises(UntraceableError, match="sparse=False"):
            DistributedDataParallel(nn.Embedding(10, 10, sparse=True).cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_over_processes_keeps_what_it_keeps_in_one(dtype: torch.dtype) -> None:
    """Beside it are the statistics of each process."""

    def kept(module: nn.Module) -> int:
        x = torch.randn(8, 32, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
        before = torch.cuda.memory_allocated()
        output = module(x)
        kept = torch.cuda.memory_allocated() - before
        output.sum().backward()
        assert x.grad is not None
        assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)
        assert [part.grad is not None for part in module.parameters()] == [True, True]
        return kept

    with on_card():
        distributed.init_process_group("nccl")
        norm = nn.BatchNorm2d(32).cuda()
        alone, together = kept(norm), kept(nn.SyncBatchNorm.convert_sync_batchnorm(norm))

    statistics = PROCESSES * (2 * 32 + 1) * 4
    assert 0 <= together - alone < statistics + 8 * 512  # blocks of 512 bytes


@pytest.mark.parametrize("to", [0, 1])
def test_shards_of_an_optimizer_come_together_as_those_of_another_process_would(to: int) -> None:
    """The state of four processes has the shapes of all parameters, whoever holds them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    shapes = [(300, 300), (200, 100), (7,), (300,), (1, 5), (64, 3)]
    with on_card():
        distributed.init_process_group("nccl")
        parameters = [nn.Parameter(torch.rand(shape, device="cuda")) for shape in shapes]
        optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam)
        sum(each.sum() for each in parameters).backward()
        optimizer.step()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.consolidate_state_dict(to=to)
        peak = torch.cuda.max_memory_allocated() - held
        if to == 0:
            kept = optimizer.state_dict()["state"]
            assert [tuple(kept[place]["exp_avg"].shape) for place in range(len(shapes))] == shapes
            assert {each["exp_avg"].device.type for each in kept.values()} == {"cpu"}
    largest = 8 * max(200 * 100, 300 + 64 * 3 + 7)  # two moments of the largest shard that another process has
    assert largest < peak < 2 * largest + 4 * 8 * 300 * 300 * to + 65536
