import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from actbench.errors import ConversionError
from actbench.packing import hostoffload, packer
from actbench.packing.hooked import forward
from actbench.packing.hooked.forward import OffloadedForward
from actbench.simulator import fake, profiles
from actbench.simulator.card import place, simulated


class Toy(nn.Module):
    """Its first two layers read one input; its loss needs an expanded tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, x):
        h = self.norm(self.a(x).relu() + self.b(x))
        return (h * self.a.weight.sum(0).expand(64, 32)).tanh()


def model():
    return Toy()


def offload(module):
    OffloadedForward(module).bind()
    return module


def step(module, x):
    module.zero_grad()
    loss = module(x).square().mean()
    loss.backward()
    return [loss, *(p.grad for p in module.parameters())]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def moves(monkeypatch):
    """Let CPU tensors be moved as those of a device are; gives the list of what was moved."""
    found = []
    move = hostoffload.to_host
    monkeypatch.setattr(packer, "is_elsewhere", lambda tensor: True)
    monkeypatch.setattr(hostoffload, "to_host", lambda tensor: found.append(tensor) or move(tensor))
    return found


def test_results_are_exact(moves):
    exact = model()
    converted = offload(copy.deepcopy(exact))
    x = torch.randn(64, 32)

    assert equal(step(exact, x), step(converted, x))
    assert moves
    assert equal(exact.state_dict().values(), converted.state_dict().values())


def test_parameters_buffers_and_small_tensors_stay(moves):
    converted = offload(model())
    converted(torch.randn(64, 32))
    own = {t.untyped_storage() for t in [*converted.parameters(), *converted.buffers()]}

    assert all(t.nbytes <= 64 * 32 * 4 and t.untyped_storage() not in own for t in moves)
    assert min(t.numel() for t in moves) >= 32  # the expanded row goes as one row


def test_a_tensor_saved_twice_is_moved_once(moves):
    converted = offload(model())
    x = torch.randn(64, 32)
    loss = converted(x).sum()

    assert [t.untyped_storage() for t in moves].count(x.untyped_storage()) == 1
    loss.backward()
    assert (
        len([1 for entries in converted.forward.wrapper.packer.dedup._packed.values() for r in entries.values() if r()])
        == 0
    )


class Changing(nn.Module):
    """Changes its input between two products of it; with ``another`` a tensor is saved between the first and that."""

    def __init__(self, another):
        super().__init__()
        self.another = another

    def forward(self, x, w):
        first = x * w
        if self.another:
            first = first.exp()
        x.add_(1)
        return first + x * w


def test_a_tensor_changed_in_place_between_two_savings_is_moved_twice(moves):
    x, w = torch.rand(20, 20), torch.rand(20, 20, requires_grad=True)
    expected = x * (x * w.detach()).exp() + (x + 1)
    (grad,) = torch.autograd.grad(offload(Changing(another=True))(x, w).sum(), w)

    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("convert", [offload, lambda module: module], ids=["offload", "exact"])
def test_a_tensor_changed_in_place_while_it_is_copied_is_an_error(moves, convert):
    """The copy runs beside the device's computations, and may have read either."""
    loss = convert(Changing(another=False))(torch.randn(20, 20), torch.randn(20, 20, requires_grad=True)).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_are_waited_for_one_tensor_later_and_fetched_one_ahead(moves, monkeypatch):
    log = []

    class Noted(hostoffload.AtOnce):
        def away(self, tensors):
            return self._noted("away", super().away(tensors))

        def back(self, tensors):
            return self._noted("back", super().back(tensors))

        def _noted(self, what, copied):
            number = int(copied.tensors[0].flatten()[0])
            log.append(f"{what} {number}")
            return hostoffload.Copied(copied.tensors, lambda: log.append(f"{what} {number} done"))

    class Products(nn.Module):
        def forward(self, w):
            for number in (1, 2, 3):
                w = w * torch.full((20, 20), number)
            return w

    monkeypatch.setattr(hostoffload, "AtOnce", Noted)
    w = torch.randn(20, 20, requires_grad=True)
    loss = offload(Products())(w).sum()
    assert log == ["away 1", "away 1 done", "away 2", "away 2 done", "away 3", "away 3 done"]
    log.clear()
    loss.backward()

    assert log == ["back 3", "back 3 done", "back 2", "back 2 done", "back 1", "back 1 done"]
    assert torch.equal(w.grad, torch.full((20, 20), 6.0))


