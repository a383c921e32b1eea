from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actbench import scheme as schemes
from actbench.simulator import profiles
from actbench.simulator.fake import fake_mode, without_memory
from actbench.tools.script.libraries.libraries import prepared
from actbench.tools.script.simulation import Simulation


@pytest.fixture
def notes() -> Iterator[list[str]]:
    found: list[str] = []
    with prepared(found.append):
        yield found


@pytest.mark.exhaustive
def test_compiled_models_and_functions_run_eagerly(notes: list[str]) -> None:
    model = nn.Linear(3, 3)
    ran: list[bool] = []

    @torch.compile(fullgraph=True)
    def plain(x: torch.Tensor) -> torch.Tensor:
        ran.append(torch.compiler.is_compiling())
        return x + 1

    assert notes == []  # libraries compile functions that a script may never call
    model.compile(mode="max-autotune")
    assert torch.compile(model, mode="reduce-overhead") is model
    assert plain(torch.ones(1)) == 2
    assert ran == [False]
    assert len(notes) == 1
    assert notes[0].startswith("torch.compile runs eagerly")


def _rows(*heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 6, count, 8, generator=generator) for count in heads]


def _expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    repeats = q.shape[2] // k.shape[2]
    k, v = (each.repeat_interleave(repeats, 2) for each in (k, v))
    laid = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(*laid, is_causal=True).transpose(1, 2)


def test_flash_attention_of_a_script_is_torchs(notes: list[str]) -> None:
    import flash_attn
    from flash_attn.flash_attn_interface import flash_attn_varlen_func
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    q, k, v = _rows(4, 2, 2)
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, causal=True), _expected(q, k, v))
    packed = torch.stack(_rows(4, 4, 4), 2)
    torch.testing.assert_close(flash_attn.flash_attn_qkvpacked_func(packed, causal=True), _expected(*packed.unbind(2)))
    lengths = torch.tensor([0, 6])
    flat = flash_attn_varlen_func(q[0], k[0], v[0], lengths, lengths, 6, 6, causal=True)
    torch.testing.assert_close(flat, _expected(q, k, v)[0])
    found = memory_efficient_attention(*packed.unbind(2), attn_bias=LowerTriangularMask())
    torch.testing.assert_close(found, _expected(*packed.unbind(2)))
    assert [note.partition(" ")[0] for note in notes] == ["flash_attn", "xformers"]


@pytest.mark.slow
def test_a_library_that_asks_for_flash_attention_gets_the_true_answer() -> None:
    with prepared(print):
        assert importlib.util.find_spec("flash_attn") is None
        __import__("flash_attn")

    assert "flash_attn" not in sys.modules


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("asked", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_flash_attention_in_transformers_needs_no_package(asked: str, notes: list[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=99, num_key_value_heads=8
    )
    config.num_attention_heads = 16
    model = LlamaForCausalLM._from_config(config, attn_implementation=asked, dtype=torch.bfloat16)
    tokens = torch.arange(12).reshape(2, 6)
    found = model(input_ids=tokens).logits
    model.set_attn_implementation("sdpa")

    torch.testing.assert_close(found, model(input_ids=tokens).logits)
    assert [note.partition(" in ")[0] for note in notes] == ["Flash attention"]


@pytest.mark.exhaustive
def test_kernels_of_liger_hold_what_they_hold_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    liger: Any = pytest.importorskip("liger_kernel.transformers")
    notes: list[str] = []
    with without_memory(fake_mode()), prepared(notes.append):
        norm = liger.LigerRMSNorm(512)
        x = torch.empty(64, 512, requires_grad=True)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            y = norm(x)
        y.sum().backward()

    assert [tuple(t.shape) for t in saved] == [(64, 512), (512,), (64,)]
    assert x.grad is not None
    assert [note.partition(":")[0] for note in notes] == ["Triton kernels of liger_kernel are not run"]


@pytest.mark.slow
def test_a_kernel_of_the_script_is_not_launched(notes: list[str]) -> None:
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def add(x, y, n: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(y, tl.load(x) + n)

    x, y = torch.ones(4), torch.zeros(4)
    add[(1,)](x, y, 4)

    assert y.tolist() == [0] * 4
    assert len(notes) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("masked", [False, True])
def test_transformers_leaves_out_masks_of_whole_rows_as_on_a_card(masked: bool) -> None:
    """It reads the values of masks and positions, so that attention runs by the flash kernel."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with Simulation(profiles.get("rtx-4090")) as card:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).to("cuda", torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(9):
            ids = torch.randint(0, 100, (2, 64)).cuda()
            mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
            model(input_ids=ids, labels=ids, **mask).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    estimated = card.measurement.estimated
    assert estimated is not None
    assert any("flash_attention" in each.name for each in estimated.by_operator)


@pytest.mark.parametrize("scheme", [None, "adam8bit"])
def test_low_bit_adam_of_a_script_is_one_kernel_a_parameter_and_calls_a_closure(scheme: str | None) -> None:
    """torchao compiles its step on a card. Lightning gives each optimizer a closure, which holds the passes."""
    torchao = pytest.importorskip("torchao.optim")
    make = torch.optim.AdamW if scheme else torchao.AdamW8bit
    applied = None if scheme is None else schemes.build(scheme)
    with Simulation(profiles.get("rtx-4090"), scheme=applied, steps=3) as card:
        model = nn.Linear(4096, 4096).cuda()
        optimizer = make(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(1, 4096, device="cuda")).sum()
            loss.backward()
            return loss

        for _ in range(6):
            optimizer.step(closure)

    found = card.measurement
    weights = 4096 * 4096 * 4
    assert found.gradients_bytes == pytest.approx(weights, rel=0.01)
    assert found.optimizer_bytes == pytest.approx(weights / 2, rel=0.05)
    assert found.peak_bytes < 3 * weights  # weights, gradients, moments of a byte, and what cuBLAS works in
    assert not any("torch.compile" in warning for warning in found.warnings)
