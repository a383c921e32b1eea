"""What a site keeps of its first step: when it holds, and who then still asks the table of shared tensors."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import actbench
from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.packing import SavedTensors, SiteState
from actbench.packing.codecs import Unpacked


class Counting(GroupQuantization):
    asked = 0

    def at(self, x, site):
        type(self).asked += 1
        return super().at(x, site)


@pytest.fixture
def packer():
    Counting.asked = 0
    return SavedTensors(Counting())


def a_pass(packer, *pairs):
    """Pack tensors at sites, end the pass, and return what was packed."""
    found = [packer.pack(x, site) for x, site in pairs]
    packer.settle()
    return found


def made(*shape):
    return torch.randn(*(shape or (8, 64)))


def test_a_plan_holds_while_form_and_settings_are_the_same(packer):
    site = SiteState("a", 2.0)
    for _ in range(3):
        a_pass(packer, (made(), site))
    assert Counting.asked == 1

    changes = [made(4, 64), made(8, 64).t(), made().to(torch.bfloat16)]
    for number, x in enumerate(changes, start=2):
        a_pass(packer, (x, site))
        assert Counting.asked == number
    for number, (name, value) in enumerate((("bits", 4.0), ("row", 64), ("product", True)), start=5):
        setattr(site, name, value)
        (packed,) = a_pass(packer, (changes[-1], site))
        assert Counting.asked == number
    assert packed.bits == 4


def test_a_planned_tensor_is_decoded_like_the_first(packer):
    site, layouts = SiteState("a", 8.0), [made(4, 3, 8, 8).to(memory_format=torch.channels_last) for _ in range(4)]
    for x in layouts:
        (packed,) = a_pass(packer, (x, site))
        back = packed.unpack()

        assert back.stride() == x.stride()
        torch.testing.assert_close(back, x, atol=0.05, rtol=0.0)


def test_a_planned_site_leaves_what_others_hold(packer):
    site, held = SiteState("a", 2.0), made()
    for _ in range(3):
        a_pass(packer, (made(), site))
    packer.exclude.add([held])

    (batch,) = a_pass(packer, (held, site))
    (weight,) = a_pass(packer, (nn.Parameter(made()).view(8, 64).detach(), site))
    (view,) = a_pass(packer, (nn.Parameter(made())[:], site))

    assert isinstance(batch.codec, Unpacked)
    assert not isinstance(weight.codec, Unpacked)  # a detached tensor of a parameter that nobody told of
    assert isinstance(view.codec, Unpacked)


def test_a_site_that_is_alone_asks_no_table(packer, monkeypatch):
    first, second = SiteState("a", 2.0), SiteState("b", 2.0)
    for _ in range(2):
        a_pass(packer, (made(), first), (made(), second))
    monkeypatch.setattr(packer.dedup, "recall", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(packer.dedup, "remember", lambda *_: pytest.fail("told"))

    a_pass(packer, (made(), first), (made(), second))


def test_sites_that_shared_a_tensor_go_on_to_do_so(packer):
    first, second, third = (SiteState(name, 2.0) for name in "abc")
    for _ in range(4):
        x = made()
        one, _, other = a_pass(packer, (x, first), (made(), third), (x, second))

        assert one.parts[0].untyped_storage() is other.parts[0].untyped_storage()
        assert second.owner is first


def test_a_new_site_makes_all_tell_for_a_pass_what_they_pack(packer):
    first, second = SiteState("a", 2.0), SiteState("b", 2.0)
    for _ in range(3):
        a_pass(packer, (made(), first))
    shared = []
    for _ in range(3):
        x = made()
        one, other = a_pass(packer, (x, first), (x, second))
        shared.append(one.parts[0].untyped_storage() is other.parts[0].untyped_storage())

    assert shared == [False, True, True]  # the first pass learns of the site


def test_no_plan_is_kept_for_samples_and_for_truth_values(packer):
    weighed = SiteState("a", 2.0, per_sample=True)
    a_pass(packer, (made(8, 512), weighed), (made() > 0, SiteState("b", 1.0)))
    a_pass(packer, (made(8, 512), weighed))

    assert weighed.plan is None
    assert Counting.asked == 3


def test_copies_have_no_plan(packer):
    site = SiteState("a", 2.0)
    a_pass(packer, (made(), site))

    assert site.plan is not None
    assert copy.deepcopy(site).plan is None
    assert replace(site, plan=None).plan is None


@pytest.mark.parametrize("spec", ["actnn:L2", "gact:L2"])
def test_planned_steps_have_the_gradients_of_first_ones(spec):
    """A model that is copied has no plans, so its step is a first one."""
    torch.manual_seed(0)
    model = actbench.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), spec)
    x = torch.randn(32, 64, requires_grad=True)

    def gradients(model):
        torch.manual_seed(1)
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for _ in range(3):
        gradients(model)
    planned, first = gradients(model), gradients(copy.deepcopy(model))

    assert all(torch.equal(a, b) for a, b in zip(planned, first, strict=True))


@pytest.mark.parametrize("scheme", ["actnn:L1", "actnn:L2"])
def test_a_tensor_without_memory_goes_into_no_kernel(scheme: str) -> None:
    model = actbench.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to("meta"), scheme)

    for _ in range(3):  # from the second pass on sites are planned
        model(torch.randn(16, 64, device="meta")).sum().backward()

    assert model[0].weight.grad.shape == (64, 64)


def test_a_negative_view_keeps_its_plan_and_has_its_values(packer):
    site, other = SiteState("a", 8.0), SiteState("b", 8.0)
    for _ in range(3):
        x = torch.randn(8, 64, dtype=torch.complex64).conj().imag
        (packed, _) = a_pass(packer, (x, site), (made(), other))
        assert torch.allclose(packed.unpack(), x.resolve_neg(), atol=0.1)
    assert Counting.asked == 2
