from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.methods.actnn import bitallocation
from actbench.methods.actnn.bitallocation import BitAllocation, variance
from actbench.methods.actnn.solver import error_of, least_variance
from actbench.packing.samplegradients import SampleGradients, samples
from actbench.packing.sitestate import SiteState


def sites(count, **fields):
    return [SiteState(str(index), 0, **fields) for index in range(count)]


def see(site, ranges, gradients, elements=100):
    """Let a place see a step: a forward and a backward pass."""
    site.begin(torch.empty(elements))
    if site.watched:
        site.ranges = torch.as_tensor(ranges, dtype=torch.float32)
        site.gradients = torch.as_tensor(gradients, dtype=torch.float32)


def left(found, costs):
    return sum(cost * mean_error(site.bits) for site, cost in zip(found, costs, strict=True))


def mean_error(bits):
    """What an average leaves where a part of the elements has one bit more."""
    part = bits % 1
    return (1 - part) * error_of(int(bits)) + part * error_of(int(bits) + 1)


def test_all_places_have_the_average_at_first():
    one, two = SiteState("one", 0), SiteState("two", 0, per_sample=True)
    BitAllocation([one, two], 2.5, 10)

    assert (one.bits, two.bits) == (2.5, 2.5)


def test_bits_go_where_the_variance_is():
    """Costs 1 : 49/9 : 225/9 : 961/9 deserve one bit more each."""
    four = sites(4)
    shares = BitAllocation(four, 3.5, 10)
    costs = [1, 49 / 9, 225 / 9, 961 / 9]
    shares.begin()
    for site, cost in zip(four, costs, strict=True):
        see(site, cost * 10, 1000 / site.factor)
    even = left(four, costs)
    shares.begin()

    assert [site.bits for site in four] == [2, 3, 4, 5]
    assert even == pytest.approx(sum(costs) * (1 / 49 + 1 / 225) / 2)
    assert left(four, costs) == pytest.approx(4 / 9)


def test_large_tensors_weigh_more():
    small, large = sites(2)
    shares = BitAllocation([small, large], 2.05, 1)
    shares.begin()
    see(small, 1, 1, elements=10)
    see(large, 100, 1, elements=1000)  # the same mean squared range, so the same cost
    shares.begin()

    assert [small.bits, large.bits] == least_variance([1, 1], [10, 1000], 2.05 * 1010)
    assert small.bits > large.bits


def test_a_step_is_watched_every_so_often():
    (site,) = sites(1)
    shares = BitAllocation([site], 2, 3)
    watched = []
    for _ in range(8):
        shares.begin()
        watched.append(site.watched)
        see(site, 1, 1)

    assert watched == [True, False, False, True, False, False, True, False]
    assert site.ranges is None or site.watched


def test_every_step_can_be_watched():
    one, two = sites(2)
    shares = BitAllocation([one, two], 2, 1)
    for cost in (100, 0.01, 100):
        shares.begin()
        see(one, 1, 1)
        see(two, cost, 1)
        shares.begin()
        assert one.watched
        assert (one.bits < two.bits) == (cost > 1)
        see(one, 1, 1)
        see(two, cost, 1)


def test_a_step_without_a_backward_pass_is_watched_on():
    (site,) = sites(1)
    shares = BitAllocation([site], 2, 100)
    shares.begin()
    site.begin(torch.empty(100))
    site.ranges = torch.ones(())
    shares.begin()
    assert site.watched
    see(site, 1, 1)
    shares.begin()

    assert not site.watched


def test_bits_of_every_sample_count_where_their_gradients_are_known():
    """The bits of a layer are the mean of what its samples would be given."""
    rows, whole = SiteState("rows", 0, per_sample=True, sample_gradients=SampleGradients()), SiteState("whole", 0)
    shares = BitAllocation([rows, whole], 3, 10)
    shares.begin()
    with samples([0, 1]):
        rows.begin(torch.empty(2, 100))
    rows.ranges = torch.tensor([1.0, 400.0])
    rows.see_gradient(torch.tensor([[3**0.5], [1.0]]))
    see(whole, 10, 1, elements=100)
    shares.begin()
    # of each row, ranges * gradient * rows / elements; the share of 1/4 is the same for all
    expected = least_variance([1 * 3 / 100, 400 * 1 / 100, 10 / 100], [100, 100, 100], 3 * 300)

    assert rows.bits == (expected[0] + expected[1]) / 2
    assert whole.bits == expected[2]
    assert expected[1] > expected[0]


