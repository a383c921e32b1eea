import subprocess
import sys

import numba
import pytest


def test_importing_starts_no_thread_pool_and_leaves_numba_alone_and_the_pool_leaves_torchs_threads():
    code = (
        "import numba; before = numba.config.THREADING_LAYER, numba.config.CACHE_DIR\n"
        "import actbench.methods.fewbit.ops.stepwise\n"
        "assert (numba.config.THREADING_LAYER, numba.config.CACHE_DIR) == before\n"
        "try: numba.threading_layer()\n"
        "except ValueError: print('not started')\n"
        "import torch; from actbench.ops import cpu\n"
        "torch.set_num_threads(torch.get_num_threads() + 1); before = torch.get_num_threads()\n"
        "cpu._pool(); print(torch.get_num_threads() - before)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "not started\n0\n"


@pytest.mark.exhaustive
def test_a_read_only_home_costs_the_cache_and_nothing_else(tmp_path):
    code = (
        "import pathlib, torch\n"
        "from actbench.ops import rawkernel\n"
        "assert rawkernel.folder('x', []) is None\n"
        "import actbench.methods.fewbit.ops.stepwise\n"
        "print(torch.ops.actbench.stepwise_encode(torch.ones(8), torch.zeros(1), 1, False).tolist())"
    )
    (tmp_path / "file").write_text("a file where a folder should be")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"XDG_CACHE_HOME": str(tmp_path / "file"), "PATH": ""},
    )
    assert done.stdout == "[255]\n", done.stderr


def test_threads_of_the_caller_are_restored():
    import torch

    import actbench.methods.fewbit.ops.stepwise  # noqa: F401

    numba.set_num_threads(1)
    try:
        torch.ops.actbench.stepwise_encode(torch.ones(100_000), torch.zeros(1), 1, False)
        assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
