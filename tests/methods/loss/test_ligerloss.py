"""Liger's kernels beside torch's loss: run by triton's interpreter in a process of its own, if they are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from actbench import scheme as schemes
from actbench.errors import MeasurementError, SpecError
from actbench.measuring.bench import measure
from actbench.measuring.failures import failure_of
from actbench.model.records import Case

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))

BESIDE_TORCH = """
import itertools
import torch
from torch import nn
from torch.nn import functional as F
from actbench import scheme as schemes
from actbench.errors import ConversionError, IdleError
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup

class Model(nn.Module):
    def __init__(self, tied, bias, loss):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.head, self.loss = nn.Linear(16, 50, bias=bias), loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        return self.loss(self.head(torch.tanh(self.middle(self.embed(ids)))), labels)

def plain(logits, labels):
    return F.cross_entropy(logits.view(-1, 50), labels.view(-1))

def shifted(logits, labels):
    logits, labels = logits[..., :-1, :].float(), labels[..., 1:]
    return F.cross_entropy(logits.reshape(-1, 50), labels.reshape(-1), label_smoothing=0.1)

def summed(logits, labels):
    return 3 * F.cross_entropy(logits.view(-1, 50), labels.view(-1), reduction="sum")

def capped(logits, labels):
    return F.cross_entropy((torch.tanh(logits / 2) * 2).view(-1, 50), labels.view(-1))

def gradients(model, **keep):
    model.zero_grad()
    model(ids, labels).backward(**keep)
    return [p.grad for p in model.parameters() if p.requires_grad]

def assert_like(found, exact):
    # Rounding follows the largest terms of a sum, not what is left of them where they cancel.
    error = (found - exact).norm() / exact.norm()
    assert error < 1e-6, error

def converted(model):
    return schemes.build("chunked_loss:liger,head=head").apply(TrainingSetup(model))

torch.manual_seed(0)
ids, labels = torch.randint(0, 50, (3, 7)), torch.randint(0, 50, (3, 7))
labels[0, 2:5] = -100
switches = (False, True)
for tied, bias, loss, frozen in itertools.product(switches, switches, (plain, shifted, summed), ("", "middle")):
    exact, found = Model(tied, bias, loss), Model(tied, bias, loss)
    for model in (exact, found):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    found = converted(found).module
    torch.testing.assert_close(found(ids, labels), exact(ids, labels))
    for one, other in zip(gradients(found), gradients(exact), strict=True):
        assert_like(one, other)

model = converted(Model(False, True, plain)).module
value = model(ids, labels)
value.backward(retain_graph=True)
once = [p.grad.clone() for p in model.parameters()]
value.backward()
for twice, one in zip((p.grad for p in model.parameters()), once, strict=True):
    torch.testing.assert_close(twice, 2 * one)

for act, error, text in (
    (lambda: gradients(converted(Model(False, True, capped)).module), ConversionError, "caps its logits"),
    (lambda: gradients(model, create_graph=True), RuntimeError, "second derivative"),
    (lambda: converted(Model(False, True, plain)).parts[0].after(), IdleError, "does nothing"),
):
    try:
        act()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(text)

case = Case(model="tiny-llama", scheme="chunked_loss:liger", batch_size=4, sequence_length=64, meter="cpu",
            warmup_steps=0, min_steps=1, min_seconds=0.0)
row = measure(case)
exact = measure(case.model_copy(update={"scheme": "exact"}))
assert row.gradient_error < 1e-5, row.gradient_error
assert row.activation_bytes < exact.activation_bytes
assert any("unknown" in warning for warning in row.warnings), row.warnings
print("alike")
"""


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="liger-kernel and triton are not installed")
def test_loss_and_gradients_are_those_of_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", BESIDE_TORCH], env=environment, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stderr
    assert "alike" in ended.stdout


def test_it_is_unavailable_where_its_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = Case(model="tiny-llama", scheme="chunked_loss:liger", batch_size=1, sequence_length=8)

    for meter, reason in (
        ("simulated", "is not simulated"),
        ("cpu", "runs on CUDA" if INSTALLED else "actbench[liger]"),
    ):
        with pytest.raises(MeasurementError) as raised:
            measure(case.model_copy(update={"meter": meter}))
        assert reason in str(raised.value)
        assert failure_of(raised.value).reason == "unavailable"


def test_without_it_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from actbench.methods.loss import ligerloss

    ligerloss.kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(MeasurementError, match=r'pip install "actbench\[liger\]"'):
        measure(Case(model="tiny-llama", scheme="chunked_loss:liger", batch_size=1, meter="cpu"))


def test_it_is_named_in_place_of_a_number_of_pieces() -> None:
    scheme = schemes.build("chunked_loss:liger")

    assert scheme.spec == "chunked_loss:liger"
    assert schemes.build(scheme.spec) == scheme
    assert schemes.build("chunked_loss:16").spec == "chunked_loss:16"
    with pytest.raises(SpecError, match="'tiger' is neither a number of pieces"):
        schemes.build("chunked_loss:tiger")
    with pytest.raises(SpecError, match="pieces"):
        schemes.build("chunked_loss:0")
