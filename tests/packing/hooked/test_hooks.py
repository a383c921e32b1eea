"""What of a step is packed, in how many bits, and what is left as it is."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actbench.methods.actnn.ops import groupquant
from actbench.packing.codecs import Flags, Repeated
from actbench.packing.hooked import HookedForward, hooks
from actbench.packing.hooked.forward import StaysHere
from actbench.packing.hooked.hooks import PackedAtSite
from actbench.simulator.fake import fake_mode, faked


class Function(nn.Module):
    """A model of one function, after a layer, so that what it saves is neither a parameter nor an input."""

    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Linear(64, 64), function

    def forward(self, *inputs):
        return self.function(self.first(inputs[0]), *inputs[1:])


def batch():
    return torch.randn(8, 16, 64)


def storages(found):
    return {part.untyped_storage() for held in found if isinstance(held, PackedAtSite) for part in held.packed.parts}


def test_a_saved_tensor_takes_its_codes_and_a_word_for_each_group(hook, packed):
    model = hook(Function(torch.tanh), bits=3, group_size=64)
    found = packed(model)
    model(batch())
    (held,) = [held for _, held in found if isinstance(held, PackedAtSite)]

    assert held.packed.bits == 3
    assert sum(part.nbytes for part in held.packed.parts) == groupquant.packed_bytes(8 * 16 * 64, 3, 64)


def test_parameters_buffers_and_inputs_are_left(hook, packed):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("scale", torch.randn(64))

        def forward(self, x, other):
            return (x @ self.weight.t()) * self.scale + other["more"][0] * self.weight[:1]

    model, x, more = hook(Scaled()), batch().requires_grad_(), batch()
    found = packed(model)
    model(x, {"more": [more]})
    left = {held.tensor.untyped_storage() for _, held in found}

    assert all(isinstance(held, StaysHere) for _, held in found)
    assert left == {t.untyped_storage() for t in (model.weight, model.scale, x, more)}


def test_a_parameter_changed_before_backward_is_noticed(hook):
    model = hook(Function(torch.tanh))
    x = batch().requires_grad_()
    loss = model(x).sum()
    with torch.no_grad():
        model.first.weight.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("replaced", [True, False])
def test_a_parameter_whose_data_is_changed_is_seen_as_torch_sees_it(hook, replaced):
    """Autograd does not look at ``.data``: the backward pass has what is there by then."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return x @ self.weight

    exact, x, found = Scaled(), batch().requires_grad_(), []
    for model in (exact, hook(copy.deepcopy(exact))):
        loss = model(x).sum()
        if replaced:
            model.weight.data = 3 * model.weight.data
        else:
            model.weight.data.mul_(3)
        found += torch.autograd.grad(loss, x)
    before = torch.autograd.grad(exact(x).sum(), x)[0] / 3

    assert torch.equal(*found)
    assert not torch.allclose(found[0], before)


def test_a_packed_tensor_stays_what_it_was_when_it_was_saved(hook, step, near):
    """Plain torch would see a change through ``.data``, and refuse one that it is told of."""

    def changed(x):
        y = x.tanh() * 2
        z = y * y
        y.data.zero_()
        return z

    exact = Function(lambda x: (x.tanh() * 2).square())
    model = hook(Function(changed))
    model.load_state_dict(exact.state_dict())
    x = batch()

    assert near(step(model, x), step(exact, x))


def test_a_packed_tensor_may_be_overwritten(hook, step, near):
    def overwritten(x):
        y = x.tanh() * 2
        z = y.sigmoid()
        y.zero_()
        return z * z

    exact = Function(lambda x: (x.tanh() * 2).sigmoid().square())
    model = hook(Function(overwritten))
    model.load_state_dict(exact.state_dict())
    x = batch()

    assert near(step(model, x), step(exact, x))


def test_an_expanded_tensor_is_kept_once(hook, packed, step):
    def expanded(x):
        return x * x[:1, :1].expand(8, 16, 64)

    model = hook(Function(expanded), bits=8, group_size=32)
    found = packed(model)
    model(batch())
    (held,) = [held for held in found.of(8, 16, 64) if isinstance(held.packed.codec, Repeated)]

    assert held.packed.layout.shape == (8, 16, 64)
    assert sum(part.nbytes for part in held.packed.parts) == groupquant.packed_bytes(64, 8, 32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, x, 0.5),
        lambda x: x.masked_fill(x > 0, 0.5),
        F.relu,
        lambda x: F.dropout(x, 0.5),
        lambda x: F.leaky_relu(x, 0.1),
    ],
)
def test_truth_values_and_masks_take_a_bit(hook, packed, step, function):
    torch.manual_seed(1)
    exact = Function(function)
    model = hook(Function(function))
    model.load_state_dict(exact.state_dict())
    found, x = packed(model), batch()
    state = torch.get_rng_state()
    one = step(model, x)
    torch.set_rng_state(state)

    packed = storages(held for _, held in found)
    codes = [h.tensor for _, h in found if isinstance(h, StaysHere) and h.tensor.dtype == torch.uint8]
    assert sum(s.nbytes() for s in packed) + sum(t.nbytes for t in codes) == 8 * 16 * 64 // 8
    assert all(torch.equal(a, b) for a, b in zip(one, step(exact, x), strict=True))  # a mask is exact


