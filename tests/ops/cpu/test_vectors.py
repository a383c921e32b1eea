import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from actbench.ops.cpu import vectors


@pytest.fixture
def target(monkeypatch):
    def choose(name, features):
        monkeypatch.setattr(vectors, "_config", SimpleNamespace(CPU_NAME=name, CPU_FEATURES=features))
        monkeypatch.setattr(vectors, "features", vectors.features.__wrapped__)
        return vectors.quick_deposits.__wrapped__()

    return choose


@pytest.mark.parametrize(
    ("name", "features", "quick"),
    [("haswell", "+avx2,+bmi2,+fma", True), ("znver2", "+avx2,+bmi2,+fma", False), ("generic", "", False)],
)
def test_deposits_are_used_where_they_are_quick(name, features, quick, target):
    assert target(name, features) is quick


@pytest.mark.slow
def test_a_processor_without_them_gives_the_same_bytes():
    code = (
        "import torch\n"
        "from actbench.ops import stepwise\n"
        "from actbench.ops.activate import cpu as activate\n"
        "from actbench.ops.cpu import vectors\n"
        "from actbench.ops.stepwise import encode_reference\n"
        "assert not vectors.quick_deposits() and not activate.agrees('silu', torch.float32)\n"
        "x = torch.randn(2049)\n"
        "for bits in range(1, 5):\n"
        "    bounds = torch.randn(2**bits - 1).sort().values\n"
        "    assert torch.equal(stepwise.encode(x, bounds, bits, False), encode_reference(x, bounds, bits, False))\n"
        "print('equal')"
    )
    env = os.environ | {"NUMBA_CPU_NAME": "generic"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "equal\n", done.stderr
