from __future__ import annotations

import pytest

from actbench import workload as workloads
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.workload.names import find_preset, presets

HEAD = 768 * 2 + 2  # a linear classifier of two labels
PLACES = 2 * 128  # frequencies of positions, no parameters in the published code
GROUPS = pytest.mark.newer_torch("fakes multiply groups in bfloat16 only")
SLOW = pytest.mark.sampled(slow=2)


@pytest.mark.sampled(fast=12, slow=12)
@pytest.mark.parametrize(
    ("model", "task", "parameters"),
    [
        ("bert-base-uncased", "auto", 109_482_240 + HEAD),
        ("bert-large-uncased", "auto", 335_141_888 + 1024 * 2 + 2),
        ("roberta-base", "auto", 124_645_632 + HEAD),  # its head's dense layer has the size of the pooler
        ("roberta-large", "auto", 355_359_744 + 1024 * 2 + 2),
        ("distilroberta-base", "auto", 82_118_400 + HEAD),
        ("distilbert-base-uncased", "auto", 66_362_880 + 768 * 768 + 768 + HEAD),
        ("gpt2", "auto", 124_439_808),
        ("gpt2-medium", "auto", 354_823_168),
        ("gpt2-large", "auto", 774_030_080),
        ("gpt2-xl", "auto", 1_557_611_200),
        ("t5-small", "auto", 60_506_624),
        ("t5-base", "auto", 222_903_552),
        ("google/vit-base-patch16-224", "auto", 86_567_656),
        ("llama-3.2-1b", "auto", 1_235_814_400),
        ("llama-3.2-3b", "auto", 3_212_749_824),
        ("llama-3.1-8b", "auto", 8_030_261_248),
        ("mistral-7b", "auto", 7_241_732_096),
        ("qwen3-0.6b", "auto", 596_049_920),
        ("qwen3-1.7b", "auto", 1_720_574_976),
        ("qwen3-4b", "auto", 4_022_468_096),
        ("qwen3-8b", "auto", 8_190_735_360),
        ("llama-3.1-70b", "auto", 70_553_706_496),
        ("mixtral-8x7b", "auto", 46_702_792_704),
        ("qwen3-30b-a3b", "auto", 30_532_122_624),
        ("gemma-3-1b", "auto", 999_885_952),
        ("gemma-3-4b", "auto", 3_880_263_168),
        ("mamba-130m", "auto", 129_135_360),
        ("modernbert-base", "masked-lm", 149_655_232),
        ("modernbert-large", "masked-lm", 395_881_664),
        ("deberta-v3-base", "auto", 183_831_552 + 768**2 + 768 + HEAD),
        ("whisper-small", "auto", 241_734_912),
        ("whisper-large-v3", "auto", 1_543_490_560),
        ("dinov2-base", "auto", 86_580_480 + 2 * HEAD - 2),  # the classifier reads a token and the mean of patches
        ("dinov2-large", "auto", 304_368_640 + 2 * 1024 * 2 + 2),
        ("siglip-base-patch16-224", "auto", 203_155_970),
        ("convnext-base-224", "auto", 88_591_464),
        ("llama-2-7b", "auto", 6_738_415_616),
        ("llama-2-13b", "auto", 13_015_864_320),
        ("llama-2-70b", "auto", 68_976_648_192),
        ("tinyllama-1.1b", "auto", 1_100_048_384),
        ("yi-6b", "auto", 6_061_035_520),
        ("yi-34b", "auto", 34_388_917_248),
        ("phi-3-mini", "auto", 3_821_079_552),
        ("phi-3-medium", "auto", 13_960_238_080),
        ("phi-4", "auto", 14_659_507_200),
        ("phi-4-mini", "auto", 3_836_021_760),
        ("gemma-2-2b", "auto", 2_614_341_888),
        ("gemma-2-9b", "auto", 9_241_705_984),
        ("gemma-2-27b", "auto", 27_227_128_320),
        ("qwen2.5-0.5b", "auto", 494_032_768),
        ("qwen2.5-1.5b", "auto", 1_543_714_304),
        ("qwen2.5-3b", "auto", 3_085_938_688),
        ("qwen2.5-7b", "auto", 7_615_616_512),
        ("qwen2.5-14b", "auto", 14_770_033_664),
        ("qwen2.5-32b", "auto", 32_763_876_352),
        ("qwen2.5-72b", "auto", 72_706_203_648),
        ("deepseek-v2-lite", "auto", 15_706_484_224),
        ("granite-3.1-2b", "auto", 2_533_531_648),
        ("granite-3.1-8b", "auto", 8_170_848_256),
        ("t5-large", "auto", 737_668_096),
        ("t5-3b", "auto", 2_851_598_336),
        ("flan-t5-small", "auto", 76_961_152),
        ("flan-t5-base", "auto", 247_577_856),
        ("flan-t5-large", "auto", 783_150_080),
        ("flan-t5-xl", "auto", 2_849_757_184),
        ("flan-t5-xxl", "auto", 11_135_332_352),
        ("wav2vec2-base", "auto", 94_396_320),
        ("wav2vec2-large", "auto", 315_461_792),
        ("wav2vec2-large-lv60", "auto", 315_471_520),
        ("clip-vit-base-patch32", "auto", 151_277_313),
        ("clip-vit-base-patch16", "auto", 149_620_737),
        ("clip-vit-large-patch14", "auto", 427_616_513),
        ("detr-resnet-50", "auto", 41_524_768),
        ("sam-vit-base", "auto", 93_735_472 + PLACES),
        ("sam-vit-large", "auto", 312_342_832 + PLACES),
        ("sam-vit-huge", "auto", 641_090_608 + PLACES),
        (
            "llama-160m",
            "auto",
            2 * 32000 * 768 + 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 768,
        ),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(model: str, task: str, parameters: int) -> None:
    workload = workloads.load_workload(Case.model_validate({"model": model, "task": task, "batch_size": 1}))

    module = workload.setup(materialize=False, seed=0).module

    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("mixtral-8x7b@num_hidden_layers=1", marks=GROUPS),
        pytest.param("qwen3-30b-a3b@num_hidden_layers=1", marks=[SLOW, GROUPS]),
        pytest.param("deepseek-v2-lite@num_hidden_layers=2", marks=[SLOW, GROUPS]),
        pytest.param("whisper-small@encoder_layers=1,decoder_layers=1", marks=SLOW),
        *(
            pytest.param(model, marks=SLOW)
            for model in (
                "llama-3.1-70b@num_hidden_layers=1",
                "gemma-3-1b@num_hidden_layers=1",
                "mamba-130m@num_hidden_layers=1",
                "modernbert-base@num_hidden_layers=2",
                "deberta-v3-base@num_hidden_layers=1",
                "dinov2-base@num_hidden_layers=1",
                "siglip-base-patch16-224",
                "convnext-base-224",
                "llama-2-7b@num_hidden_layers=1",
                "phi-3-mini@num_hidden_layers=1",
                "phi-4-mini@num_hidden_layers=1",
                "gemma-2-2b@num_hidden_layers=1",
                "qwen2.5-0.5b@num_hidden_layers=1",
                "granite-3.1-2b@num_hidden_layers=1",
                "flan-t5-small",
                "wav2vec2-base@num_hidden_layers=2",
                "clip-vit-base-patch32",
                "detr-resnet-50",
            )
        ),
    ],
)
def test_a_preset_is_converted_and_simulated(model: str) -> None:
    case = Case(model=model, batch_size=1, memory_limit_bytes=2**40)

    exact, packed = (measure(case.model_copy(update={"scheme": scheme})) for scheme in ("exact", "gact:L2"))

    assert packed.activation_bytes < 0.3 * exact.activation_bytes


def test_a_preset_is_found_by_every_name_of_it() -> None:
    vit = presets()["google/vit-base-patch16-224"]

    assert find_preset("vit-base-patch16-224") is vit
    assert find_preset("openai-community/gpt2") is presets()["gpt2"]
    assert find_preset("gpt5") is None


def test_a_preset_that_is_like_another_changes_only_what_it_says() -> None:
    base, large = presets()["roberta-base"], presets()["roberta-large"]

    assert large.config["num_hidden_layers"] == 24
    assert large.config["max_position_embeddings"] == base.config["max_position_embeddings"] == 514
    assert large.task == base.task


def test_made_up_models_name_no_repository() -> None:
    assert not any(preset.hub for name, preset in presets().items() if name.startswith(("tiny-", "llama-160m")))