def test_truth_values_are_flags(hook, packed):
    model = hook(Function(lambda x: x.masked_fill(x > 0, 0.5)))
    found = packed(model)
    model(batch())

    assert [type(held.packed.codec) for _, held in found if isinstance(held, PackedAtSite)] == [Flags]


def test_query_key_and_value_layers_share_their_input(hook, packed):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            x = self.first(x)
            return self.q(x) + self.k(x) + self.v(x)

    model = hook(Attention(), bits=4)
    found = packed(model)
    model(batch())
    held = [held for _, held in found if isinstance(held, PackedAtSite)]

    assert len(held) == 3
    assert sum(s.nbytes() for s in storages(held)) == groupquant.packed_bytes(8 * 16 * 64, 4, 256)
    assert all(each.site is held[0].site for each in held)


@pytest.mark.parametrize(
    "view", [lambda x: x.reshape(128, 64), lambda x: x.transpose(0, 1), lambda x: x.permute(2, 0, 1)]
)
def test_other_views_of_one_memory_share_and_come_back_as_they_are(hook, packed, step, near, view):
    def twice(x):
        return x.sigmoid().sum() + view(x).tanh().sum() + (x * x).sum() + (view(x) * view(x)).sum()

    exact = Function(twice)
    model = hook(Function(twice))
    model.load_state_dict(exact.state_dict())
    found, x = packed(model), batch()

    assert near(step(model, x), step(exact, x))
    first = [held for shape, held in found if isinstance(held, PackedAtSite)]
    whole = groupquant.packed_bytes(8 * 16 * 64, 8, 256)
    assert sum(s.nbytes() for s in storages(first)) == 3 * whole  # both results, and x in all its views


def test_a_tensor_changed_in_between_is_packed_again(hook, packed):
    def changed(x):
        y = x * 2
        first = y * y
        y.detach().add_(1)
        return first + y * y

    model = hook(Function(changed))
    found = packed(model)
    model(batch())

    assert len(storages(held for _, held in found)) == 2 * 2


def test_a_repeated_tensor_that_is_left_must_not_change_in_between(hook):
    def masked(x):
        mask = torch.rand(1, 16, 64)
        mask[0, 0, 0] = -torch.inf  # no group can hold it
        y = x * mask.expand(8, 16, 64)
        mask.add_(1)
        return y

    found = hook(Function(masked))(batch())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_small_and_whole_number_tensors_are_left(hook, packed):
    model = hook(Function(lambda x: (x[0, 0, :32].tanh(), x.gather(1, torch.zeros(8, 1, 64, dtype=torch.int64)))[1]))
    found = packed(model)
    model(batch())

    assert [held.tensor.dtype for held in found.of(8, 1, 64)] == [torch.int64]
    assert all(isinstance(held, StaysHere) for held in found.of(32))


class Shared(nn.Module):
    """A layer whose output three others read, among them one that may be told to make it infinite."""

    def __init__(self):
        super().__init__()
        self.first, self.others = nn.Linear(64, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.factor = 1.0

    def forward(self, x):
        x = self.first(x) * self.factor
        return sum(layer(x) for layer in self.others)


def test_on_a_device_values_are_looked_at_in_the_first_real_step_alone(hook, packed, monkeypatch):
    monkeypatch.setattr(hooks, "is_elsewhere", lambda tensor: True)
    model, mode = hook(Shared()), fake_mode()
    with faked(model, mode), mode:
        model(torch.empty(8, 64))
    model.factor = torch.inf
    found = packed(model)
    model(torch.randn(8, 64))
    assert all(isinstance(held, StaysHere) for held in found.of(8, 64))

    model.factor = 1.0
    for guarded in (True, False):
        model(torch.randn(8, 64))
        sites = list(HookedForward.of(model).hooks.sites)
        assert [site.owner for site in sites] == [None, sites[0], sites[0]]
        assert sites[0].guarded == guarded