def test_a_layer_has_whole_bits_where_the_gradients_of_its_samples_are_not_known():
    """By range alone a bit less would go to the samples of small range, which may be those with all of the gradient."""
    rows, whole = SiteState("rows", 0, per_sample=True), SiteState("whole", 0)
    shares = BitAllocation([rows, whole], 3, 10)
    shares.begin()
    see(rows, [1, 400], [3, 1], elements=200)
    see(whole, 10, 1, elements=100)
    shares.begin()

    assert [rows.bits, whole.bits] == least_variance([401 * 4 / 200, 10 / 100], [200, 100], 3 * 300)


def test_the_history_takes_the_place_of_the_mean_gradient():
    site = SiteState("rows", 0, per_sample=True, sample_gradients=SampleGradients())
    shares = BitAllocation([site], 2, 10)
    shares.begin()
    with samples([3, 1]):
        site.begin(torch.empty(2, 50))
    site.ranges = torch.tensor([4.0, 4.0])
    site.see_gradient(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))

    assert site.gradients.tolist() == [1, 25]
    assert variance(site).tolist() == [0.25 * 4 * 1 / 50, 0.25 * 4 * 25 / 50]


def test_a_tensor_that_is_shared_costs_what_both_lose_and_weighs_once():
    owner, sharer, other = sites(3)
    shares = BitAllocation([sharer, owner, other], 2, 10)
    shares.begin()
    see(owner, 1, 1)
    see(other, 5, 1)
    sharer.begin(torch.empty(100))
    sharer.share(owner)
    sharer.gradients, sharer.factor = torch.tensor(99.0), 0.5
    shares.begin()

    expected = least_variance([0.25 * 1 + 0.5 * 99, 0.25 * 5], [100, 100], 2 * 200)
    assert [owner.bits, other.bits] == expected
    assert owner.bits > other.bits
    assert sharer.bits == 2


def test_a_place_that_shares_with_itself_has_its_own_tensor():
    (site,) = sites(1)
    site.begin(torch.empty(10))
    site.share(site)

    assert (site.owner, site.elements) == (None, 10)


def test_places_that_did_not_run_are_left_out():
    ran, did_not, forward_only, frozen = sites(4)
    shares = BitAllocation([ran, did_not, forward_only, frozen], 2, 10)
    did_not.bits = 5
    shares.begin()
    see(ran, 1, 1)
    see(forward_only, 1, 1)
    forward_only.gradients = None
    frozen.gradients = torch.ones(())
    shares.begin()

    assert [ran.bits, did_not.bits, forward_only.bits, frozen.bits] == [2, 5, 2, 2]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_overflow_leaves_the_average_and_the_next_step_is_watched(bad):
    one, two, three = sites(3)
    shares = BitAllocation([one, two, three], 2, 100)
    shares.begin()
    for site, cost in ((one, bad), (two, 1), (three, 1000)):
        see(site, cost, 1)
    shares.begin()
    assert one.bits == 2
    assert two.bits < three.bits
    assert two.bits + three.bits == 4
    assert one.watched
    for site in (one, two, three):
        see(site, 1, 1)
    shares.begin()

    assert [one.bits, two.bits, three.bits] == [2, 2, 2]
    assert not one.watched


def test_costs_are_read_when_they_are_there_and_never_waited_for(monkeypatch):
    class Event:
        there = False

        def query(self):
            return self.there

        def synchronize(self):
            pytest.fail("waited")

    event = Event()
    monkeypatch.setattr(bitallocation, "_recorded", lambda device: event)
    one, two = sites(2)
    shares = BitAllocation([one, two], 2, 1)
    shares.begin()
    see(one, 1, 1)
    see(two, 100, 1)
    for _ in range(3):
        shares.begin()
        assert (one.bits, two.bits, one.watched) == (2, 2, False)
    event.there = True
    shares.begin()

    assert (one.bits, two.bits, one.watched) == (1, 3, True)


def test_what_fake_steps_saw_is_not_read_and_real_steps_are_watched_after_them():
    (site,) = sites(1)
    shares = BitAllocation([site], 2, 100)
    with FakeTensorMode():
        for _ in range(2):
            shares.begin()
            assert site.watched
            see(site, 1, 1)
            site.ranges, site.gradients = torch.ones(()), torch.ones(())
    shares.begin()
    assert site.watched
    see(site, 1, 1)
    shares.begin()

    assert not site.watched


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_sets_the_bits_of_its_own_places(copied):
    pair = sites(2)
    shares = BitAllocation(pair, 2, 1)
    shares.begin()
    for site in pair:
        see(site, 1, 1)
    (one, two), twin = copied((pair, shares))
    assert (one.ranges, one.gradients, one.watched) == (None, None, False)
    twin.begin()
    see(one, 1, 1)
    see(two, 100, 1)
    twin.begin()

    assert [one.bits, two.bits] == [1, 3]
    assert [site.bits for site in pair] == [2, 2]
