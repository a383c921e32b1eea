"""Recurrent layers on a simulated card: cuDNN's bytes by their formula, what torch saves beside them, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actbench.errors import UntraceableError
from actbench.measuring import bench
from actbench.measuring.meters.meter import MemoryReading
from actbench.model.records import Case
from actbench.scheme.setup import Precision, TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.cublas import Workspaces
from actbench.simulator.recurrent import Recurrence
from actbench.simulator.simulated import SimulatedMeter

FLOAT, STEPS, ROWS, WIDTH, HIDDEN = 4, 24, 8, 128, 256
KEPT = {nn.LSTM: 5, nn.GRU: 6, nn.RNN: 1}
WORKED_ON = {nn.LSTM: 11, nn.GRU: 8, nn.RNN: 4}
CARD = replace(profiles.get("rtx-4090"), torch=(2, 14))  # cuBLAS's workspaces stay, wherever a peak is


@pytest.mark.parametrize(
    ("mode", "gates", "reserve", "workspace"), [(2, 4, 736_000_000, 17_730_560), (3, 3, 864_000_000, 13_169_920)]
)
def test_bytes_are_those_that_cudnn_was_published_to_ask_for(
    mode: int, gates: int, reserve: int, workspace: int
) -> None:
    matrices = gates * 320 * (123 + 7 * 320)
    found = Recurrence(mode, 4, 1, 250, 100, 320, matrices, drops_out=False, itemsize=FLOAT, positions=25_000)

    assert (found.reserve_bytes, found.workspace_bytes) == (reserve, workspace)


def read(layer: nn.RNNBase, *, workspaces: bool = True, autocast: bool = False) -> MemoryReading:
    """Return the reading of a step of a layer whose summed output is the loss, without optimizer state."""
    meter = SimulatedMeter(replace(CARD, workspaces=workspaces))
    setup = TrainingSetup(
        layer,
        loss=lambda module, batch: module(batch["x"])[0].float().sum(),
        precision=Precision(autocast=torch.float16 if autocast else None),
        make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )
    shape = (ROWS, STEPS, WIDTH) if layer.batch_first else (STEPS, ROWS, WIDTH)
    return meter.memory(TrainStep(meter.adopt(setup), meter.place({"x": torch.randn(shape)})))


def rounded(*elements: int, size: int = FLOAT) -> int:
    return sum(-(-each * size // 512) * 512 for each in elements)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_what_is_saved_is_the_formula_and_what_torch_saves(kind: Any, options: dict[str, Any]) -> None:
    layer = kind(WIDTH, HIDDEN, **options)
    layers, directions = layer.num_layers, 2 if layer.bidirectional else 1
    row = directions * STEPS * ROWS * HIDDEN
    reserve = (layers * KEPT[kind] + layers - 1) * row
    states = [layers * directions * ROWS * HIDDEN] * (2 if kind is nn.LSTM else 1)

    found = read(layer)

    # the output is returned, and saved by the operator; the input is the batch's
    assert found.activation_bytes == rounded(reserve, row, *states) + 512  # and the loss
    parameters = [parameter.numel() for parameter in layer.parameters()]
    assert found.gradients_bytes == rounded(sum(parameters))  # in one tensor


def test_dropout_keeps_outputs_between_layers_twice() -> None:
    one, other = (read(nn.LSTM(WIDTH, HIDDEN, num_layers=3, dropout=p)) for p in (0.0, 0.2))

    assert other.activation_bytes - one.activation_bytes == 2 * STEPS * ROWS * HIDDEN * FLOAT


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_peak_of_the_backward_pass_has_the_workspace_unless_it_is_left_out(kind: Any) -> None:
    def peak(*, workspaces: bool) -> int:
        return read(kind(WIDTH, HIDDEN, num_layers=2), workspaces=workspaces).peak_bytes

    matrices = sum(p.numel() for p in kind(WIDTH, HIDDEN, num_layers=2).parameters() if p.dim() == 2)

    of_cublas = sum(Workspaces(CARD).kept.values())
    workspace = rounded(matrices + WORKED_ON[kind] * 2 * ROWS * HIDDEN)
    assert peak(workspaces=True) - peak(workspaces=False) == workspace + of_cublas


def test_time_is_the_first_dimension_in_memory() -> None:
    """The input is copied while the operator runs; the gradient of a sum is copied in both orders."""
    one, other = (read(nn.LSTM(WIDTH, HIDDEN, batch_first=batch_first)) for batch_first in (False, True))

    assert one.activation_bytes == other.activation_bytes
    assert other.peak_bytes - one.peak_bytes == rounded(STEPS * ROWS * WIDTH)


def test_under_autocast_weights_are_cast_and_the_copies_saved() -> None:
    layer = nn.LSTM(WIDTH, HIDDEN)
    row, states = STEPS * ROWS * HIDDEN, [ROWS * HIDDEN] * 2
    of_weights = [parameter.numel() for parameter in layer.parameters()]

    found = read(layer, autocast=True)

    halves = rounded(5 * row, row, STEPS * ROWS * WIDTH, *states, *of_weights, size=2)
    assert found.activation_bytes == halves + 512
    assert found.gradients_bytes == rounded(*of_weights)


BUILD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.layers = nn.LSTM(128, 256, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(self.layers.proj_size or 256, 64)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens))[0])

class Packed(Model):
    def forward(self, tokens):
        lengths = torch.tensor([24] * (len(tokens) - 2) + [7, 3])
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0])

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())

def batch(rows):
    return {"x": torch.randint(64, (rows, 24))}

def build():
    return Model(), batch, loss

def projected():
    return Model(proj_size=32), batch, loss

def packed():
    return Packed(), batch, loss
"""


