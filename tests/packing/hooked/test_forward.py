"""A model under packing hooks: nothing of the scheme is left after a step, however it ends."""

import contextlib
import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn

from actbench.errors import ConversionError
from actbench.methods.gact.sensitivity import Probing
from actbench.packing.hooked import HookedForward, hooks


def plain():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Dropout(0.5))


def batch():
    return torch.randn(32, 64)


def attributes(model):
    return [dict(vars(module)) for module in model.modules()]


def fail(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize("probing", [None, Probing(4, 1)])
def test_a_forward_that_fails_leaves_nothing(hook, packed, probing):
    model = hook(plain(), probing=probing)
    found, before = packed(model), attributes(model)
    removed = model[3].register_forward_pre_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        model(batch())
    removed.remove()

    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0
    assert attributes(model) == before
    gc.collect()
    assert found
    assert found.alive()() == 0
    model(batch()).sum().backward()


def test_a_backward_that_fails_leaves_nothing(hook, packed):
    model = hook(plain(), probing=Probing(4, 1))
    found = packed(model)
    x = batch().requires_grad_()
    x.register_hook(fail)
    model[1].register_full_backward_hook(fail)
    model.forward.probing = None
    loss = model(x).sum()
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    alive = found.alive()
    del loss

    assert alive() == 0
    assert HookedForward.of(model).hooks.disturbed == frozenset()


def test_a_probing_that_fails_leaves_nothing(hook):
    model = hook(plain(), probing=Probing(4, 1))
    packs = HookedForward.of(model).hooks
    removed = model[1].register_full_backward_hook(fail)
    x, state = batch(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        model(x)
    removed.remove()

    assert (packs.probing, packs.disturbed) == (False, frozenset())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_nothing_packed_outlives_its_backward(hook, packed):
    model = hook(plain(), probing=Probing(4, 2))
    found = packed(model)
    for _ in range(3):
        loss = model(batch()).sum()
        alive = found.alive()
        assert alive() > 0
        loss.backward()
        assert alive() == 0  # though the loss is still held
    assert loss.isfinite()


def test_nothing_packed_outlives_an_exception_before_backward(hook, packed):
    model = hook(plain())
    found = packed(model)

    def step():
        loss = model(batch()).sum()
        raise ZeroDivisionError(loss)

    with contextlib.suppress(ZeroDivisionError):
        step()

    assert found.alive()() == 0


def test_a_hooked_model_inside_of_another_packs_its_own(hook, packed, step, near):
    exact = nn.Sequential(plain(), nn.Linear(64, 64)).eval()
    model = copy.deepcopy(exact)
    hook(model[0])
    hook(model)
    inner, outer, x = packed(model[0]), packed(model), batch()

    assert near(step(model, x), step(exact, x))
    assert inner.of(32, 64)
    assert outer.of(32, 64)


def test_two_models_of_one_graph_pack_each_their_own(hook, packed, step, near):
    class Both(nn.Module):
        def __init__(self, one, two):
            super().__init__()
            self.one, self.two = one, two

        def forward(self, x):
            return self.two(self.one(x)) + self.one(2 * x)

    exact = Both(plain(), plain()).eval()
    model = copy.deepcopy(exact)
    hook(model.one, bits=4)
    hook(model.two)
    one, two, x = packed(model.one), packed(model.two), batch()

    assert near(step(model, x), step(exact, x), within=0.2)
    assert {held.packed.bits for _, held in one if isinstance(held, hooks.PackedAtSite)} == {4}
    assert {held.packed.bits for _, held in two if isinstance(held, hooks.PackedAtSite)} == {8}


def test_two_models_in_two_threads(hook, step, near):
    exacts = [plain().eval() for _ in range(2)]
    models = [hook(copy.deepcopy(exact), probing=Probing(8, 1)) for exact in exacts]
    x, meet, found = batch(), threading.Barrier(2), [None, None]
    for model in models:
        model[1].register_forward_pre_hook(lambda *_: (meet.wait(timeout=10), None)[1])

    def train(index):
        found[index] = [step(models[index], x) for _ in range(3)][-1]
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(near(one, step(exact, x)) for one, exact in zip(found, exacts, strict=True))


def test_nothing_is_packed_without_gradients(hook, packed, monkeypatch):
    model = hook(plain(), probing=Probing(4, 1))
    found = packed(model)
    monkeypatch.setattr(hooks, "saved_tensors_hooks", lambda *_: pytest.fail("hooked"))
    with torch.no_grad():
        model(batch())
        model.eval()(batch())

    assert found == []


def test_bits_are_not_shared_out_in_evaluation(hook):
    model = hook(plain().eval(), probing=Probing(4, 1))
    model(batch())

    assert {site.bits for site in HookedForward.of(model).hooks.sites} == {8}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_packs_its_own_with_the_bits_it_had(hook, packed, step, copied):
    model = hook(plain(), bits=4)
    model(batch())
    for index, site in enumerate(HookedForward.of(model).hooks.sites):
        site.bits = 2**index
    twin = copied(model)
    sites = [list(HookedForward.of(each).hooks.sites) for each in (model, twin)]
    bits = [[(site.path, site.bits) for site in each] for each in sites]
    found = packed(twin)
    step(twin, batch())

    assert bits[0] == bits[1]
    assert len(bits[0]) > 1
    assert not set(sites[0]) & set(sites[1])
    assert [held.packed.bits for _, held in found if hasattr(held, "packed")] == [width for _, width in bits[0]]
    assert all(p.grad is None for p in model.parameters())
    assert HookedForward.of(twin).module is twin


def test_compiling_is_refused(hook):
    model = hook(plain(), probing=Probing(4, 100))
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ConversionError, match="packed by hooks cannot be compiled"):
        compiled(batch())
    torch._dynamo.reset()
    with pytest.raises(Exception, match="packed by hooks cannot be compiled"):
        torch.compile(model, backend="eager", fullgraph=True)(batch())
    torch._dynamo.reset()
    with torch.no_grad():  # where nothing is packed
        assert compiled(batch()).shape == (32, 64)
    torch._dynamo.reset()
