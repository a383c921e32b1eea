from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.model.records import Case
from actbench.simulator.fake import fake_mode, to_fake
from actbench.workload import folder
from actbench.workload.torchvision import TorchvisionWorkload, torchvision_names


def load(model: str, **options: object) -> TorchvisionWorkload:
    workload = workloads.load_workload(Case.model_validate({"model": model, "batch_size": 2, **options}))
    assert isinstance(workload, TorchvisionWorkload)
    return workload


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("resnet18", 32),
        pytest.param("googlenet", 64, marks=pytest.mark.slow),
        pytest.param("densenet121", 32, marks=pytest.mark.slow),
        ("mobilenet_v3_small", 32),
        ("regnet_x_400mf", 32),
    ],
)
def test_a_step_reaches_every_parameter(model: str, size: int) -> None:
    workload = load(model, image_size=size)
    setup = workload.setup(materialize=True, seed=0)
    batch = workload.batch(2, seed=0)
    assert setup.loss is not None

    setup.loss(setup.module, batch).backward()

    assert setup.module.training
    assert batch["images"].shape == (2, 3, size, size)
    assert all(parameter.grad is not None for parameter in setup.module.parameters())


QUICK = {"inception_v3", "vit_b_32"}  # outputs beside the scores, and attention
ONE_OF_EACH_FAMILY = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "maxvit_t"),
    *("mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "resnet18", "resnet50", "resnext50_32x4d"),
    *("shufflenet_v2_x0_5", "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vgg11_bn"),
    *("regnet_y_128gf", "wide_resnet50_2"),
)
"""The others of a family are deeper or wider."""


def those(models: Sequence[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.sampled(slow=2)) for name in models]


@pytest.mark.parametrize("model", those(torchvision_names()))
def test_every_model_builds_without_memory(model: str) -> None:
    module = load(model).setup(materialize=False, seed=0).module

    real = [parameter for parameter in module.parameters() if not parameter.is_meta]
    assert sum(parameter.numel() for parameter in real) < 1_000_000
    assert sum(parameter.numel() for parameter in module.parameters()) > 1_000_000


@pytest.mark.parametrize("model", those([*sorted(QUICK), *ONE_OF_EACH_FAMILY]))
def test_every_family_takes_a_step_on_fake_tensors(model: str) -> None:
    workload = load(model)
    setup = workload.setup(materialize=False, seed=0)
    mode = fake_mode()
    to_fake(setup.module, mode)
    assert setup.loss is not None

    with mode:
        setup.loss(setup.module, workload.batch(2, seed=0)).backward()

    assert all(parameter.grad is not None for parameter in setup.module.parameters())


@pytest.mark.parametrize(
    ("model", "parameters", "size"),
    [
        ("resnet18", 11_689_512, 224),
        ("resnet50", 25_557_032, 224),
        ("vit_b_16", 86_567_656, 224),
        ("inception_v3", 27_161_264, 299),
        ("efficientnet_b4", 19_341_616, 380),
        ("vit_h_14", 632_045_800, 224),
    ],
)
def test_sizes_are_the_published_ones(model: str, parameters: int, size: int) -> None:
    workload = load(model)

    assert sum(value.numel() for value in workload.setup(materialize=False, seed=0).module.parameters()) == parameters
    assert workload.size == (size, size)


def test_auxiliary_classifiers_count_with_their_weight() -> None:
    workload = load("googlenet", image_size=64)
    setup = workload.setup(materialize=True, seed=0)
    batch = workload.batch(2, seed=0)
    assert setup.loss is not None
    for module in setup.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    scores, second, first = setup.module(batch["images"])
    main, *others = (F.cross_entropy(output, batch["labels"]) for output in (scores, second, first))

    torch.testing.assert_close(setup.loss(setup.module, batch), main + 0.3 * others[0] + 0.3 * others[1])


def test_the_seed_decides_the_weights_and_the_case_the_type() -> None:
    first, again, other = (load("squeezenet1_1").setup(materialize=True, seed=seed).module for seed in (1, 1, 2))
    half = load("squeezenet1_1", dtype="bfloat16")

    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert {value.dtype for value in half.setup(materialize=True, seed=0).module.parameters()} == {torch.bfloat16}
    assert half.batch(1, seed=0)["images"].dtype == torch.bfloat16


