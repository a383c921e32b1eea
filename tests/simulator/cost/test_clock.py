"""The host issues operators, the device computes them, and copies run beside both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actbench.model.estimated import EstimatedTime
from actbench.model.records import Phase
from actbench.simulator.cost.clock import COPYING, WAITING, computing, estimate, issuing
from actbench.simulator.cost.links import Links, LinkShares
from actbench.simulator.cost.rates import Curve, Efficiencies, Efficiency, Host, Rates, Surface
from actbench.simulator.cost.recorder import Done
from actbench.simulator.cost.work import OperatorWork

LINKS = Links(peer=1e10, network=1e10, devices=8)
RATES = Rates({"fp32": 1e12, "half": 4e12}, bandwidth=1e11, link=1e10, launch=0.0, links=LINKS, source="")
WHOLE = Efficiency({"fp32": 1.0, "half": 0.5}, memory=1.0, ramp=0.0)
KINDS = dict.fromkeys(("matmul", "elementwise", "packing", "host copy"), WHOLE)
HOST = Host(1e-6, 1e-6, 1e-6, 1e-7, 1e-6, 0.0, bandwidth=1e10)
SHARES = Efficiencies(KINDS, HOST, LinkShares(1.0, 0.0, 0.0, 0.0), overlap=20.0)


def work(seconds: float, kind: str = "elementwise") -> OperatorWork:
    """Return an operator that moves bytes for so long."""
    return OperatorWork(kind, kind, moved=round(seconds * RATES.bandwidth), launches=1)


def copy(seconds: float) -> OperatorWork:
    """Return a copy to the host that takes so long."""
    return OperatorWork("to_host", "host copy", moved=round(2 * seconds * RATES.link), launches=1)


def step(*works: OperatorWork, phase: Phase = "forward", asynchronous: bool = True) -> EstimatedTime:
    """Return the time of a step of these operators."""
    return estimate([Done(phase, each, False) for each in works], RATES, SHARES, asynchronous=asynchronous)


def test_large_operators_take_what_the_device_needs() -> None:
    assert step(*[work(1e-3)] * 5).step_seconds == pytest.approx(5e-3)


def test_small_operators_take_what_the_host_needs() -> None:
    time = step(*[work(1e-8)] * 50)

    assert time.step_seconds == pytest.approx(50 * SHARES.host.forward, rel=0.01)
    assert next(each for each in time.by_operator if each.name == WAITING).seconds > 0.9 * time.step_seconds


def test_a_host_that_has_run_ahead_hides_small_operators_behind_a_large_one() -> None:
    assert step(work(1e-3), *[work(1e-8)] * 50).step_seconds == pytest.approx(1e-3, rel=0.01)


def test_on_a_cpu_issuing_and_computing_add_up() -> None:
    assert step(*[work(1e-6)] * 10, asynchronous=False).step_seconds == pytest.approx(10 * 2e-6, rel=0.01)


def test_a_copy_hides_behind_what_is_computed_meanwhile() -> None:
    hidden = step(copy(1e-3), work(3e-3), copy(1e-3), work(3e-3))

    assert hidden.step_seconds == pytest.approx(6e-3, rel=0.01)


def test_the_device_waits_where_copies_take_longer() -> None:
    waited = step(copy(3e-3), work(1e-3), copy(3e-3), work(1e-3))

    assert waited.step_seconds == pytest.approx(6e-3, rel=0.01)
    assert next(each for each in waited.by_operator if each.name == COPYING).seconds > 3e-3


def test_what_the_host_computes_holds_up_the_device() -> None:
    done = [Done("optimizer", work(1e-3), True)]

    found = estimate(done, RATES, SHARES)

    assert found.step_seconds == pytest.approx(1e-3 * RATES.bandwidth / SHARES.host.bandwidth, rel=0.01)
    assert found.optimizer_seconds == pytest.approx(found.step_seconds)


@pytest.mark.parametrize(("precision", "rate"), [("fp32", 1e12), ("half", 2e12), ("tf32", 1e12)])
def test_products_run_at_the_share_of_their_precision(precision: str, rate: float) -> None:
    product = OperatorWork("mm", "matmul", flops=10**10, precision=precision, launches=1)  # type: ignore[arg-type]

    assert computing(product, RATES, SHARES) == pytest.approx(1e10 / rate)


def test_a_shape_that_reaches_half_of_the_share_of_its_kind_takes_twice_as_long() -> None:
    product = OperatorWork("convolution", "matmul", flops=10**10, launches=1)
    slow = replace(product, reached=0.5)

    assert computing(slow, RATES, SHARES) == pytest.approx(2 * computing(product, RATES, SHARES))


def test_operations_and_bytes_that_do_not_overlap_add_up() -> None:
    product = OperatorWork("mm", "matmul", flops=10**9, moved=10**8, launches=1)
    serial = replace(SHARES, overlap=1.0)

    assert computing(product, RATES, serial) == pytest.approx(1e-3 + 1e-3)
    assert computing(product, RATES, SHARES) == pytest.approx(1e-3, rel=0.05)


def test_on_a_cpu_a_copy_to_the_host_and_what_the_host_computes_are_as_any_other() -> None:
    done = [Done("forward", copy(1e-3), False), Done("optimizer", work(1e-3), True)]

    found = estimate(done, RATES, SHARES, asynchronous=False)

    copied = copy(1e-3).moved / RATES.bandwidth
    assert found.step_seconds == pytest.approx(copied + 1e-3, rel=0.01)
    assert found.forward_seconds == pytest.approx(copied, rel=0.05)


def test_what_was_measured_of_an_operator_goes_before_the_shares_of_its_kind() -> None:
    relu = OperatorWork("relu", "elementwise", moved=10**6, launches=1)
    measured = replace(SHARES, operators={("relu", "fp32"): Curve((10**5, 10**6), (1e-3, 7e-3))})

    assert computing(relu, RATES, measured) == pytest.approx(7e-3)
    assert computing(replace(relu, moved=10**7), RATES, measured) == pytest.approx(7e-3 + 9e6 / RATES.bandwidth)
    assert computing(replace(relu, precision="half"), RATES, measured) == computing(relu, RATES, SHARES)
    assert computing(replace(relu, name="gelu"), RATES, measured) == computing(relu, RATES, SHARES)


def test_a_form_that_was_not_measured_takes_what_the_operator_took() -> None:
    plain, rows = Curve((10**6,), (7e-3,)), Curve((10**6,), (2e-3,))
    measured = replace(SHARES, operators={("sum", "fp32"): plain, ("sum of rows", "fp32"): rows})
    total = OperatorWork("sum", "elementwise", moved=10**6, launches=1)

    assert computing(replace(total, form="of rows"), RATES, measured) == pytest.approx(2e-3)
    assert computing(replace(total, form="of columns"), RATES, measured) == pytest.approx(7e-3)


def test_a_convolution_with_channels_last_takes_what_one_took_and_else_what_the_default_format_took() -> None:
    default, last = Curve((10**6,), (7e-3,)), Curve((10**6,), (2e-3,))
    one = OperatorWork("convolution", "matmul", moved=10**6, launches=1, has_channels_last=True)
    usual = replace(one, has_channels_last=False)
    old = {("convolution", "fp32"): default}
    new = {**old, ("convolution with channels last", "fp32"): last}

    assert computing(one, RATES, replace(SHARES, operators=old)) == pytest.approx(7e-3)
    assert computing(one, RATES, replace(SHARES, operators=new)) == pytest.approx(2e-3)
    assert computing(usual, RATES, replace(SHARES, operators=new)) == pytest.approx(7e-3)


def test_a_measured_operator_that_has_nothing_to_multiply_only_moves_its_bytes() -> None:
    surface = Surface(((1e6, 1e4), (1e9, 1e6)), (1e-5, 1e-3))
    measured = replace(SHARES, operators={("convolution_backward", "fp32"): surface})
    bias_alone = OperatorWork("convolution_backward", "matmul", moved=10**8, launches=1)

    assert computing(bias_alone, RATES, measured) == pytest.approx(1e8 / RATES.bandwidth)
    assert computing(replace(bias_alone, moved=0), RATES, measured) <= 1e-5
    assert surface.at(0, 1, least=1e-6) == 1e-6


def test_an_operator_that_packs_is_called_by_a_hook_but_for_the_optimizers() -> None:
    host = replace(SHARES.host, packing=7e-6, optimizer=3e-6)
    packing = OperatorWork("smaq_encode", "packing", moved=1, launches=1)

    found = {phase: issuing(packing, phase, replace(SHARES, host=host)) for phase in ("forward", "optimizer")}

    assert found == {"forward": 7e-6, "optimizer": 3e-6}


@pytest.mark.parametrize(
    ("precision", "has_bfloat16", "rates", "rate", "name"),
    [
        ("half", True, replace(RATES, has_bfloat16=False), 1e12, "bfloat16"),
        ("half", False, replace(RATES, has_bfloat16=False), 2e12, ""),
        ("half", True, RATES, 2e12, ""),
        ("half", False, replace(RATES, flops={"fp32": 1e12}), 1e12, "float16"),
        ("fp8", True, RATES, 1e12, "float8"),
        ("tf32", False, RATES, 1e12, ""),
    ],
)
def test_a_type_without_units_takes_the_time_of_float32_and_is_named(
    precision, has_bfloat16, rates, rate, name
) -> None:
    product = OperatorWork("mm", "matmul", flops=10**10, precision=precision, launches=1, has_bfloat16=has_bfloat16)

    time = estimate([Done("forward", product, False)], rates, SHARES)

    assert computing(product, rates, SHARES) == pytest.approx(10**10 / rate, rel=0.01)
    assert time.replaced == ((name,) if name else ())