@pytest.mark.parametrize("lay_out", [lambda t: t.t(), lambda t: t[::2], lambda t: t[:1].expand(40, 40), lambda t: t[3]])
def test_any_layout_comes_back(moves, lay_out):
    class Product(nn.Module):
        def forward(self, x, w):
            return lay_out(x) * w

    x = torch.randn(40, 40 * 8)[:, ::8]
    w = torch.randn(lay_out(x).shape, requires_grad=True)
    (grad,) = torch.autograd.grad(offload(Product())(x, w).sum(), w)

    assert torch.equal(grad, lay_out(x))


def test_a_parameter_changed_before_backward_is_noticed():
    """With hooks around a saved tensor, autograd itself does not look."""
    converted = offload(model())
    loss = converted(torch.randn(64, 32, requires_grad=True)).sum()
    with torch.no_grad():
        converted.b.weight.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_on_the_cpu_keeps_its_tensors_where_they_are(monkeypatch):
    monkeypatch.setattr(hostoffload, "to_host", lambda _: pytest.fail("moved"))
    exact = model()
    x = torch.randn(64, 32)

    assert equal(step(exact, x), step(offload(copy.deepcopy(exact)), x))


def test_fake_tensors_leave_for_host_memory(monkeypatch):
    made = []
    move = hostoffload.to_host
    monkeypatch.setattr(hostoffload, "to_host", lambda tensor: made.append(move(tensor)) or made[-1])
    converted, mode = offload(model()), fake.fake_mode()
    with simulated(profiles.get("t4")), fake.faked(converted, mode, place()), mode:
        x = torch.randn(64, 32, device="cuda")
        loss = converted(x).sum()
        assert all(t.device.type == "cpu" for t in made)
        loss.backward()

    assert made


def test_no_hooks_without_gradients(monkeypatch):
    monkeypatch.setattr(forward, "saved_tensors_hooks", lambda *_: pytest.fail("hooked"))
    with torch.no_grad():
        offload(model())(torch.randn(64, 32))


def test_a_copy_moves_tensors_of_its_own():
    converted = offload(model())
    twin = copy.deepcopy(converted)

    assert twin.forward.module is twin
    assert twin.forward.wrapper.packer.dedup is not converted.forward.wrapper.packer.dedup
    assert twin.forward.wrapper.packer.placement is not converted.forward.wrapper.packer.placement


def test_compiling_is_refused(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    with pytest.raises(ConversionError, match="saved-tensor hooks"):
        offload(model())(torch.randn(64, 32))


@pytest.mark.parametrize("kind", [nn.Tanh, nn.Sigmoid, nn.ReLU])
def test_a_forward_without_backward_keeps_nothing(kind):
    """These operators save their own output: a node that held it through Python would hold itself for ever."""
    converted, outputs = offload(nn.Sequential(nn.Linear(4, 4), kind())), []
    converted[1].register_forward_hook(lambda module, args, out: outputs.append(weakref.ref(out.untyped_storage())))
    for _ in range(3):
        converted(torch.randn(2, 4))
    gc.collect()

    assert [storage() for storage in outputs] == [None] * 3


def test_gradients_of_gradients_are_exact():
    exact = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, found = torch.randn(2, 4, requires_grad=True), []
    for each in (exact, offload(copy.deepcopy(exact))):
        (first,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *each.parameters()]))

    assert equal(*found)


def test_an_output_changed_before_backward_is_noticed():
    out = offload(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))(torch.randn(2, 4))
    with torch.no_grad():
        out.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