def measured(folder: Path, name: str = "build", **fields: Any) -> Any:
    (folder / "own.py").write_text(BUILD)
    fields = {"meter": "simulated", "device_profile": "rtx-4090", "gradient_quality": False, **fields}
    return bench.Session(Case(model=f"{folder}/own.py:{name}", batch_size=ROWS, **fields)).memory()


def test_a_model_of_two_layers_is_measured_and_its_peak_marked_as_estimated(tmp_path: Path) -> None:
    found = measured(tmp_path)

    reserve = (2 * 5 + 1) * STEPS * ROWS * HIDDEN * FLOAT
    assert found.activation_bytes > reserve
    (reason,) = found.approximate
    assert "what cuDNN keeps of recurrent layers" in reason
    assert reason not in found.warnings
    assert found.estimated is not None
    assert not [each for each in found.estimated.unknown if "rnn" in each]


def test_packed_rows_keep_less_than_padded_ones(tmp_path: Path) -> None:
    packed, padded = (measured(tmp_path, name) for name in ("packed", "build"))

    fewer = (ROWS - 2) * STEPS + 7 + 3 - ROWS * STEPS
    # of the layers' input and output; the head keeps a padded copy of either output, with rows first
    assert packed.activation_bytes - padded.activation_bytes == fewer * (WIDTH + HIDDEN) * FLOAT
    assert packed.approximate == padded.approximate


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["checkpoint,blocks=LSTM", "encode:bf16", "accumulate:2"])
def test_schemes_go_with_recurrent_layers(scheme: str, tmp_path: Path) -> None:
    assert measured(tmp_path, scheme=scheme).activation_bytes < measured(tmp_path).activation_bytes


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("projected", {}, "projections"),
        ("build", {"dtype": "bfloat16"}, "bfloat16"),
        ("build", {"device_profile": "cpu"}, "holds a LSTM"),
    ],
)
def test_what_is_not_known_is_refused(name: str, fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UntraceableError, match=reason):
        measured(tmp_path, name, **fields)


def test_in_eval_mode_there_is_no_backward_pass() -> None:
    with pytest.raises(UntraceableError, match=r"eval mode has no backward pass in cuDNN: call \.train\(\)"):
        read(nn.LSTM(WIDTH, HIDDEN).eval())
