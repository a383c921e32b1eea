import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from actbench.errors import ConversionError
from actbench.packing.refusals import NotInParallel, refuse_sharded


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def guarded():
    model = nn.Linear(64, 64)
    model.register_forward_pre_hook(NotInParallel("weight gradients", "each has its own"))
    return model


@pytest.mark.usefixtures("one_process")
def test_data_parallel_training_is_refused_with_the_reason():
    model, x = guarded(), torch.randn(2, 64)
    with pytest.raises(ConversionError, match="DistributedDataParallel does not go with weight gradients: each has"):
        DistributedDataParallel(model)(x)

    assert model(x).shape == (2, 64)


@pytest.mark.usefixtures("one_process")
def test_sharded_weights_are_refused_with_the_reason():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64))
    refuse_sharded(model, "weights", "each process holds a shard")
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ConversionError, match="FSDP does not go with weights: each process holds"):
        refuse_sharded(model, "weights", "each process holds a shard")


def test_one_process_is_fine():
    refuse_sharded(guarded(), "weights", "")
    assert guarded()(torch.randn(2, 64)).shape == (2, 64)
