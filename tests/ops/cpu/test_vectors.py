import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_processor_without_wide_vectors_gives_the_same_bytes():
    code = (
        "import torch\n"
        "from actbench.methods.fewbit.ops import stepwise\n"
        "from actbench.methods.fewbit.ops.stepwise import decode_reference, encode_reference\n"
        "x = torch.randn(2049)\n"
        "for bits in range(1, 5):\n"
        "    bounds, levels = torch.randn(2**bits - 1).sort().values, torch.randn(2**bits)\n"
        "    packed = stepwise.encode(x, bounds, bits, False)\n"
        "    assert torch.equal(packed, encode_reference(x, bounds, bits, False))\n"
        "    assert torch.equal(stepwise.decode(packed, levels, x, bits), decode_reference(packed, levels, x, bits))\n"
        "print('equal')"
    )
    env = os.environ | {"NUMBA_CPU_NAME": "generic"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "equal\n", done.stderr
