"""Fit the efficiencies of the cost model to published pairs: ``.venv/bin/python benchmarks/fit_efficiencies.py``.

Every pair of ``published_times.toml`` with use "fit" is simulated once; then the shares below are chosen by least
squares on the logarithms of estimate over figure. A share that the pairs say little of stays near where it stands in
``efficiencies.toml``. What is found is printed, to be written there, and nothing is written by itself. The shares that
are there came of a fit that began elsewhere (0.45 to 0.85, depthwise 0.08), so fitting again moves them a little.
A share that came later was fitted alone, so that no other moved, as arguments name it::

    .venv/bin/python benchmarks/fit_efficiencies.py "uneven grouped convolution:half"
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scipy.optimize import least_squares

from actbench.measuring.bench import Session
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.simulator.cost.clock import computing
from actbench.simulator.cost.rates import Efficiencies, published

PAIRS = Path(__file__).with_name("published_times.toml")

FITTED = (
    ("matmul", "fp32"),
    ("matmul", "half"),
    ("convolution", "fp32"),
    ("convolution", "tf32"),
    ("convolution", "half"),
    ("convolution", "memory"),
    ("grouped convolution", "half"),
    ("uneven grouped convolution", "half"),
    ("depthwise convolution", "fp32"),
    ("depthwise convolution", "half"),
    ("normalization", "memory"),
    ("reduction", "memory"),
    ("elementwise", "memory"),
)
SUSTAINED = ("t4", "rtx-3090")
"""Devices that hold other clocks than those that their peak rates are given for: one figure more each."""

TRUST = 0.05
"""By how much a published figure may be off, as a share."""
LOOSE = 0.35
"""By how much a share may be off from where it stands, as a share."""
HIGHEST = 0.97
FASTEST = 1.3
"""The highest share, and how far a card may be above the clock that its rates are given for."""

Done = Counter[Any]
"""Operators of a step, and how often each is called."""


class Wanted(NamedTuple):
    """What is fitted: shares of kinds of operators, and devices with clocks of their own. The rest stays as it is."""

    shares: Sequence[tuple[str, str]] = FITTED
    devices: Sequence[str] = SUSTAINED


def main(chosen: Sequence[str] = ()) -> None:
    """Fit all, or the shares that are named as kind:type, and print what was found.

    Raises:
        SystemExit: A share that is named is none of those that are fitted.
    """
    unknown = [name for name in chosen if name not in map(":".join, FITTED)]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: no share that is fitted; known: {', '.join(map(':'.join, FITTED))}")
    wanted = Wanted([each for each in FITTED if ":".join(each) in chosen], ()) if chosen else Wanted()
    pairs = [pair for pair in tomllib.loads(PAIRS.read_text())["pair"] if pair["use"] == "fit"]
    steps = [done_in(pair["case"]) for pair in pairs]
    clocks = [profiles.shipped()[device].sustained for device in wanted.devices]
    start = [share(published(), *name) for name in wanted.shares] + clocks
    begun = [math.log(value) for value in start]

    def errors(logarithms: Sequence[float]) -> list[float]:
        values = [math.exp(value) for value in logarithms]
        speeds = [speed(pair, step, values, wanted) for pair, step in zip(pairs, steps, strict=True)]
        off = [math.log(found / pair["published"]) for found, pair in zip(speeds, pairs, strict=True)]
        moved = [now - before for now, before in zip(logarithms, begun, strict=True)]
        return [each / TRUST for each in off] + [each / LOOSE for each in moved]

    highest = [HIGHEST] * len(wanted.shares) + [FASTEST] * len(wanted.devices)
    limits = [math.log(0.02)] * len(begun), [math.log(value) for value in highest]
    found = [math.exp(value) for value in least_squares(errors, begun, bounds=limits).x]
    for (kind, name), value in zip(wanted.shares, found, strict=False):
        print(f"{kind}: {name} = {value:.3f}")
    for device, value in zip(wanted.devices, found[len(wanted.shares) :], strict=True):
        print(f"{device}: sustained = {value:.2f}")
    for pair, step in zip(pairs, steps, strict=True):
        estimated = speed(pair, step, found, wanted)
        print(f"{pair['case']['model']} {pair['case']['device_profile']}: {estimated / pair['published'] - 1:+.1%}")


def done_in(case: Mapping[str, Any]) -> Done:
    """Simulate a case and return its operators."""
    session = Session(Case(**case, meter="simulated"))
    session.memory()
    print("simulated:", session.case.name, file=sys.stderr, flush=True)
    meter: Any = session.meter
    return Counter(each.work for each in meter.done if each.work.kind is not None)


def speed(pair: Mapping[str, Any], step: Done, values: Sequence[float], wanted: Wanted) -> float:
    """Return samples a second with these values, were the host never late."""
    device = pair["case"]["device_profile"]
    rates = profiles.get(device).rates
    assert rates is not None
    if device in wanted.devices:  # the rates are those of the clock that stands in the file
        factor = values[len(wanted.shares) + wanted.devices.index(device)] / profiles.shipped()[device].sustained
        rates = replace(rates, flops={name: rate * factor for name, rate in rates.flops.items()})
    shares = with_shares(published(), values, wanted)
    return float(pair["case"]["batch_size"] / sum(computing(work, rates, shares) * n for work, n in step.items()))


def share(efficiencies: Efficiencies, kind: str, name: Any) -> float:
    """Return one share."""
    found = efficiencies.kinds[kind]
    return found.memory if name == "memory" else found.flops[name]


def with_shares(efficiencies: Efficiencies, values: Sequence[float], wanted: Wanted) -> Efficiencies:
    """Return the efficiencies with those that are wanted replaced."""
    kinds = dict(efficiencies.kinds)
    for (kind, name), value in zip(wanted.shares, values, strict=False):
        before = kinds[kind]
        change: dict[str, Any] = {"memory": value} if name == "memory" else {"flops": {**before.flops, name: value}}
        kinds[kind] = replace(before, **change)
    return replace(efficiencies, kinds=kinds)


if __name__ == "__main__":
    main(sys.argv[1:])
