"""torchvision's models, and those for classification as workloads; the only file that imports torchvision."""

from __future__ import annotations

import difflib
import functools
import inspect
import io
import re
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.errors import ConversionError, ModelError
from actbench.model.imagesizes import ImageSize, edges, write
from actbench.model.records import Built, Case, Task
from actbench.scheme.microbatches import Batch
from actbench.scheme.only import parts_of
from actbench.scheme.setup import TrainingSetup
from actbench.workload import base, folder
from actbench.workload.base import construct, float_type

models: Any = torchvision.models  # type checkers do not see the names that it re-exports

USUAL_SIZE = 224
# of ImageNet-1k, on which the published weights were trained
CLASSES = 1000
INCEPTION_SIZE = 299  # in smaller images, nothing is left for the auxiliary classifier
# Weights of the auxiliary classifiers: Szegedy et al. 2014 (GoogLeNet) and the torchvision reference for Inception v3.
AUXILIARY_WEIGHT = {"GoogLeNetOutputs": 0.3, "InceptionOutputs": 0.4}


@functools.cache
def torchvision_names() -> tuple[str, ...]:
    """Return the names of all classification models."""
    return tuple(models.list_models(module=models))


@functools.cache
def tasks() -> dict[str, Task]:
    """Return the models that actbench can train, by name: classification, then segmentation and detection."""
    found: dict[str, Task] = dict.fromkeys(torchvision_names(), "image-classification")
    found |= dict.fromkeys(models.list_models(module=models.segmentation), "semantic-segmentation")
    # their targets are key points, which no batch here has
    detection = [name for name in models.list_models(module=models.detection) if not name.startswith("keypoint")]
    return found | dict.fromkeys(detection, "object-detection")


