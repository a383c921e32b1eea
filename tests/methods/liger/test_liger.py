"""Liger's norms, gated MLPs and rotary embeddings in models: gradients, bytes, and what is refused."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, LlamaConfig, NanoChatConfig, Qwen3Config

from actbench import scheme as schemes
from actbench.errors import ConversionError, MeasurementError, NothingToConvertError
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup
from actbench.testing import check_scheme

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def built(config: Any = LlamaConfig, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config(**SIZES, **more))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # else weights are 1
            nn.init.normal_(parameter, 1, 0.2)
    return model.train()


def converted(model: nn.Module, spec: str = "liger") -> nn.Module:
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(model))).module


def gradients(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward(**options)
    return {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}


def assert_alike(found: dict[str, Tensor], exact: dict[str, Tensor], off: float = 1e-5) -> None:
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() <= off * gradient.norm(), name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config])  # Qwen 3 has norms before the rotary embedding
def test_gradients_are_those_of_the_plain_model(config: Any, attention: str) -> None:
    exact = built(config, attn_implementation=attention)
    model = converted(exact)
    ids = torch.arange(12).view(2, 6)

    assert torch.equal(model(ids).logits, exact(ids).logits)
    assert_alike(gradients(model), gradients(exact))


def test_gradients_in_half_precision_are_as_close_as_those_of_torch() -> None:
    exact = built()
    truth = gradients(exact)
    half = exact.to(torch.bfloat16)
    off = {name: (each - truth[name]).norm() / truth[name].norm() for name, each in gradients(half).items()}

    for name, each in gradients(converted(half)).items():
        assert (each - truth[name]).norm() <= 1.5 * off[name] * truth[name].norm() + 1e-3, name


def test_a_graph_that_is_kept_gives_the_same_gradients_twice() -> None:
    model = converted(built())
    ids = torch.arange(12).view(2, 6)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    once = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    loss.backward()

    assert_alike({name: each.grad for name, each in model.named_parameters()}, once, 1e-7)


@pytest.mark.parametrize(
    "spec", ["liger+checkpoint", "liger+gact:L1.1,only=Linear", "liger+lora:4,target=q_proj/v_proj"]
)
def test_it_goes_with(spec: str) -> None:
    exact = built()
    found = gradients(converted(exact, spec))
    if spec == "liger+checkpoint":
        assert_alike(found, gradients(exact))
    assert all(each.isfinite().all() for each in found.values())


def test_copies_and_pickled_models_have_forwards_of_their_own() -> None:
    exact = built()
    model = converted(exact)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_alike(gradients(other), gradients(exact))


def test_bytes_of_each_layer_are_those_of_the_kernels() -> None:
    """Rows r of width h: a norm adds 4 bytes a row to its input, and the MLP saves gate, up, their product and x."""
    rows, width, inner = 4 * 64, 64, 128
    case = {"model": f"tiny-llama@hidden_size={width},intermediate_size={inner}", "batch_size": 4}
    found = measure(
        Case.model_validate(
            {**case, "sequence_length": 64, "meter": "simulated", "scheme": "liger", "device_profile": "cpu"}
        )
    )
    sites = {site.path.rpartition(".")[2]: site for site in found.sites}

    assert sites["mlp"].bytes_before - sites["mlp"].bytes_after == 4 * rows * inner
    norm = sites["post_attention_layernorm"]
    assert norm.bytes_before - norm.bytes_after == 4 * rows * width  # the normalised input, for the weight's gradient


@pytest.mark.parametrize("norm", [None, nn.RMSNorm(32)])
def test_another_rotary_embedding_of_the_same_name_is_left(norm: nn.Module | None) -> None:
    """NanoChat turns the other way, by a function with the instructions of Llama's."""
    exact: Any = built(NanoChatConfig, pad_token_id=0)
    if norm is None:
        with pytest.raises(NothingToConvertError, match="no gated MLP or rotary embedding"):
            converted(exact)
        return
    exact.model.norm = norm
    ids = torch.arange(12).view(2, 6)

    assert torch.equal(converted(exact)(ids).logits, exact(ids).logits)
    assert_alike(gradients(converted(exact)), gradients(exact))


