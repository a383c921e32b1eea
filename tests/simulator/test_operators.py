from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.simulator import profiles
from actbench.simulator.card import simulated
from actbench.simulator.fake import fake_mode
from actbench.simulator.tracker import StorageTracker

BATCH, HEADS, ROWS, WIDTH = 2, 4, 96, 64
TENSOR = BATCH * HEADS * ROWS * WIDTH
SCORES = BATCH * HEADS * ROWS * ROWS
SEED = 2 * 8  # seed and offset of the random numbers


@pytest.fixture
def ledger() -> Iterator[StorageTracker]:
    with simulated(profiles.get("a100-40gb")), fake_mode(), torch.device("cuda"), StorageTracker() as ledger:
        yield ledger


def heads(dtype: torch.dtype = torch.float32, count: int = HEADS, width: int = WIDTH) -> Tensor:
    return torch.empty(BATCH, count, ROWS, width, dtype=dtype, requires_grad=True)


def kept_by_attention(ledger: StorageTracker, q: Tensor, k: Tensor, mask: Tensor | None = None, **options) -> int:
    before = ledger.live_bytes
    output = F.scaled_dot_product_attention(q, k, k, mask, dropout_p=0.1, **options)
    kept = ledger.live_bytes - before
    output.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    assert k.grad is not None
    assert k.grad.shape == k.shape
    return kept


def test_efficient_attention_keeps_no_scores(ledger: StorageTracker) -> None:
    kept = kept_by_attention(ledger, heads(), heads())

    assert kept == TENSOR * 4 + BATCH * HEADS * ROWS * 4 + SEED  # output and log-sum-exp


def test_flash_attention_keeps_no_scores(ledger: StorageTracker) -> None:
    kept = kept_by_attention(ledger, heads(torch.bfloat16), heads(torch.bfloat16))

    assert kept == TENSOR * 2 + BATCH * HEADS * ROWS * 4 + SEED + 8  # two words of seed, one of offset


def test_a_boolean_mask_becomes_an_additive_one_and_is_kept(ledger: StorageTracker) -> None:
    mask = torch.empty(BATCH, 1, ROWS, ROWS, dtype=torch.bool)

    kept = kept_by_attention(ledger, heads(), heads(), mask)

    assert kept == TENSOR * 4 + BATCH * HEADS * ROWS * 4 + SEED + BATCH * ROWS * ROWS * 4


def test_odd_widths_are_padded_for_flash(ledger: StorageTracker) -> None:
    kept = kept_by_attention(ledger, heads(torch.bfloat16, width=60), heads(torch.bfloat16, width=60))

    assert kept == 4 * TENSOR * 2 + BATCH * HEADS * ROWS * 4 + SEED + 8  # q, k and v are copies as well


def test_shared_heads_are_repeated_where_the_kernel_does_not_know_them(ledger: StorageTracker) -> None:
    flash = kept_by_attention(ledger, heads(torch.bfloat16), heads(torch.bfloat16, 2), enable_gqa=True)
    math = kept_by_attention(ledger, heads(), heads(count=2), enable_gqa=True)

    assert flash == TENSOR * 2 + BATCH * HEADS * ROWS * 4 + SEED + 8
    assert math > 2 * SCORES * 4


def test_modules_and_cpp_callers_are_reached_too(ledger: StorageTracker) -> None:
    attention = nn.MultiheadAttention(HEADS * WIDTH, HEADS, dropout=0.1, batch_first=True)
    x = torch.empty(BATCH, ROWS, HEADS * WIDTH, requires_grad=True)
    before = ledger.live_bytes

    output = attention(x, x, x, need_weights=False)[0]

    assert ledger.live_bytes - before < 10 * TENSOR * 4 + SCORES
    output.sum().backward()


def test_dropout_keeps_one_byte_per_element(ledger: StorageTracker) -> None:
    x = torch.empty(100, requires_grad=True)
    before = ledger.live_bytes

    output = F.dropout(x, 0.1)

    assert ledger.live_bytes - before == 100 * 4 + 100
    output.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_that_drops_nothing_is_free(ledger: StorageTracker, p: float, training: bool) -> None:
    x = torch.empty(100)
    before = ledger.live_bytes

    F.dropout(x, p, training)

    assert ledger.live_bytes == before


@pytest.mark.parametrize(("dtype", "made"), [(torch.float16, 1), (torch.bfloat16, 2)])
def test_softmax_into_float32_copies_bfloat16_alone(dtype: torch.dtype, made: int, ledger: StorageTracker) -> None:
    """torch's kernel reads float16 and writes float32; of bfloat16 it first makes a copy."""
    x = torch.empty(8, 100, dtype=dtype, requires_grad=True)
    ledger.reset_peak()
    before = ledger.live_bytes

    y = F.softmax(x, dim=-1, dtype=torch.float32)

    assert ledger.peak_bytes - before == made * 8 * 100 * 4
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


def test_autocast_has_the_types_of_cuda(ledger: StorageTracker) -> None:
    x, weight = torch.empty(8, 16), torch.empty(16, 16)
    with torch.autocast("cuda", torch.float16):
        half = F.linear(x, weight)

        assert half.dtype == torch.float16
        assert F.layer_norm(half, (16,)).dtype == torch.float32
        assert F.softmax(half, -1).dtype == torch.float32
        assert half.sum(0).dtype == torch.float32
        assert F.dropout(half, 0.1).dtype == torch.float16
        assert F.gelu(half).dtype == torch.float16


def test_autocast_makes_no_float32_copy_of_the_logits(ledger: StorageTracker) -> None:
    logits, targets = torch.empty(8, 1000, dtype=torch.float16, requires_grad=True), torch.zeros(8, dtype=torch.int64)
    ledger.reset_peak()
    before = ledger.live_bytes

    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(logits, targets)

    assert ledger.peak_bytes - before < 2 * 8 * 1000 * 4  # a log-softmax and a copy of its input in float32
    loss.backward()
    assert loss.dtype == torch.float32


def test_the_operators_of_the_cpu_come_back() -> None:
    with pytest.raises(ZeroDivisionError), simulated(profiles.get("t4")):
        _ = 1 / 0

    q = torch.randn(BATCH, HEADS, ROWS, WIDTH, requires_grad=True)
    output = F.scaled_dot_product_attention(q, q, q)
    assert "FlashAttentionForCpu" in output.grad_fn.name()
    assert "Mul" in F.dropout(q, 0.1).grad_fn.name()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
def test_softmax_widens_what_is_given_by_autocast_and_what_is_known(
    softmax: Callable[..., Tensor], dtype: torch.dtype, ledger: StorageTracker
) -> None:
    """The CPU has no such kernel, and computes no values of one."""
    given, known = torch.randn(4, 8).to(dtype), torch.arange(32).view(4, 8).to(dtype)
    for x in (given, known):
        with torch.autocast("cuda", dtype):
            made = softmax(x, -1)
        assert (made.dtype, made.shape) == (torch.float32, (4, 8))


def test_a_mask_beside_a_causal_one_is_refused_as_in_torch(ledger: StorageTracker) -> None:
    q = torch.randn(BATCH, HEADS, ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(q, q, q, torch.ones(ROWS, ROWS), is_causal=True)
