"""Sessions of scripts: what a run says of scripts that come to no step, of schemes, and of the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trainings import TRAINING, WEIGHTS, RunScript

from actbench import scheme as schemes
from actbench.model.measured import Measurement
from actbench.model.records import Failure
from actbench.tools.script.answers.suggestions import suggestions
from actbench.units import MIB


def test_a_script_is_measured_by_its_lines(run: RunScript) -> None:
    found = run(TRAINING)

    assert isinstance(found, Measurement)
    assert (found.weights_bytes, found.optimizer_bytes) == (WEIGHTS, 2 * WEIGHTS)
    assert found.built is not None
    assert (found.built.batch_size, found.built.micro_batches) == (512, 1)
    assert found.timeline is not None
    lines = {(holder.kind, holder.line) for holder in found.timeline.holders}
    assert ("saved", "train.py:9 hidden = model[1](model[0](x.cuda()))") in lines
    assert ("optimizer", "train.py:12 optimizer.step()") in lines
    assert {line for kind, line in lines if kind == "weights"} == {
        "train.py:6 model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.L…"
    }


CAST = TRAINING.replace("    hidden", "    with torch.autocast('cuda', dtype=torch.bfloat16):\n     hidden").replace(
    "    loss = ", "     loss = "
)
EVALUATION = "    with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):\n     model(x.cuda())\n"


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("text", "autocast"),
    [
        (TRAINING, None),
        (CAST, "bfloat16"),
        (f"{CAST}{EVALUATION}", "bfloat16"),
        (f"{TRAINING}{EVALUATION}", None),
    ],
)
def test_a_measurement_names_the_type_of_the_autocast_that_trains(
    run: RunScript, text: str, autocast: str | None
) -> None:
    found = run(text)

    assert isinstance(found, Measurement)
    assert (found.dtype, found.autocast) == ("float32", autocast)


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("print('nothing')", (), "no optimizer of torch has stepped"),
        ("import sys; sys.exit(3)", (), r"ended by sys.exit\(3\) \(train.py:1"),
        ("import sys; sys.exit()", (), "no optimizer of torch has stepped"),
        ("input('go on? ')", (), r"reads standard input.*train.py:1"),
        ("import io, pickle\npickle.load(io.BytesIO())", (), r"EOFError: Ran out of input \(train.py:2"),
        (
            "import argparse; p = argparse.ArgumentParser(); p.add_argument('x'); p.parse_args()",
            (),
            "sys.exit",
        ),
        (
            "a = 1\nb = a['x']",
            (),
            r"TypeError: 'int' object is not subscriptable \(train.py:2 b = a\['x'\]",
        ),
        (
            "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)",
            (),
            "starts other processes.*--gpus",
        ),
        (
            (
                "import torch\nlayer = torch.nn.Linear(8, 8).cuda().share_memory()\nassert layer.weight.is_shared()\n"
                "torch.multiprocessing.get_context('spawn').Process(target=print, args=(layer,)).start()"
            ),
            (),
            r"starts other processes \(given its tensors\).*--gpus.*train.py:4",
        ),
        (
            TRAINING.replace(".cuda()", ""),
            (),
            "trains on the CPU: none of its tensors is on the card.*--device cuda",
        ),
        (
            "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
            (),
            r"ConnectionRefused.*train.py:2",
        ),
        ("import os\nos.kill(os.getpid(), 9)", (), "killed by signal 9"),
        ("raise ValueError", (), r"ValueError \(train.py:1"),
        ("import queue\nqueue.Queue().get_nowait()", (), r"Empty at \S+/queue.py:\d+ raise Empty \(train.py:2"),
        (TRAINING.replace("    optimizer.step()\n", ""), (), r"is optimizer.step\(\) missing"),
        (TRAINING.replace("x.cuda()", "x"), (), r"same device.*aten::addmm.*train.py:9"),
    ],
)
def test_a_script_that_comes_to_no_step_says_why(
    run: RunScript, text: str, arguments: tuple[str, ...], message: str
) -> None:
    found = run(text, *arguments)

    assert isinstance(found, Failure)
    with pytest.raises(ValueError, match=message):
        raise ValueError(found.message)


@pytest.mark.slow
def test_a_script_that_catches_everything_is_measured(run: RunScript) -> None:
    loop = TRAINING.replace("for (x,)", "while True:\n  try:\n   for (x,)")
    head, body = loop.split("   for (x,)")
    body = body.replace("\n    ", "\n      ")
    found = run(f"{head}   for (x,){body}  except BaseException:\n   pass\n")

    assert isinstance(found, Measurement)
    assert found.built is not None
    assert found.built.refused == ("checkpoint",)


@pytest.mark.exhaustive
def test_a_script_that_ends_after_one_step_is_measured(run: RunScript) -> None:
    found = run(TRAINING + "    break\n")

    assert isinstance(found, Measurement)
    assert found.weights_bytes == WEIGHTS
    assert any("no step began with the optimizer's state" in text for text in found.warnings)


def test_an_optimizer_without_state_makes_none_in_a_later_step(run: RunScript) -> None:
    found = run(ONE_STEP_OF_SGD)

    assert isinstance(found, Measurement)
    assert not any("optimizer's state" in text for text in found.warnings)


ONE_STEP_OF_SGD = """
import torch
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
layer(torch.ones(8, 64, device="cuda")).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("scheme", "holds"),
    [
        ("fewbit:3", lambda exact, found: found.activation_bytes < exact.activation_bytes),
        ("adam8bit", lambda exact, found: found.optimizer_bytes < 0.3 * exact.optimizer_bytes),
        ("lora:4", lambda exact, found: found.optimizer_bytes < 0.1 * exact.optimizer_bytes),
        ("optimizer_offload", lambda exact, found: found.optimizer_bytes < 0.1 * exact.optimizer_bytes),
        ("offload", lambda exact, found: found.activation_bytes < exact.activation_bytes),
    ],
)
@pytest.mark.sampled(slow=1)
def test_schemes_act_in_a_script(run: RunScript, scheme: str, holds: Callable[[Any, Any], bool]) -> None:
    text = TRAINING.replace("model[2](hidden)", "model(x.cuda())").replace("hidden = model[1](model[0](x.cuda()))", "")
    exact, found = run(text), run(text, scheme=scheme)

    assert isinstance(found, Measurement), found
    assert holds(exact, found)
    assert found.sites


