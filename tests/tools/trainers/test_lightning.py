from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from actbench.errors import UsageError
from actbench.measuring.inspection import trace
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.model import convert
from actbench.tools.trainers.lightning import ActbenchCallback

WIDTH, ROWS, BATCH = 64, 64, 32
NAMES = ["actbench/activation_bytes", "actbench/exact_bytes", "actbench/saved_bytes"]
Plain = Callable[[nn.Module], bool]


def network() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 2))


class Classifier(pl.LightningModule):
    """Calls its one model, as most do, and not itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


class Failing(pl.Callback):
    def __init__(self, error: type[BaseException] = ZeroDivisionError) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise self.error


class Packed(Logger):
    """A logger that keeps what it is given."""

    name = version = "kept"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def of(self, name: str) -> list[float]:
        return [entry[name] for entry in self.entries if name in entry]


def loader(batch_size: int = BATCH) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long(), torch.arange(ROWS)), batch_size=batch_size)


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "default_root_dir": folder,
            "max_epochs": 8,
            "log_every_n_steps": 1,
            "logger": Packed(),
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": list(callbacks),
            **settings,
        }
    )


def logged(run: pl.Trainer, name: str) -> list[float]:
    logger: Any = run.logger
    found: list[float] = logger.of(name)
    return found


def kept_bytes(model: nn.Module, rows: int = BATCH) -> int:
    """Return what the forward pass of a network keeps; the loss outside keeps the log-probabilities besides."""
    setup = TrainingSetup(model, loss=lambda module, given: F.cross_entropy(module(given["x"]), given["y"]))

    def make_batch() -> dict[str, Tensor]:
        return {"x": torch.zeros(rows, WIDTH), "y": torch.zeros(rows, dtype=torch.long)}

    log_probabilities, total_weight, loss = 4 * 2 * rows, 4, 4
    return trace(setup, make_batch).total_bytes - log_probabilities - total_weight - loss


@pytest.mark.parametrize(
    "spec",
    ["actnn:L3", *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("fewbit:3", "gact:L2", "randomized:0.5"))],
)
def test_fitting_learns_logs_the_bytes_of_the_ledger_and_leaves_a_plain_module(
    spec: str, tmp_path: Path, is_plain: Plain
) -> None:
    module = Classifier()
    parameters = list(module.parameters())
    run = trainer(tmp_path, ActbenchCallback(spec))
    run.fit(module, loader())

    losses = logged(run, "loss")
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    assert all(now is then for now, then in zip(module.parameters(), parameters, strict=True))
    assert is_plain(module)

    exact, packed = kept_bytes(network()), kept_bytes(convert(network(), spec))
    if spec == "gact:L2":  # which shares other bits out than the average that the ledger takes
        packed = int(logged(run, NAMES[0])[0])
    assert [set(logged(run, name)) for name in NAMES] == [{packed}, {exact}, {exact - packed}]
    assert 0 < packed < exact


def test_fitting_with_manual_optimization(tmp_path: Path, is_plain: Plain) -> None:
    module = Manual()
    run = trainer(tmp_path, ActbenchCallback("gact:L2"))
    run.fit(module, loader())

    losses = logged(run, "loss")
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    assert set(logged(run, "actbench/exact_bytes")) == {kept_bytes(network())}
    assert is_plain(module)


def test_accumulated_batches_are_measured_one_by_one(tmp_path: Path) -> None:
    run = trainer(tmp_path, ActbenchCallback("gact:L1", measure_every=1), max_steps=2, accumulate_grad_batches=4)
    run.fit(Classifier(), loader(8))

    assert set(logged(run, "actbench/exact_bytes")) == {kept_bytes(network(), 8)}


def test_validation_in_the_middle_keeps_and_logs_nothing(tmp_path: Path, is_plain: Plain) -> None:
    module = Classifier()
    run = trainer(tmp_path, ActbenchCallback("gact:L1"), max_epochs=2)
    run.fit(module, loader(), loader())

    logger: Any = run.logger
    validations = [entry for entry in logger.entries if "val_loss" in entry]
    assert len(validations) == 2
    assert not any(name in entry for entry in validations for name in NAMES)
    assert is_plain(module)


@pytest.mark.parametrize(
    "spec", ["actnn:L3", *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("fewbit:3", "gact:L2"))]
)
def test_a_checkpoint_loads_into_the_plain_module_and_a_run_goes_on_from_it(spec: str, tmp_path: Path) -> None:
    module = Classifier()
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    run = trainer(tmp_path, ActbenchCallback(spec), saving, max_steps=4, enable_checkpointing=True)
    run.fit(module, loader())
    plain = Classifier()
    plain.load_state_dict(torch.load(tmp_path / "step=4.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in module.state_dict().items())

    again, callback, seen = Classifier(), ActbenchCallback(spec), []

    class Looking(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            assert callback.session is not None
            seen.append(callback.session.adapted())

    torch.manual_seed(5)
    resumed = trainer(tmp_path, callback, Looking(), max_steps=4)
    resumed.fit(again, loader(), ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert len(logged(resumed, "loss")) == 2
    if spec == "gact:L2":
        assert seen[0][":HookedForward"]["passes"] == 2
    if spec == "fewbit:3":
        assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_a_checkpoint_of_another_scheme_is_refused(tmp_path: Path, is_plain: Plain) -> None:
    run = trainer(tmp_path, ActbenchCallback("gact:L2"), max_steps=1)
    run.fit(Classifier(), loader())
    run = trainer(tmp_path, ActbenchCallback("gact:L2"), max_steps=1, enable_checkpointing=True)
    run.fit(Classifier(), loader())
    module = Classifier()
    checkpoint = str(next(tmp_path.rglob("*.ckpt")))
    with pytest.raises(UsageError, match="does not fit 'fewbit:3'"):
        trainer(tmp_path, ActbenchCallback("fewbit:3"), max_steps=2).fit(module, loader(), ckpt_path=checkpoint)
    assert is_plain(module)


def test_after_an_exception_nothing_is_left(tmp_path: Path, is_plain: Plain) -> None:
    module = Classifier()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, ActbenchCallback("gact:L2+fewbit:3"), Failing()).fit(module, loader())
    assert is_plain(module)

    with pytest.raises(SystemExit):
        trainer(tmp_path, ActbenchCallback("gact:L2"), Failing(KeyboardInterrupt)).fit(module, loader())
    assert is_plain(module)


def test_one_callback_serves_run_after_run(tmp_path: Path, is_plain: Plain) -> None:
    module, callback = Classifier(), ActbenchCallback("actnn:L3")
    for _ in range(2):
        run = trainer(tmp_path, callback, max_steps=2)
        run.fit(module, loader())
        assert logged(run, "actbench/saved_bytes")
        assert is_plain(module)


def test_mixed_precision_is_measured_as_such(tmp_path: Path) -> None:
    run = trainer(tmp_path, ActbenchCallback("gact:L1"), max_steps=1, precision="bf16-mixed")
    run.fit(Classifier(), loader())

    (exact,) = logged(run, "actbench/exact_bytes")
    assert kept_bytes(network()) / 2 < exact < 1.5 * kept_bytes(network())


@pytest.mark.exhaustive
def test_two_processes_train_one_module(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nimport torch\n"
        "from test_lightning import ActbenchCallback, Classifier, loader, logged, trainer\n"
        "module, folder = Classifier(), Path(sys.argv[1])\n"
        "run = trainer(folder, ActbenchCallback('gact:L1+fewbit:3'), strategy='ddp', devices=2, max_steps=4)\n"
        "run.fit(module, loader())\n"
        "assert run.world_size == 2\n"
        "assert run.global_rank or logged(run, 'actbench/saved_bytes')\n"
        "torch.save(module.state_dict(), folder / f'{run.global_rank}.pt')\n"
    )
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    trained = [name for name, _ in Classifier().named_parameters()]
    assert all(torch.equal(one[name], other[name]) for name in trained)
    assert any(not torch.equal(one[name], Classifier().state_dict()[name]) for name in trained)