@pytest.mark.parametrize(("model", "size"), [("vit_b_16", 30), ("maxvit_t", 100)])
def test_an_impossible_image_size_is_an_error(model: str, size: int) -> None:
    with pytest.raises(ModelError, match=f"cannot be built for images of {size} px"):
        load(model, image_size=size).setup(materialize=False, seed=0)


@pytest.mark.parametrize(("model", "size"), [("alexnet", 62), ("inception_v3", 298), ("vgg11", 31)])
def test_an_image_too_small_for_the_model_is_an_error(model: str, size: int) -> None:
    with pytest.raises(ModelError, match=f"--image-size {size}: {model} needs images of {size + 1} px"):
        load(model, image_size=size)


def test_another_task_is_refused() -> None:
    with pytest.raises(ModelError, match="--task causal-lm"):
        load("resnet18", task="causal-lm")


@pytest.mark.parametrize("model", ["squeezenet1_1", "densenet121"])
def test_published_weights_come_from_the_cache(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import get_model_weights

    published = load(model).setup(materialize=True, seed=5).module
    url = get_model_weights(model).DEFAULT.url
    (tmp_path / "checkpoints").mkdir()
    # DenseNet's published file has norm.1 where the model has norm1.
    state = {
        key.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): t for key, t in published.state_dict().items()
    }
    torch.save(state if model == "densenet121" else published.state_dict(), tmp_path / "checkpoints" / Path(url).name)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    workload = load(model, weights="pretrained")

    module = workload.setup(materialize=True, seed=0).module

    assert workload.weights_origin.startswith("pretrained:")
    assert all(torch.equal(a, b) for a, b in zip(published.parameters(), module.parameters(), strict=True))


class Payload:
    """What a hostile file would hold: a call that runs when the pickle is read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("the code in the pickle ran",)


@pytest.mark.parametrize("content", ["empty", "truncated", "hostile"])
def test_a_broken_file_in_the_cache_is_an_error_and_no_code_runs(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchvision.models import get_model_weights

    file = tmp_path / "checkpoints" / Path(get_model_weights("squeezenet1_1").DEFAULT.url).name
    file.parent.mkdir()
    torch.save({"w": Payload() if content == "hostile" else torch.zeros(99)}, file)
    file.write_bytes(file.read_bytes()[: {"empty": 0, "truncated": 200, "hostile": None}[content]])
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    with pytest.raises(ModelError, match=f"cannot be loaded from {file}"):
        load("squeezenet1_1", weights="pretrained").setup(materialize=True, seed=0)

    assert capsys.readouterr().out == ""


def test_a_download_prints_nothing_among_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchvision.models import get_model

    def downloaded(url: str, file: str, *_: object, **__: object) -> None:
        torch.save(get_model("squeezenet1_1", weights=None).state_dict(), file)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", downloaded)
    monkeypatch.setattr(folder, "offline", lambda: False)
    monkeypatch.setattr(folder, "reachable", lambda url: True)
    workload = load("squeezenet1_1", weights="pretrained")

    workload.setup(materialize=True, seed=0)

    assert workload.weights_origin.startswith("pretrained:")
    assert capsys.readouterr() == ("", "")


def test_without_a_network_auto_warns_and_pretrained_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(folder, "offline", lambda: False)
    monkeypatch.setattr(folder, "reachable", lambda url: False)
    workload = load("squeezenet1_1", weights="auto")

    workload.setup(materialize=True, seed=0)

    assert workload.weights_origin == "random"
    assert "random weights are used" in workload.warnings[0]
    with pytest.raises(ModelError, match="use --weights random"):
        load("squeezenet1_1", weights="pretrained").setup(materialize=True, seed=0)


def test_blocks_can_be_left_out_and_the_others_keep_their_names() -> None:
    module = load("resnet18@without=layer1.1/layer[2-3].1", weights="random").setup(materialize=False, seed=0).module

    blocks = [name for name, part in module.named_modules() if type(part).__name__ == "BasicBlock"]
    assert blocks == ["layer1.0", "layer2.0", "layer3.0", "layer4.0", "layer4.1"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet18@without=layer5", "names no module of ResNet"),
        ("resnet18@without=layer1.0.conv1", "stands in no row of modules"),
        ("resnet18@depth=2", "torchvision's without=PATHS"),
        ("own.py:build@without=layers.1", "only Hugging Face models"),
    ],
)
def test_what_cannot_be_left_out_is_refused(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(model, weights="random").setup(materialize=False, seed=0)