def test_torchs_selective_checkpointing_may_keep_queries_and_keys() -> None:
    exact: Any = built(use_cache=False)
    model: Any = converted(exact)
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=kept)

    assert_alike(gradients(model), gradients(exact))


def test_second_derivatives_are_refused() -> None:
    with pytest.raises(RuntimeError, match="second derivative"):
        gradients(converted(built()), create_graph=True)


@pytest.mark.exhaustive
def test_compiling_is_refused() -> None:
    model = converted(built())
    ids = torch.arange(12).view(2, 6)
    with pytest.raises(ConversionError, match="Liger's functions cannot be compiled"):
        torch.compile(model, backend="eager")(input_ids=ids, labels=ids)


def test_what_has_none_of_it_is_refused() -> None:
    with pytest.raises(NothingToConvertError, match="no RMS norm"):
        converted(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    with pytest.raises(ConversionError, match="has no RMS norm"):
        converted(converted(built()))


def test_on_cuda_the_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as a model on CUDA
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rms_norm", None)
    with pytest.raises(MeasurementError, match=r'pip install "actbench\[liger\]"'):
        converted(built())


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["liger", "chunked_loss:liger"])
def test_a_cpu_and_a_simulation_agree_on_the_peak(scheme: str) -> None:
    case = Case(
        model="tiny-llama",
        scheme=scheme,
        batch_size=4,
        sequence_length=64,
        meter="cpu",
        warmup_steps=0,
        min_steps=1,
        min_seconds=0.0,
    )
    real = measure(case)
    simulated = measure(case.model_copy(update={"meter": "simulated", "device_profile": "cpu"}))

    assert real.gradient_error is not None
    assert real.gradient_error < 1e-5
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)


@pytest.mark.slow
def test_the_contract_holds() -> None:
    check_scheme("liger", on="tiny-llama")


BESIDE_TORCH = """
import sys
sys.path.insert(0, {folder!r})
import torch
from test_liger import built, converted, gradients, strided_norms
from actbench.methods.liger import functions
from triton import language as tl

class Number(float):
    # the interpreter gives kernels plain numbers, where compiled ones get scalars of Triton
    def to(self, dtype):
        return float(self)

ran, own = [], functions.kernels
own("swiglu").float = Number
norm = own("rms_norm")
norm.rsqrt = lambda x: 1 / tl.sqrt(x)  # Liger's own is on CUDA alone
forward, backward = norm.rms_norm_forward, norm.rms_norm_backward
norm.rms_norm_forward = lambda x, w, eps, offset, *more: forward(x, w, Number(eps), Number(offset), *more)
norm.rms_norm_backward = lambda dy, x, w, rstd, offset, *more: backward(dy, x, w, rstd, Number(offset), *more)
functions.kernels = lambda name: ran.append(name) or own(name)

def assert_alike(found, exact):
    off = [(each - other).norm() / other.norm() for each, other in zip(found, exact, strict=True)]
    assert max(off) < 1e-5, off

exact = built()
assert_alike(gradients(converted(exact)).values(), gradients(exact).values())
layer = torch.nn.Sequential(torch.nn.RMSNorm(8, eps=1e-6))
assert_alike(strided_norms(converted(layer)), strided_norms(layer))
assert {{"rms_norm", "rope", "swiglu"}} <= set(ran), ran
print("alike")
"""
INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))


def strided_norms(norm: Any) -> list[Tensor]:
    """Return gradients of norms that get a transposed input, a transposed gradient, and an expanded one."""
    noise = torch.Generator().manual_seed(0)
    x, by = torch.randn(1, 8, 3, generator=noise, requires_grad=True), torch.randn(1, 8, 3, generator=noise)
    uses: list[Callable[[], Tensor]] = [
        lambda: norm(x.transpose(1, 2)) * by.transpose(1, 2).contiguous(),
        lambda: norm(x.view(1, 3, 8)).transpose(1, 2) * by,
        lambda: norm(x.view(1, 3, 8)),
    ]
    return [each for use in uses for each in torch.autograd.grad(use().sum(), [x, *norm.parameters()])]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="liger-kernel and triton are not installed")
def test_the_kernels_give_the_same_gradients() -> None:
    """By triton's interpreter, in a process of its own."""
    code = BESIDE_TORCH.format(folder=os.path.dirname(__file__))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert "alike" in ended.stdout
