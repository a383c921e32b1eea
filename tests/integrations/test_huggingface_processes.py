from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 99,
}


def roberta() -> nn.Module:
    """Return the model that the script takes from test_huggingface.py, before it is trained."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**SIZES, num_labels=2, attention_dropout=0.0, hidden_dropout_prob=0.0)
    return transformers.RobertaForSequenceClassification(config)


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nimport torch\nfrom test_huggingface import ActbenchCallback, roberta, trainer\n"
        "model = roberta()\n"
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

    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, one[name]) for name, tensor in roberta().state_dict().items())