@pytest.mark.slow
def test_a_scheme_that_does_not_fit_the_script_is_a_failure_with_the_reason(run: RunScript) -> None:
    found = run(TRAINING, scheme="checkpoint")

    assert isinstance(found, Failure)
    assert found.reason in ("nothing-converted", "unsupported")


ENCODER = """
import torch
from torch import nn

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 4, batch_first=True), 2).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(2, 4, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.exhaustive
def test_no_adapters_are_suggested_where_an_encoder_of_torch_reads_its_weights(run: RunScript) -> None:
    exact, adapted = run(ENCODER, limit=100 * MIB), run(ENCODER, scheme="lora:16")

    assert isinstance(exact, Measurement), exact
    assert exact.built is not None
    assert exact.built.refused == ("lora:16",)
    assert [each.scheme for each in suggestions(exact)] == ["adam8bit"]
    assert isinstance(adapted, Failure)
    assert "read the weights of 6 linear layers directly (layers.0.self_attn.out_proj, …)" in adapted.message


@pytest.mark.exhaustive
def test_the_loss_in_pieces_that_is_suggested_finds_its_head(run: RunScript) -> None:
    """The model names no head, as no model of one's own does."""
    text = TRAINING.replace("nn.Linear(1024, 256)", "nn.Linear(1024, 8000)").replace(
        "hidden = model[1](model[0](x.cuda()))", "labels = x.new_zeros(len(x), dtype=torch.long).cuda()"
    )
    text = text.replace("model[2](hidden).square().mean()", "nn.functional.cross_entropy(model(x.cuda()), labels)")
    text = text.replace("torch.randn(4096", "torch.randn(40960").replace("batch_size=512", "batch_size=4096")
    exact = run(text, limit=500 * MIB)
    assert isinstance(exact, Measurement), exact
    (scheme,) = [each.scheme for each in suggestions(exact) if each.scheme.startswith("chunked_loss")]
    found = run(text, scheme=scheme)

    assert scheme == "chunked_loss:8,head=2"
    assert isinstance(found, Measurement), found
    assert found.peak_bytes < 0.8 * exact.peak_bytes


@pytest.mark.exhaustive
def test_an_optimizer_is_replaced_that_a_scheduler_holds(run: RunScript) -> None:
    scheduled = TRAINING.replace(
        "for (x", "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)\nfor (x"
    )
    exact, found = (run(f"{scheduled}    scheduler.step()\n", scheme=scheme) for scheme in ("exact", "adam8bit"))

    assert isinstance(found, Measurement), found
    assert (found.optimizer_bytes or 0) < 0.3 * exact.optimizer_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize(("times", "stopped_after"), [(8, 3), (2, None)])
def test_a_measurement_says_where_the_script_was_stopped(run: RunScript, times: int, stopped_after: int | None) -> None:
    found = run(TRAINING.replace("4096", str(times * 512)))

    assert isinstance(found, Measurement)
    assert found.built is not None
    assert found.built.stopped_after == stopped_after


