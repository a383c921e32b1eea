from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        f"import os\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nimport torch\nfrom test_huggingface import ActbenchCallback, roberta, trainer\n"
        "model = roberta()\n"
        "torch.save(model.state_dict(), f'{sys.argv[1]}/untrained{os.environ[\"RANK\"]}.pt')\n"
        "run = trainer(model, Path(sys.argv[1]), ActbenchCallback('gact:L1+fewbit:3'), max_steps=4)\n"
        "run.train()\n"
        "assert run.accelerator.num_processes == 2\n"
        "assert type(run.model_wrapped).__name__ == 'DistributedDataParallel'\n"
        "assert all('actbench/saved_bytes' in entry for entry in run.state.log_history if 'loss' in entry)\n"
        "torch.save(model.state_dict(), f'{sys.argv[1]}/{run.args.process_index}.pt')\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*launch, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    one, other, before = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in (0, 1, "untrained0"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, one[name]) for name, tensor in before.items())
