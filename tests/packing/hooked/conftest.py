"""Models whose saved tensors are packed by hooks, and what is asked of them."""

import weakref

import pytest
import torch

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import small_codes
from actbench.packing import SavedTensors
from actbench.packing.hooked import HookedForward, Hooks
from actbench.packing.hooked.hooks import active


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Hooks, modes and the mark of a running model are gone after each test, whatever it did."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0
    assert active() is None


@pytest.fixture
def hook():
    """Gives a model with hooks bound on it."""

    def bind(model, bits=8, probing=None, **settings):
        HookedForward(model, Hooks(SavedTensors(GroupQuantization(**settings)), bits, small_codes()), probing).bind()
        return model

    return bind


class Packed(list):
    """What each saved tensor was made: pairs of its shape and what is held, the latest last."""

    def alive(self):
        """Return a function that tells how many storages of the parts are alive."""
        parts = [part for _, held in self if hasattr(held, "packed") for part in held.packed.parts]
        references = [weakref.ref(part.untyped_storage()) for part in parts]
        self.clear()
        return lambda: sum(reference() is not None for reference in references)

    def of(self, *shape):
        """Return what is held of the tensors of a shape."""
        return [held for found, held in self if found == shape]


@pytest.fixture
def packed():
    """Gives the list to which a hooked model adds each tensor that it saves."""

    def watch(model):
        hooks, found = HookedForward.of(model).hooks, Packed()
        pack = hooks.pack

        def spy(tensor):
            held = pack(tensor)
            found.append((tuple(tensor.shape), held))
            return held

        hooks.pack = spy
        return found

    return watch


@pytest.fixture
def step():
    """Gives all gradients of a training step, for weights of the output that are always the same."""

    def run(model, *args, **kwargs):
        model.zero_grad()
        y = model(*args, **kwargs)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    return run


@pytest.fixture
def near():
    """Gives whether gradients are those of 8 bits, which leave 1 percent of a normal tensor: within 3 of the norm."""

    def compare(found, exact, within=0.03):
        assert len(found) == len(exact)
        return all((a - b).norm() <= within * b.norm() for a, b in zip(found, exact, strict=True))

    return compare
