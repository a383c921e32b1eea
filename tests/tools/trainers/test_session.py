from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring.inspection import trace
from actbench.measuring.meters.trace import AllocationTrace
from actbench.model.records import Site, Unreached
from actbench.scheme import Scheme
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.model import conversion_of, convert
from actbench.tools.trainers.probe import Probe
from actbench.tools.trainers.session import ConvertedRun, SchemeCallback

WIDTH, ROWS = 64, 32
Plain = Callable[[nn.Module], bool]


class Network(nn.Module):
    """Returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.layers(x))
        return {"logits": logits} if y is None else {"loss": (logits - y).square().mean(), "logits": logits}


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, WIDTH, generator=generator), "y": torch.randn(rows, 1, generator=generator)}


def open_session(model: nn.Module, spec: str, **settings: Any) -> ConvertedRun:
    return ConvertedRun(model, schemes.build(spec), **settings)


def step(model: nn.Module, rows: int = ROWS) -> None:
    model(**batch(rows))["loss"].backward()


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


@pytest.mark.filterwarnings("ignore:randomized.0.5 takes the gradient")
def test_a_probe_compares_the_gradient_of_one_batch_and_leaves_the_training_as_it_is() -> None:
    torch.manual_seed(3)
    probed, alone = Network(), Network()
    sessions = [open_session(probed, "randomized:0.5", probe=True), open_session(alone, "randomized:0.5")]
    for model in (probed, alone):
        torch.manual_seed(5)
        for _ in range(3):
            step(model)
    probe = sessions[0].watch.probe

    assert probe is not None
    assert probe.error is not None
    assert 0.01 < probe.error < 5
    for mine, other in zip(probed.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
    for session in sessions:
        session.close()


def test_a_probe_of_an_exact_gradient_finds_no_error() -> None:
    model = Network()
    session = open_session(model, "checkpoint,blocks=Linear", probe=True)
    step(model)
    step(model)

    assert session.watch.probe is not None
    assert session.watch.probe.error == 0.0
    session.close()


def test_a_gradient_that_cannot_be_compared_is_warned_of_and_training_goes_on() -> None:
    model, plain = Network(), Network()
    for each in (model, plain):
        run = each.layers.forward
        each.layers.forward = partial(checkpoint, run, use_reentrant=True)  # type: ignore[method-assign]
    session = open_session(model, "fewbit:3", probe=True)
    given = batch()
    given["x"].requires_grad_()
    model(**given)["loss"].backward()  # without a parameter before the block, which autograd.grad then skips
    with pytest.warns(UserWarning, match="the gradient could not be compared: re-entrant checkpointing"):
        model(**given)["loss"].backward()
    for _ in range(2):
        plain(**given)["loss"].backward()

    assert session.watch.probe is not None
    assert session.watch.probe.error is None
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)  # type: ignore[arg-type]
    session.close()


def test_an_error_of_torch_is_a_warning_and_leaves_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    model = Network()
    session = open_session(model, "fewbit:3", probe=True)
    step(model)
    monkeypatch.setattr(torch.autograd, "grad", refuses)
    with pytest.warns(UserWarning, match="the gradient could not be compared: no room"):
        step(model)

    assert session.watch.probe is not None
    assert session.watch.probe.error is None
    assert session.watch.passes == 2
    session.close()


@pytest.mark.filterwarnings("error")
def test_a_pass_without_a_gradient_has_no_error() -> None:
    model = Network().requires_grad_(False)
    probe = Probe(nullcontext, "fewbit:3")
    probe.run(model, lambda module, **given: Network.forward(module, **given), (), batch())
    assert probe.error is None

    given = batch()
    given["x"].requires_grad_()
    probe.run(model, lambda module, **given: Network.forward(module, **given), (), given)
    assert probe.error is None


def test_a_large_error_is_warned_of_and_logged() -> None:
    model = Network()
    callback = SchemeCallback("randomized:0.03", probe=True)
    callback.begin(model)
    step(model)
    with pytest.warns(UserWarning, match="takes the gradient of Network far from the exact one"):
        step(model)

    assert callback.numbers()["actbench/gradient_error"] > 0.5
    callback.close()


def test_an_error_that_records_have_is_warned_of(tmp_path: Any, monkeypatch: Any, make_record: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    record = make_record("fewbit:1", model="tiny", gradient_error=1.6)
    (tmp_path / "results" / "box.jsonl").write_text(record.model_dump_json() + "\n")
    model = Network()
    model.config = type("Config", (), {"name_or_path": "org/tiny"})()  # type: ignore[assignment]
    callback = SchemeCallback("fewbit:1")
    with pytest.warns(UserWarning, match=r"relative error 1\.6 \(measured at batch 8, results/box.jsonl\)"):
        callback.begin(model)
    callback.close()
