"""The fit of the cost model's shares runs to its end, and finds again what the figures were made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from actbench.simulator import profiles
from actbench.simulator.cost.clock import computing
from actbench.simulator.cost.rates import published
from actbench.simulator.cost.work import OperatorWork

PRODUCTS = Counter({OperatorWork("mm", "matmul", flops=10**12, precision="fp32", moved=10**8, launches=1): 50})
MOVES = Counter({OperatorWork("add", "elementwise", moved=10**9, launches=1): 200, **PRODUCTS})


def test_shares_move_towards_what_was_published(script: Any, monkeypatch: Any, capsys: Any, tmp_path: Any) -> None:
    device = profiles.get("v100-16gb")
    assert device.rates is not None
    known = published().kinds["matmul"]
    faster = replace(known, flops={**known.flops, "fp32": known.flops["fp32"] * 1.1})
    true = replace(published(), kinds={**published().kinds, "matmul": faster})
    steps = {"a": PRODUCTS, "b": MOVES}
    speeds = {
        name: 8 / sum(computing(work, device.rates, true) * count for work, count in step.items())
        for name, step in steps.items()
    }
    file = tmp_path / "pairs.toml"
    file.write_text(
        "".join(
            f'[[pair]]\nuse = "fit"\npublished = {speed}\n'
            f'case = {{ model = "{name}", batch_size = 8, device_profile = "v100-16gb" }}\n'
            for name, speed in speeds.items()
        )
    )
    monkeypatch.setitem(script.main.__globals__, "PAIRS", file)
    monkeypatch.setitem(script.main.__globals__, "done_in", lambda case: steps[case["model"]])

    script.main()

    printed = dict(line.rsplit(" = ", 1) for line in capsys.readouterr().out.splitlines() if " = " in line)
    assert float(printed["matmul: fp32"]) == pytest.approx(faster.flops["fp32"], rel=0.02)
    assert (
        float(printed["convolution: tf32"]) == published().kinds["convolution"].flops["tf32"]
    )  # nothing says anything
    assert float(printed["rtx-3090: sustained"]) == 1.3


@pytest.mark.slow
def test_the_operators_of_a_pair_are_those_of_its_step(script: Any) -> None:
    done = script.done_in({"model": "tiny-roberta", "batch_size": 4, "device_profile": "t4"})

    assert {"matmul", "elementwise", "optimizer"} <= {work.kind for work in done}