def check_torchvision_name(name: str) -> None:
    """Raise a ModelError unless torchvision has a model of this name that actbench can train."""
    if name in tasks():
        return
    if name in models.list_models():
        kind = models.get_model_builder(name).__module__.removeprefix("torchvision.models.").partition(".")[0]
        written = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind.replace('_', ' ')}"
        raise ModelError(
            f"torchvision:{name} is {written} model, for which actbench makes no batches (see 'actbench models')"
        )
    close = difflib.get_close_matches(name, tasks(), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "see 'actbench models' for the names"
    raise ModelError(f"torchvision has no model {name!r}; {hint}")


@functools.cache
def published_weights(name: str) -> tuple[int, Any]:
    """Return the smallest image size (pixels) of published weights, and these weights."""
    published = models.get_model_weights(name)
    # transforms is a functools.partial of the preset, whose keywords hold the size
    size = {weights: int(weights.transforms.keywords.get("crop_size", USUAL_SIZE)) for weights in published}
    smallest = min(size.values(), default=USUAL_SIZE)
    fitting = [weights for weights in published if size[weights] == smallest]
    if not fitting:
        return smallest, None
    return smallest, published.DEFAULT if published.DEFAULT in fitting else fitting[-1]


def image_size(name: str) -> int:
    """Return the default height and width of images in pixels."""
    return published_weights(name)[0]


def smallest_size(name: str) -> int:
    """Return the smallest image size (pixels) that a training step takes."""
    if name == "inception_v3":
        return INCEPTION_SIZE
    if name.startswith("swin") or _size_option(name):
        return 1  # the constructor refuses impossible sizes; swin pads
    return max((max(weights.meta["min_size"]) for weights in models.get_model_weights(name)), default=1)


class TorchvisionWorkload(base.Workload):
    """A torchvision classification model on random images of 1000 classes, with cross-entropy.

    Sequence length and attention implementation have no effect. ``without`` has patterns of modules that are left out.

    Raises:
        ModelError: There is no such classification model, or the case asks for another task.
    """

    def __init__(self, name: str, case: Case, without: tuple[str, ...] = ()) -> None:
        check_torchvision_name(name)
        self.task = tasks()[name]
        if case.task not in ("auto", self.task):
            raise ModelError(f"--task {case.task}: {case.model} is a torchvision model and does {self.task}")
        self.name = name
        self.case = case
        self.spec = case.model
        self._left_out = without
        self.size = edges(case.image_size or self.usual_size())
        self.check_size()

    def usual_size(self) -> ImageSize:
        """Return the size of images where the case names none."""
        return image_size(self.name)

    def check_size(self) -> None:
        """Raise a ModelError for images that the model does not take."""
        asked, least = f"--image-size {write(self.size)}", smallest_size(self.name)
        if min(self.size) < least:
            raise ModelError(f"{asked}: {self.spec} needs images of {least} px at least")
        if self.size[0] != self.size[1] and _size_option(self.name) == "image_size":
            raise ModelError(f"{asked}: {self.spec} takes square images only")

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the model in training mode with its loss and optimizer.

        Raises:
            ModelError: The model cannot be built at this image size, or its weights are not available.
        """
        self.warnings = ()
        try:
            module = construct(self._make, materialize=materialize, seed=seed)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ModelError(
                f"{self.spec} cannot be built for images of {write(self.size)} px: {error} (see --image-size)"
            ) from error
        self.weights_origin = self._load(module) if materialize else folder.without_values(self.case.weights)
        built = Built(model_class=type(module).__name__, task=self.task, image_size=self.size)
        return base.setup_of(self.case, module.to(float_type(self.case)), self.loss, built=built)

    @staticmethod
    def loss(module: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy of the class scores, plus the weighted one of auxiliary classifiers."""
        output = module(batch["images"])
        if isinstance(output, Tensor):
            return F.cross_entropy(output, batch["labels"])
        scores, *auxiliary = output
        loss = F.cross_entropy(scores, batch["labels"])
        weight = AUXILIARY_WEIGHT[type(output).__name__]
        for other in auxiliary:
            loss = loss + weight * F.cross_entropy(other, batch["labels"])
        return loss

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make ``images (batch_size, 3, height, width)`` of the case's type and ``labels (batch_size,)`` int64."""
        random = base.generator(seed)
        return {
            "images": base.images(batch_size, 3, self.size, float_type(self.case), random),
            "labels": base.classes(batch_size, CLASSES, random),
        }

    def options(self) -> dict[str, Any]:
        """Return the arguments of the model's constructor."""
        size_option = _size_option(self.name)
        if size_option is not None:
            return {size_option: self.size[0] if size_option == "image_size" else self.size}
        # without it, these models warn and are slow to build
        return {"init_weights": False} if self.name in ("googlenet", "inception_v3") else {}

    def _make(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: nn.Module = models.get_model(self.name, weights=None, **self.options())
        if self._left_out:
            self._leave_out(module)
        return module

    def _leave_out(self, module: nn.Module) -> None:
        """Take modules out of the rows that they stand in; the others keep their names."""
        try:
            parts = [path for path, _ in parts_of(module, self._left_out)]
        except (ConversionError, ValueError) as error:
            raise ModelError(f"{self.spec}: {error}") from None
        for path in parts:
            parent, _, name = path.rpartition(".")
            if not isinstance(module.get_submodule(parent), nn.Sequential):
                raise ModelError(f"{self.spec}: {path} stands in no row of modules, and cannot be left out")
            # del of an item would renumber the others (Sequential.__delitem__), and their weights would not be found
            delattr(module.get_submodule(parent), name)

    def _load(self, module: nn.Module) -> str:
        """Load published weights if the policy asks for them, and return the origin of the weights."""
        if self.case.weights == "random":
            return "random"
        weights = self.published()
        if weights is None:
            return self._without_weights("torchvision publishes no weights for it")
        file = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rpartition("/")[2]
        if not file.exists() and (folder.offline() or not folder.reachable(weights.url)):
            return self._without_weights(f"{weights.url} does not answer and nothing is cached at {file}")
        try:
            # without some blocks the file has more than the model takes
            module.load_state_dict(_read(weights.url), strict=not self._left_out)
        except (RuntimeError, OSError, EOFError, UnpicklingError) as error:
            problem = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
            raise ModelError(
                f"the published weights of {self.spec} cannot be loaded from {file}: {problem} (see --weights random)"
            ) from error
        return f"pretrained:{weights}"

    def published(self) -> Any:
        """Return the published weights of the model, or None."""
        return published_weights(self.name)[1]

    def _without_weights(self, reason: str) -> str:
        if self.case.weights == "pretrained":
            raise ModelError(f"no pretrained weights for {self.spec}: {reason}; use --weights random")
        self.warnings += (f"{self.spec}: {reason}; random weights are used",)
        return "random"


def small_inception(channels: int, num_classes: int) -> nn.Module:
    """Make an Inception v3 (Szegedy et al. 2015, arXiv 1512.00567) whose stem keeps the size of a small picture.

    The convolutions of the stem have stride 1 and padding, and nothing is pooled before the first Inception block:
    torchvision's stem would shrink 32 px to 1 px. It has no auxiliary classifier: such pictures are too small for one.
    """
    module = models.Inception3(num_classes=num_classes, aux_logits=False, init_weights=False)
    convolution = models.inception.BasicConv2d
    module.Conv2d_1a_3x3 = convolution(channels, 32, kernel_size=3, padding=1)
    module.Conv2d_2a_3x3 = convolution(32, 32, kernel_size=3, padding=1)
    module.Conv2d_4a_3x3 = convolution(80, 192, kernel_size=3, padding=1)
    module.maxpool1 = module.maxpool2 = nn.Identity()
    return module  # type: ignore[no-any-return]


def fetch_archive(url: str, folder: Path, md5: str) -> None:
    """Fetch an archive into a folder, check it and unpack it there.

    Raises:
        OSError: The address does not answer, or the folder cannot be written.
        RuntimeError: The checksum of the download is wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with redirect_stderr(io.StringIO()):
        torchvision.datasets.utils.download_and_extract_archive(url, str(folder), md5=md5)


def _size_option(name: str) -> str | None:
    """Return the constructor's argument for the image size, if the model has one (its weights depend on it)."""
    builder = models.get_model_builder(name)
    # the builder's own signature ends in **kwargs; the class that it returns names the option
    made = inspect.get_annotations(builder, eval_str=True)["return"]
    return next(
        (option for option in ("image_size", "input_size") if option in inspect.signature(made).parameters), None
    )


def _read(url: str) -> dict[str, Tensor]:
    """Read weights from torch's cache or the network; ``weights_only`` runs no code."""
    # load_state_dict_from_url says on standard output, where reports go, that it downloads
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        state = torch.hub.load_state_dict_from_url(
            url, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    # DenseNet's files write norm.1 where the model says norm1.
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", key): value for key, value in state.items()}
