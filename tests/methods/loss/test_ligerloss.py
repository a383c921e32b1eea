"""Liger's kernels beside torch's loss: run by triton's interpreter in a process of its own, if they are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.errors import MeasurementError, SpecError
from actbench.measuring.bench import measure
from actbench.measuring.failures import failure_of
from actbench.methods.loss import ligerloss
from actbench.methods.loss.crossentropy import How
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


def head_of(rows: int, width: int, classes: int, dtype: torch.dtype, *, frozen: bool = False) -> list[Tensor]:
    noise = torch.Generator().manual_seed(0)
    shapes = (rows, width), (classes, width), (classes,)
    x, w, b = (torch.randn(shape, generator=noise).to(dtype).requires_grad_() for shape in shapes)
    return [x, w.requires_grad_(not frozen), b.requires_grad_(not frozen)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("frozen", [False, True])
def test_without_the_kernels_torch_computes_the_same(dtype: torch.dtype, smoothing: float, frozen: bool) -> None:
    given = head_of(37, 16, 50, dtype, frozen=frozen)
    target = torch.randint(0, 50, (37,), generator=torch.Generator().manual_seed(1))
    target[3:9] = -100
    x, w, b = (each.detach().double().requires_grad_() for each in given)
    exact = F.cross_entropy(F.linear(x, w, b), target, label_smoothing=smoothing, reduction="sum")
    exact.backward()

    with torch.no_grad():
        fused = ligerloss._by_torch(*given, target, How(1, -100, smoothing), [each.requires_grad for each in given])

    off = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    assert fused[0].item() == pytest.approx(exact.item(), rel=off)
    for found, leaf, own in zip(fused[1], (x, w, b), given, strict=True):
        assert (found is not None) == own.requires_grad
        if found is not None and leaf.grad is not None:
            assert found.dtype == dtype
            assert (found.double() - leaf.grad).norm() < off * leaf.grad.norm()


@pytest.mark.parametrize(
    ("rows", "width", "classes", "expected"),
    [(16384, 4096, 32000, 2048), (65536, 4096, 128256, 2048), (64, 64, 256, 16), (10, 64, 32, 10), (1, 8, 100, 1)],
)
def test_pieces_are_as_long_as_by_the_rule_of_the_kernels(rows: int, width: int, classes: int, expected: int) -> None:
    assert ligerloss.piece_rows(rows, width, classes) == expected


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_simulated_loss_holds_one_piece_of_logits_and_the_gradients(dtype: str) -> None:
    tokens, width, classes, size = 2048, 64, 8000, 4 if dtype == "float32" else 2
    case = {
        "model": f"tiny-llama@vocab_size={classes},num_hidden_layers=1,hidden_size={width}",
        "batch_size": 1,
        "sequence_length": tokens,
        "dtype": dtype,
        "optimizer": "sgd",
        "meter": "simulated",
        "device_profile": "a100-80gb",
        "gradient_quality": False,
    }
    found, plain = (
        measure(Case.model_validate({**case, "scheme": scheme})) for scheme in ("chunked_loss:liger", "exact")
    )

    assert ligerloss.piece_rows(tokens, width, classes) == 32
    head = classes * width * size
    logits = tokens * classes * size
    assert plain.peak_bytes - found.peak_bytes > 0.8 * logits
    # hidden states and the gradient of the head wait for the backward pass; the gradient is its parameter's then
    assert found.activation_bytes < plain.activation_bytes - logits + head + 4 * tokens * width * size


def test_on_cuda_the_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    ligerloss.kernels.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as a model on CUDA
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(MeasurementError, match=r'pip install "actbench\[liger\]"') as raised:
        measure(Case(model="tiny-llama", scheme="chunked_loss:liger", batch_size=1, meter="cpu"))
    assert failure_of(raised.value).reason == "unavailable"


def test_it_is_named_in_place_of_a_number_of_pieces() -> None:
    scheme = schemes.build("chunked_loss:liger")

    assert scheme.spec == "chunked_loss:liger"
    assert schemes.build(scheme.spec) == scheme
    assert schemes.build("chunked_loss:16").spec == "chunked_loss:16"
    with pytest.raises(SpecError, match="'tiger' is neither a number of pieces"):
        schemes.build("chunked_loss:tiger")
    with pytest.raises(SpecError, match="pieces"):
        schemes.build("chunked_loss:0")
