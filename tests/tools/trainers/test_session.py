"""A session that measures and converts the model of a trainer."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from sessionmodels import ROWS, WIDTH, Network, batch, open_session, step
from torch import Tensor, nn

from actbench.errors import ConversionError
from actbench.measuring.inspection import trace
from actbench.measuring.meters.trace import AllocationTrace
from actbench.model.records import Site, Unreached
from actbench.scheme import Scheme
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.model import conversion_of, convert
from actbench.tools.trainers.session import ConvertedRun, SchemeCallback

Plain = Callable[[nn.Module], bool]


def traced_bytes(model: nn.Module, rows: int = ROWS) -> int:
    setup = TrainingSetup(model, loss=lambda module, given: module(**given)["loss"])
    return trace(setup, lambda: batch(rows)).total_bytes


@pytest.mark.parametrize(
    "spec", ["fewbit:3", "randomized:0.5", "actnn:L3", "gact:L1", "gact:L1+checkpoint,blocks=Linear"]
)
def test_a_step_is_measured_as_the_ledger_has_it(spec: str) -> None:
    model = Network()
    session = open_session(model, spec)
    step(model)
    session.close()

    found = session.watch.last
    assert found is not None
    assert found.exact_bytes == traced_bytes(Network())
    assert found.activation_bytes == traced_bytes(convert(Network(), spec))
    assert found.logged() == {
        "actbench/activation_bytes": found.activation_bytes,
        "actbench/exact_bytes": found.exact_bytes,
        "actbench/saved_bytes": found.exact_bytes - found.activation_bytes,
    }


def test_exact_bytes_by_hand() -> None:
    model = Network()
    session = open_session(model, "fewbit:3")
    step(model)

    elements = ROWS * WIDTH
    logits = 4 * ROWS  # the difference from the labels
    assert session.watch.last is not None
    assert session.watch.last.exact_bytes == 4 * 3 * elements + logits + 4
    gelu, relu = 3 * elements // 8 + 4 * elements, elements // 8 + 4 * elements  # codes, and the next layer's input
    assert session.watch.last.activation_bytes == gelu + relu + logits + 4


def test_shared_out_bits_are_measured_as_the_allocator_has_it() -> None:
    model = Network()
    session = open_session(model, "gact:L2,bits=3")
    step(model)
    model.zero_grad()
    given = batch()
    with AllocationTrace() as allocations:
        gc.collect()
        allocations.mark("begin")
        loss = model(**given)["loss"]
        allocations.mark("forward")
        loss.backward()

    assert session.watch.last is not None
    kept = allocations.live_bytes("forward") - allocations.live_bytes("begin")
    assert session.watch.last.activation_bytes == kept


def test_passes_between_two_that_are_measured_are_left_alone() -> None:
    model = Network()
    session = open_session(model, "fewbit:3", measure_every=3)
    found = []
    for rows in (8, 16, 24, 32, 40):
        step(model, rows)
        assert session.watch.last is not None
        found.append(session.watch.last.exact_bytes)

    first, fourth = traced_bytes(Network(), 8), traced_bytes(Network(), 32)
    assert found == [first, first, first, fourth, fourth]


def test_nothing_is_measured_without_gradients_or_training() -> None:
    model = Network()
    session = open_session(model, "gact:L1")
    with torch.no_grad():
        model(**batch())
    model.eval()
    step(model)

    assert session.watch.last is None


def test_gradients_and_random_numbers_are_those_of_a_converted_model() -> None:
    found = []
    for watched in (True, False):
        model = Network()
        torch.manual_seed(3)
        if watched:
            open_session(model, "gact:L1+fewbit:3")
        else:
            convert(model, "gact:L1+fewbit:3")
        step(model)
        found.append([*(p.grad for p in model.parameters()), torch.rand(4)])

    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # type: ignore[arg-type]


def test_a_model_that_looks_at_values_says_that_savings_are_unknown() -> None:
    class Looking(Network):
        def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
            return super().forward(x * float(x.mean() < 9), y)

    model = Looking()
    session = open_session(model, "fewbit:3", measure_every=1)
    with pytest.warns(UserWarning, match="saved_bytes are not logged"):
        step(model)
    step(model)

    assert session.watch.last is not None
    assert list(session.watch.last.logged()) == ["actbench/activation_bytes"]
    assert next(model.parameters()).grad is not None


def test_closed_nothing_is_left(is_plain: Plain) -> None:
    model = Network()
    session = open_session(model, "gact:L2+fewbit:3")
    step(model)
    session.close()
    session.close()

    assert is_plain(model)


def test_a_copy_trains_and_is_not_watched() -> None:
    model = Network()
    session = open_session(model, "gact:L2")
    twin = copy.deepcopy(model)
    step(twin)

    assert session.watch.last is None
    assert conversion_of(twin) is not None


def test_what_never_runs_is_an_error(is_plain: Plain) -> None:
    model = Network()
    session = open_session(model, "gact:L1")
    nn.functional.linear(batch()["x"], next(model.parameters())).sum().backward()
    with pytest.raises(ConversionError, match="no forward of this Network is ever called"):
        session.check_ran()
    session.close()
    assert is_plain(model)

    for spec in ("fewbit:3", "gact:L1"):  # whose hooks stand around the parts that a step calls
        session = open_session(model, spec)
        model.layers(batch()["x"]).sum().backward()
        with pytest.warns(UserWarning, match="saved bytes are not measured"):
            session.check_ran()
        session.check_ran()
        session.close()
        assert is_plain(model)


@pytest.mark.parametrize("make", [torch.compile, lambda model: nn.Sequential(torch.compile(model))])
def test_a_compiled_model_is_refused(make: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ConversionError, match=r"leave torch.compile out, or .* torch.compile\(actbench.convert"):
        open_session(make(Network()), "fewbit:3")


def test_a_model_compiled_in_place_is_refused() -> None:
    model = Network()
    model.compile()
    with pytest.raises(ConversionError, match="Network is compiled"):
        open_session(model, "gact:L1")


def test_a_scheme_that_replaces_the_whole_model_is_refused(is_plain: Plain) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ConversionError, match="replaces the whole of this Linear"):
        open_session(model, "randomized:0.5")
    assert is_plain(model)


@pytest.mark.parametrize("spec", ["exact", "fewbit:3"])
def test_nothing_to_convert_is_refused_and_leaves_nothing(spec: str, is_plain: Plain) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConversionError):
        open_session(model, spec)
    assert is_plain(model)


def test_with_the_callback_the_scheme_goes_too(is_plain: Plain) -> None:
    model = Network()
    callback = SchemeCallback("gact:L1")
    callback.begin(model)
    gone = weakref.ref(callback)
    del callback
    gc.collect()

    assert gone() is None
    assert is_plain(model)


class WithOptimizerState(Scheme):
    """Works on the optimizer's state too, of which a model knows nothing."""

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        left = Unreached(path="", kind="optimizer state", reason="wrap the optimizer")
        return setup.changed(setup.module, (Site(path="(maps)", was="maps", becomes="other"),), (left,))


def test_what_stays_outside_of_the_model_is_said() -> None:
    with pytest.warns(UserWarning, match="optimizer state stays as it is: wrap the optimizer"):
        session = ConvertedRun(Network(), WithOptimizerState())
    session.check_ran()
