from __future__ import annotations

import pytest

from actbench import workload as workloads
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.workload.names import find_preset, presets

HEAD = 768 * 2 + 2  # a linear classifier of two labels
GROUPS = pytest.mark.newer_torch("fakes multiply groups in bfloat16 only")
LIKE_ANOTHER = pytest.mark.slow  # of a class of which another preset is counted in the quick tests


@pytest.mark.parametrize(
    ("model", "task", "parameters"),
    [
        ("bert-base-uncased", "auto", 109_482_240 + HEAD),
        pytest.param("bert-large-uncased", "auto", 335_141_888 + 1024 * 2 + 2, marks=LIKE_ANOTHER),
        ("roberta-base", "auto", 124_645_632 + HEAD),  # its head's dense layer has the size of the pooler
        pytest.param("roberta-large", "auto", 355_359_744 + 1024 * 2 + 2, marks=LIKE_ANOTHER),
        pytest.param("distilroberta-base", "auto", 82_118_400 + HEAD, marks=LIKE_ANOTHER),
        ("distilbert-base-uncased", "auto", 66_362_880 + 768 * 768 + 768 + HEAD),
        ("gpt2", "auto", 124_439_808),
        pytest.param("gpt2-medium", "auto", 354_823_168, marks=LIKE_ANOTHER),
        pytest.param("gpt2-large", "auto", 774_030_080, marks=LIKE_ANOTHER),
        pytest.param("gpt2-xl", "auto", 1_557_611_200, marks=LIKE_ANOTHER),
        ("t5-small", "auto", 60_506_624),
        pytest.param("t5-base", "auto", 222_903_552, marks=LIKE_ANOTHER),
        ("google/vit-base-patch16-224", "auto", 86_567_656),
        ("llama-3.2-1b", "auto", 1_235_814_400),
        pytest.param("llama-3.2-3b", "auto", 3_212_749_824, marks=LIKE_ANOTHER),
        pytest.param("llama-3.1-8b", "auto", 8_030_261_248, marks=LIKE_ANOTHER),
        pytest.param("mistral-7b", "auto", 7_241_732_096, marks=LIKE_ANOTHER),
        ("qwen3-0.6b", "auto", 596_049_920),
        pytest.param("qwen3-1.7b", "auto", 1_720_574_976, marks=LIKE_ANOTHER),
        pytest.param("qwen3-4b", "auto", 4_022_468_096, marks=LIKE_ANOTHER),
        pytest.param("qwen3-8b", "auto", 8_190_735_360, marks=LIKE_ANOTHER),
        pytest.param("llama-3.1-70b", "auto", 70_553_706_496, marks=LIKE_ANOTHER),
        ("mixtral-8x7b", "auto", 46_702_792_704),
        ("qwen3-30b-a3b", "auto", 30_532_122_624),
        ("gemma-3-1b", "auto", 999_885_952),
        pytest.param("gemma-3-4b", "auto", 3_880_263_168, marks=LIKE_ANOTHER),
        ("mamba-130m", "auto", 129_135_360),
        ("modernbert-base", "masked-lm", 149_655_232),
        pytest.param("modernbert-large", "masked-lm", 395_881_664, marks=LIKE_ANOTHER),
        ("deberta-v3-base", "auto", 183_831_552 + 768**2 + 768 + HEAD),
        ("whisper-small", "auto", 241_734_912),
        pytest.param("whisper-large-v3", "auto", 1_543_490_560, marks=LIKE_ANOTHER),
        ("dinov2-base", "auto", 86_580_480 + 2 * HEAD - 2),  # the classifier reads a token and the mean of patches
        pytest.param("dinov2-large", "auto", 304_368_640 + 2 * 1024 * 2 + 2, marks=LIKE_ANOTHER),
        ("siglip-base-patch16-224", "auto", 203_155_970),
        ("convnext-base-224", "auto", 88_591_464),
        pytest.param(
            "llama-160m",
            "auto",
            2 * 32000 * 768 + 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 768,
            marks=LIKE_ANOTHER,
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
        pytest.param("llama-3.1-70b@num_hidden_layers=1", marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b@num_hidden_layers=1", marks=GROUPS),
        pytest.param("qwen3-30b-a3b@num_hidden_layers=1", marks=[pytest.mark.slow, GROUPS]),
        pytest.param("gemma-3-1b@num_hidden_layers=1", marks=pytest.mark.slow),
        pytest.param("mamba-130m@num_hidden_layers=1", marks=pytest.mark.slow),
        pytest.param("modernbert-base@num_hidden_layers=2", marks=pytest.mark.slow),
        pytest.param("deberta-v3-base@num_hidden_layers=1", marks=pytest.mark.slow),
        "whisper-small@encoder_layers=1,decoder_layers=1",
        pytest.param("dinov2-base@num_hidden_layers=1", marks=pytest.mark.slow),
        pytest.param("siglip-base-patch16-224", marks=pytest.mark.slow),
        pytest.param("convnext-base-224", marks=pytest.mark.slow),
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
