import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actbench import scheme as schemes
from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.variance import rounding_variance
from actbench.methods.randomized.ops.sketch import Sketching, batch_variance, variance
from actbench.methods.randomized.sketched import sketched
from actbench.methods.randomized.variance import sketch_variance
from actbench.packing.hooked import HookedForward
from actbench.packing.savedtensors import SharingTable
from actbench.scheme.setup import TrainingSetup


class Net(nn.Module):
    """A sketched layer on the data, dropout over more than 624 numbers, and a sketched layer behind it."""

    def __init__(self, kind, recomputed=False, dim=6):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3)
        table = SharingTable()
        self.first = sketched(self.first, Sketching(kind, dim=dim), table)
        self.last = sketched(self.last, Sketching(kind, dim=dim), table)
        self.recomputed = recomputed

    def head(self, x):
        return self.last(input=self.dropout(x))

    def forward(self, x):
        hidden = self.first(x)
        return checkpoint(self.head, hidden, use_reentrant=False) if self.recomputed else self.head(hidden)


def setup_of(module):
    return TrainingSetup(module, loss=lambda model, batch: (model(batch["x"]) + 1).square().sum())


@pytest.fixture
def one_thread():
    """For so little, starting threads would take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def batch():
    torch.manual_seed(3)
    return {"x": torch.randn(30, 5) + 1}


@pytest.mark.parametrize(
    "kind",
    [
        "gaussian",
        *(pytest.param(k, marks=pytest.mark.sampled(slow=2)) for k in ("wta", "dct", "hadamard", "rows_distinct")),
    ],
)
def test_what_is_observed_is_what_is_predicted(kind, batch, one_thread):
    """Over 400 sketches whose squared errors spread as widely as their mean: 5 %, so that 25 % is five times that."""
    found = sketch_variance(setup_of(Net(kind)), batch, seed=0, repeats=400)

    assert found.observed == pytest.approx(found.predicted, rel=0.25)
    assert found.batch > 0


def test_the_prediction_is_the_sum_of_the_layers_formulas(batch):
    net, x = Net("rademacher"), batch["x"]
    net.dropout.p = 0.0
    found = sketch_variance(setup_of(net), batch, seed=0)
    hidden = torch.nn.functional.linear(x, net.first.weight, net.first.bias).detach()
    grad = 2 * (torch.nn.functional.linear(hidden, net.last.weight, net.last.bias) + 1).detach()
    pairs = [(x, grad @ net.last.weight.detach()), (hidden, grad)]
    length = sum(float((y.t() @ x).square().sum()) for x, y in pairs)

    assert found.predicted == pytest.approx(sum(variance("rademacher", x, y, 6) for x, y in pairs) / length, rel=1e-4)
    assert found.batch == pytest.approx(sum(batch_variance(x, y) for x, y in pairs) / length, rel=1e-4)


def test_recomputed_layers_are_counted_once(batch):
    torch.manual_seed(0)
    plain = sketch_variance(setup_of(Net("rows")), batch, seed=0)
    torch.manual_seed(0)
    again = sketch_variance(setup_of(Net("rows", recomputed=True)), batch, seed=0)

    assert again.predicted == pytest.approx(plain.predicted, rel=1e-6)
    assert again.batch == pytest.approx(plain.batch, rel=1e-6)


def test_nothing_of_the_model_is_changed(batch):
    net = Net("norm")
    sketch_variance(setup_of(net), batch, seed=0)

    assert net.first.sketching == net.last.sketching == Sketching("norm", dim=6)
    assert not net.first._forward_hooks
    assert all(parameter.grad is None for parameter in net.parameters())


def test_layers_that_keep_their_input_add_no_variance(batch):
    found = sketch_variance(setup_of(Net("gaussian", dim=30)), batch, seed=0)

    assert (found.predicted, found.observed) == (0, 0)


def test_frozen_weights_have_no_variance(batch):
    net = Net("gaussian")
    net.first.weight.requires_grad = net.last.weight.requires_grad = False

    assert sketch_variance(setup_of(net), batch, seed=0) is None


def few_bits(spec, net):
    torch.manual_seed(0)
    return schemes.build(spec).apply(setup_of(net))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 40), nn.Dropout(0.5), nn.Linear(40, 3))


@pytest.mark.parametrize("spec", ["actnn:L2", "gact:L1"])
def test_rounding_to_one_bit_less_has_five_times_the_variance(spec, batch, one_thread):
    found = [rounding_variance(few_bits(f"{spec},bits={bits}", layers()), batch, 0, 50).observed for bits in (2, 3)]

    assert found[0] / found[1] == pytest.approx((2**3 - 1) ** 2 / (2**2 - 1) ** 2, rel=0.15)


def test_the_variance_of_the_batch_is_that_of_a_mean_over_its_rows(one_thread):
    """Of rows that are drawn from one distribution, and cut into parts at random."""
    rows = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(5, 40, bias=False), nn.Linear(40, 1, bias=False))
    setup = TrainingSetup(net, loss=lambda model, batch: model(batch["x"]).square().mean())
    each = []
    for row in rows:
        grads = torch.autograd.grad(setup.forward({"x": row[None]}), list(net.parameters()))
        each.append(torch.cat([grad.flatten() for grad in grads]).double())
    exact = torch.stack(each)
    expected = exact.var(0).sum() / 400 / exact.mean(0).square().sum()
    found = rounding_variance(schemes.build("actnn:L2").apply(setup), {"x": rows}, 0, repeats=1, parts=40)

    assert found.batch == pytest.approx(float(expected), rel=0.5)
    assert [(each.name, each.value) for each in found.diagnostics()] == [
        ("quantization_variance_observed", found.observed),
        ("sgd_variance", found.batch),
    ]


def test_lists_of_a_batch_are_cut_with_its_rows(one_thread):
    """As labels of detection are: a list with something for each row."""

    def loss(model, batch):
        assert len(batch["x"]) == len(batch["labels"])
        return sum(model(x).square().mean() * scale for x, scale in zip(batch["x"], batch["labels"], strict=True))

    setup = schemes.build("actnn:L2").apply(TrainingSetup(nn.Linear(5, 2), loss=loss))

    assert rounding_variance(setup, {"x": torch.randn(8, 5), "labels": [1.0] * 8}, 0, repeats=1, parts=4).batch > 0


def test_rounding_leaves_the_model_as_it_was_and_needs_rows_to_cut(batch):
    setup = few_bits("gact:L2", layers())
    found = rounding_variance(setup, batch, seed=0, parts=20)

    assert found.observed > 0
    assert found.batch is None
    assert [each.name for each in found.diagnostics()] == ["quantization_variance_observed"]
    assert HookedForward.of(setup.module).hooks.packer.codec == GroupQuantization()
    assert all(parameter.grad is None for parameter in setup.module.parameters())


@pytest.mark.parametrize("spec", ["actnn:L0", "gact:swap"])
def test_nothing_rounded_has_no_variance(spec, batch):
    assert rounding_variance(few_bits(spec, layers()), batch, seed=0) is None