@pytest.mark.exhaustive
def test_schemes_that_may_help_are_those_of_the_cards_that_the_script_takes(run: RunScript) -> None:
    whole, headless = run(TRAINING), run(TRAINING.replace("nn.Linear(1024, 256)", "nn.Linear(1024, 1024)"))

    assert isinstance(whole, Measurement)
    assert isinstance(headless, Measurement)
    assert set(whole.remedies) <= set(schemes.examples(("saved tensors", "recomputation", "loss")))
    assert "offload" in whole.remedies
    assert "checkpoint" not in whole.remedies, "it has no blocks"
    assert "chunked_loss" not in headless.remedies, "two layers have the most outputs"


@pytest.mark.exhaustive
def test_memory_that_runs_out_is_a_failure_with_the_line(run: RunScript) -> None:
    found = run(TRAINING.replace("batch_size=512", "batch_size=4096").replace("4096, 256", "4096, 256"), raise_oom=True)

    assert isinstance(found, Measurement)  # 24 GiB are enough

    text = "import torch\nx = [torch.zeros(2**30, device='cuda') for _ in range(10)]"
    failed = run(text, raise_oom=True)

    assert isinstance(failed, Failure)
    assert failed.reason == "out-of-memory"
    assert "train.py:2" in failed.message


ENDED = """
import torch, time
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    while True:
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
finally:
    {}
"""


@pytest.mark.slow
def test_a_script_that_never_ends_is_measured(run: RunScript) -> None:
    found = run(ENDED.format("while True: time.sleep(0.1)"))

    assert isinstance(found, Measurement)
    assert found.built is not None
    assert found.built.stopped_after == 3


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("last", ["1 / 0", "raise SystemExit(3)", "torch.cuda.CUDAGraph()"])
def test_what_a_script_raises_while_it_ends_is_no_failure(run: RunScript, last: str) -> None:
    found = run(ENDED.format(last))

    assert isinstance(found, Measurement)
    assert found.built is not None
    assert found.built.stopped_after == 3


@pytest.mark.slow
def test_an_error_before_the_end_is_a_failure(run: RunScript) -> None:
    found = run(ENDED.format("1 / 0").replace("optimizer.step()", "break"))

    assert isinstance(found, Failure)
    assert "ZeroDivisionError" in found.message


POOL = """
import multiprocessing
import torch
{}model = torch.nn.Linear(64, 64).cuda()
def twice(number):
    return 2 * number
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = pool.map(twice, range(2), 1)
    if found != [0, 2]:
        raise ValueError(found)
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_pool_whose_workers_cannot_begin_is_a_failure_with_the_line(run: RunScript) -> None:
    found = run(POOL.format(""))

    assert isinstance(found, Failure)
    assert "workers of a multiprocessing.Pool end before they have work" in found.message
    assert 'train.py:8 with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:' in found.message


@pytest.mark.slow
def test_a_pool_whose_workers_need_no_card_has_its_results(run: RunScript) -> None:
    assert isinstance(run(POOL.format("if __name__ == '__main__': ")), Measurement)


def test_a_refusal_names_the_line(run: RunScript) -> None:
    found = run("import torch\ntorch.distributed.rpc.init_rpc('first')\n")

    assert isinstance(found, Failure)
    assert "torch.distributed.rpc.init_rpc is not simulated" in found.message
    assert found.message.endswith("(train.py:2 torch.distributed.rpc.init_rpc('first'))")


PREPARING = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
class Data(L.LightningDataModule):
    def prepare_data(self):
        print("prepared")
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 32)), 8)
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
options = dict(devices=2, accelerator="gpu", strategy="ddp", logger=False, enable_checkpointing=False)
L.Trainer(max_epochs=1, enable_progress_bar=False, **options).fit(Model(), datamodule=Data())
"""


@pytest.mark.slow
def test_lightning_prepares_data_in_the_first_of_two_processes(run: RunScript) -> None:
    """It waits at a monitored barrier of a group of its own."""
    found = run(PREPARING, processes=2)

    assert isinstance(found, Measurement)
    assert "all-reduce" in {each.kind for each in found.communication}


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_a_script_may_tell_torch_not_to_compile(run: RunScript, told: bool) -> None:
    """torch reads it where its compiler is imported, which is done for all runs before the script begins."""
    text = TRAINING.replace("hidden = model[1](model[0](x.cuda()))", "hidden = torch.compile(model)(x.cuda())")
    text = text.replace("model[2](hidden)", "hidden")
    found = run(f"import os\nos.environ['TORCH_COMPILE_DISABLE'] = '{told:d}'\n{text}")

    assert isinstance(found, Measurement), found
    assert any("Compiled with" in each for each in found.warnings) != told
