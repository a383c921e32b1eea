import pytest
import torch
from torch import nn

from actbench.errors import ConversionError
from actbench.methods.actnn.bitallocation import BitAllocation
from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.packing import SavedTensors, SiteState


def model():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    CompressedForward(layers, SavedTensors(GroupQuantization()), BitAllocation([SiteState("0", 2)], 2, 1)).bind()
    return layers


def test_what_it_is_called_with_is_somebody_elses():
    layers, x = model(), torch.randn(32, 64)
    layers(x)
    packer = CompressedForward.of(layers).packer

    assert packer.why_not(x) == "a parameter, a buffer or a part of the batch"
    assert packer.why_not(x.clone()) is None


@pytest.mark.parametrize(("training", "grad", "begun"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_a_step_begins_with_each_forward_in_training(training, grad, begun, monkeypatch):
    layers, found = model().train(training), []
    monkeypatch.setattr(BitAllocation, "begin", lambda _: found.append(1))
    with torch.set_grad_enabled(grad):
        layers(torch.randn(32, 64))

    assert len(found) == begun


def test_what_is_leaving_is_let_go_after_an_exception_too(monkeypatch):
    layers, settled = model(), []
    packer = CompressedForward.of(layers).packer
    monkeypatch.setattr(packer, "settle", lambda: settled.append(1))
    with pytest.raises(RuntimeError, match="shapes"):
        layers(torch.randn(32, 63))

    assert settled == [1]


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_unused_memory_is_given_back_below_a_threshold(threshold, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    for allocated in (19, 20):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda allocated=allocated: allocated)
        layers = nn.Linear(4, 4)
        CompressedForward(layers, SavedTensors(GroupQuantization()), empty_cache_threshold=threshold).bind()
        layers(torch.randn(2, 4))

    assert len(emptied) == (0 if threshold is None else 1)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_is_refused_in_training(fullgraph):
    torch._dynamo.reset()
    compiled = torch.compile(model(), backend="eager", fullgraph=fullgraph)
    error = Exception if fullgraph else ConversionError  # of torch's own, with the message of ours inside
    with pytest.raises(error, match="layers pack their inputs cannot be compiled"):
        compiled(torch.randn(32, 64))
    torch._dynamo.reset()
    with torch.no_grad():
        assert compiled(torch.randn(32, 64)).shape == (32, 64)
    torch._dynamo.reset()
