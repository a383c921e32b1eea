"""Generation: the bytes of a cache in closed form, and passes that are skipped."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench import workload as workloads
from actbench.errors import ActbenchError
from actbench.measuring import bench
from actbench.measuring.bench import Session, measure
from actbench.measuring.meters import footprint
from actbench.measuring.meters.trace import AllocationTrace
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.workload.generation import GenerationStep

WINDOW = 32
_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **_MIXED},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **_EXPERTS},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], **_MIXED, **_EXPERTS},
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
ROWS, PROMPT, WRITTEN = 2, 48, 21

MakeCase = Callable[..., Case]


@pytest.fixture
def case_of(tmp_path: Path) -> MakeCase:
    def make(kind: str, **fields: Any) -> Case:
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**_BASE, "model_type": kind, **CONFIGS[kind]}))
        usual = {"dtype": "float32", "batch_size": ROWS, "sequence_length": PROMPT, "generate": WRITTEN}
        return Case(**{**usual, "model": str(folder), **fields})

    return make


def cache_bytes(kind: str, prompt: int = PROMPT, written: int = WRITTEN) -> int:
    """Return the bytes of a cache after a generation: nobody reads the last token, so that it is not in there."""
    tokens = prompt + written - 1
    if kind == "deepseek_v2":  # the latent vector, and the rotated part of the keys that all heads share
        return ROWS * 4 * (16 + 8) * tokens * 4
    of_layers = [
        min(tokens, WINDOW) if "layer_types" in CONFIGS[kind] and not layer % 2 else tokens for layer in range(4)
    ]
    return ROWS * 2 * 2 * 16 * sum(of_layers) * 4


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_cache_has_the_bytes_of_its_closed_form(kind: str, case_of: MakeCase) -> None:
    found = measure(case_of(kind))

    assert found.generated is not None
    assert found.generated.cache_bytes == cache_bytes(kind)


@pytest.mark.parametrize(
    ("model", "layers", "of_token"),
    [("llama-3.1-8b", 32, 2 * 8 * 128 * 2), ("mixtral-8x7b", 32, 2 * 8 * 128 * 2), ("qwen3-8b", 36, 2 * 8 * 128 * 2)],
)
@pytest.mark.sampled(fast=1, slow=2)
def test_published_models_have_the_bytes_of_their_closed_form(model: str, layers: int, of_token: int) -> None:
    found = measure(Case(model=model, dtype="bfloat16", batch_size=2, sequence_length=1024, generate=256))

    assert found.generated is not None
    assert found.peak_parts is not None
    assert found.generated.cache_bytes == 2 * layers * of_token * (1024 + 255)
    assert found.peak_bytes >= found.weights_bytes + found.peak_parts.cache_bytes


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt_oss": {  # openai/gpt-oss-20b: every second layer reads 128 tokens
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
    },
    "deepseek_v2": {  # deepseek-ai/DeepSeek-V2-Lite: a latent vector of 512 and a rotated key of 64 for each token
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 64,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
    },
}
TOKENS = 4096 + 31
PUBLISHED_BYTES = {
    "gemma-3-4b": 2 * 4 * 256 * 2 * (29 * 1024 + 5 * TOKENS),  # every sixth of 34 layers reads all tokens
    "gpt_oss": 2 * 8 * 64 * 2 * (12 * 128 + 12 * TOKENS),
    "deepseek_v2": (512 + 64) * 2 * 27 * TOKENS,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PUBLISHED_BYTES)
def test_published_models_with_windows_or_latent_keys_have_the_bytes_of_their_closed_form(
    kind: str, tmp_path: Path
) -> None:
    if kind in PUBLISHED:
        own = {"model_type": kind, "architectures": CONFIGS[kind]["architectures"]}
        (tmp_path / "config.json").write_text(json.dumps({**own, **PUBLISHED[kind]}))
    model = str(tmp_path) if kind in PUBLISHED else kind
    found = measure(Case(model=model, dtype="bfloat16", batch_size=1, sequence_length=4096, generate=32))

    assert found.generated is not None
    assert found.generated.cache_bytes == PUBLISHED_BYTES[kind]


@pytest.mark.sampled(fast=1, slow=1)
def test_a_static_cache_is_whole_from_the_start_and_one_of_fp8_has_a_fourth_of_the_bytes(case_of: MakeCase) -> None:
    static, fp8 = (measure(case_of("llama", cache=cache)).generated for cache in ("static", "fp8"))

    assert static is not None
    assert fp8 is not None
    assert static.cache_bytes == cache_bytes("llama", written=WRITTEN + 1)
    assert fp8.cache_bytes == cache_bytes("llama") // 4


def test_a_token_takes_as_long_as_weights_are_read_and_a_prompt_as_products_take() -> None:
    settings = {"dtype": "bfloat16", "batch_size": 1, "generate": 64, "device_profile": "rtx-4090"}
    found = measure(Case(model="llama-3.1-8b", sequence_length=1024, **settings))

    times = found.generated
    assert times is not None
    assert times.prefill_seconds is not None
    assert times.token_seconds is not None
    read = found.weights_bytes / 1.008e12  # the card's memory bandwidth
    assert read < times.token_seconds < 2 * read
    products = 2 * 7e9 * 1024 / 165e12  # of the blocks, at the card's dense rate of bfloat16
    assert products < times.prefill_seconds < 3 * products
    assert found.estimated is None


def test_the_table_of_a_generation_has_no_word_of_training(cli: Any) -> None:
    ended = cli("measure", "tiny-llama", "--generate", "8", "--device-profile", "rtx-4090", "--export-csv", "-")

    assert ended.status == 0, ended.err
    assert "What does tiny-llama need to write?" in ended.err
    assert ",estimated_prefill_seconds,estimated_token_seconds," in ended.out
    for word in ("Scheme", "Saved", "Activations", "optimizer", "No step time"):
        assert word not in ended.err
    assert "tiny-llama: peak" in ended.err


@pytest.mark.parametrize("cache", ["quanto", "hqq"])
def test_caches_that_are_not_counted_are_no_choice(cache: str, cli: Any) -> None:
    ended = cli("measure", "tiny-llama", "--generate", "8", "--cache", cache)

    assert ended.status == 2
    assert cache in ended.err
    assert "dynamic" in ended.err


class _Whole(GenerationStep):
    """A generation of which each pass runs."""

    def __init__(self, *of: Any, whole: bool) -> None:
        super().__init__(*of, whole=True)


def _of(found: Measurement) -> tuple[Any, ...]:
    return found.peak_bytes, found.peak_phase, found.peak_parts, found.generated  # with the peak of each part


@pytest.mark.parametrize("profile", ["cpu", "cuda-16gib"])
@pytest.mark.parametrize("prompt", [4, 48])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.sampled(fast=3, slow=15)
def test_passes_that_are_skipped_change_no_byte(
    kind: str, prompt: int, profile: str, case_of: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(kind, sequence_length=prompt, generate=44, device_profile=profile)
    skipped = measure(case)
    monkeypatch.setattr(bench, "GenerationStep", _Whole)

    assert _of(skipped) == _of(measure(case))


@pytest.mark.parametrize("cache", ["dynamic", "static", "fp8"])
@pytest.mark.parametrize("prompt", [4, 48])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.sampled(fast=2, slow=10)
def test_a_real_generation_has_the_bytes_of_its_simulation(
    kind: str, prompt: int, cache: str, case_of: MakeCase
) -> None:
    case = case_of(kind, sequence_length=prompt, cache=cache)
    try:
        simulated = measure(case.model_copy(update={"device_profile": "cpu"}))
    except ActbenchError as error:  # layers of a window have no static or packed form in some models
        pytest.skip(str(error))
    real = Session(case.model_copy(update={"meter": "cpu"})).memory()

    assert real.generated is not None
    assert simulated.generated is not None
    assert real.generated.cache_bytes == simulated.generated.cache_bytes
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-3)


def test_transformers_own_generate_needs_as_much(case_of: MakeCase) -> None:
    case = case_of("llama", sequence_length=8, generate=100, meter="cpu")
    workload = workloads.load_workload(case)
    module: Any = workload.setup(materialize=True, seed=0).module
    ids = workload.batch(ROWS, seed=0)["input_ids"]
    written = {"max_new_tokens": case.generate, "do_sample": False, "eos_token_id": None}
    module.generate(ids, attention_mask=torch.ones_like(ids), **written)
    gc.collect()
    with AllocationTrace() as trace:
        trace.mark("begin")
        module.generate(ids, attention_mask=torch.ones_like(ids), **written)
        trace.mark("end")

    held = footprint.stored_bytes([*footprint.weights(module), ids])
    assert measure(case).peak_bytes == pytest.approx(held + trace.peak_bytes("begin", "end"), rel=0.01)


def test_the_longest_prompt_and_the_largest_batch_fit_and_no_more(case_of: MakeCase) -> None:
    case = case_of("llama", memory_limit_bytes=40 << 20, find_largest_batch=True)
    found = measure(case)

    assert found.generated is not None
    assert found.generated.longest_prompt is not None
    assert found.largest_batch
    for field, largest in (("sequence_length", found.generated.longest_prompt), ("batch_size", found.largest_batch)):
        at, beyond = (
            measure(case.model_copy(update={field: size, "find_largest_batch": False}))
            for size in (largest, largest + 1)
        )
        assert at.fits
        assert not beyond.fits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "checkpoint"}, "scheme checkpoint changes a training step"),
        ({"packed": "32,32", "sequence_length": None}, "packed 32,32 changes a training step"),
        ({"generate": None, "cache": "fp8"}, "a training step has no cache"),
        ({"model": "tiny-bert"}, "causal language models write text"),
        ({"model": "resnet18", "sequence_length": None}, "not a causal language model of Hugging Face"),
        ({"model": "tiny-gpt2", "generate": 5000}, "--prompt and --generate, together"),
    ],
)
def test_what_writes_no_text_is_refused(fields: dict[str, Any], message: str) -> None:
    usual = {"model": "tiny-llama", "batch_size": 1, "sequence_length": 16, "generate": 4}
    with pytest.raises(ActbenchError, match=message):
        measure(Case(**{**usual, **fields}))
