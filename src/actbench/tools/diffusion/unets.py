"""The U-Nets of Stable Diffusion as workloads: their published configs, their batches, and their loss."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.errors import ModelError
from actbench.model.imagesizes import edges, write
from actbench.model.records import Built, Case, Task
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.workload import base, folder
from actbench.workload.base import construct, float_type

TASK: Final = "text-to-image"
PROMPT = 77
"""Tokens of a prompt: CLIP's text encoders pad each to so many."""
_PIXELS = 8  # of an image, in each direction, in one latent of the autoencoder
_STEPS = 1000  # of the noise schedule, whose square roots of beta go evenly from the first to the last
_FIRST_BETA, _LAST_BETA = 0.00085, 0.012
_POOLED, _TIME_IDS = 1280, 6  # SDXL's own inputs: the second text encoder's summary; sizes and crops of the image
_CLASSES = "labels of classes"
_ABSENT: Final = {
    "class_embed_type": _CLASSES,
    "class_embeddings_concat": _CLASSES,
    "dual_cross_attention": "two prompts",
    "encoder_hid_dim": "prompts of another width than cross_attention_dim",
    "encoder_hid_dim_type": "prompts of another width than cross_attention_dim, or images",
    "num_class_embeds": _CLASSES,
}
"""Inputs that batches lack, and that a U-Net needs if a key has another value than its default."""


@dataclass(frozen=True)
class UNet:
    """A published U-Net, under the keys of diffusers' ``UNet2DConditionModel``.

    Attributes:
        size: Height and width in pixels of the images that it was trained on.
    """

    config: Mapping[str, Any]
    size: int
    note: str
    task: ClassVar[Task] = TASK
    extras: ClassVar[Mapping[str, str]] = {"diffusers": "U-Nets of diffusers"}

    def __call__(self, changes: Mapping[str, Any], case: Case) -> DiffusionWorkload:
        """Return the workload of a case; ``changes`` follow the ``@`` of its model."""
        return DiffusionWorkload(self, changes, case)


SD_1_5: Final = UNet(
    {"block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": 8, "cross_attention_dim": 768},
    size=512,
    note="U-Net of Stable Diffusion 1.5, 860 M parameters, 512 px; needs actbench[diffusers]",
)
"""Rombach et al. 2022, arXiv 2112.10752."""

SDXL: Final = UNet(
    {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    size=1024,
    note="U-Net of Stable Diffusion XL, 2.57 B parameters, 1024 px; needs actbench[diffusers]",
)
"""Podell et al. 2023, arXiv 2307.01952."""


class DiffusionWorkload(base.Workload):
    """A U-Net that predicts the noise in latents, as diffusers' ``train_text_to_image.py`` trains it.

    The image encoder and the text encoders are frozen in that script; here their outputs are drawn at random, as if
    they had been computed before. ``changes`` are keys of the config; lists are written with ``/``. Sequence length has
    no effect: a prompt has 77 tokens.

    Raises:
        ModelError: diffusers is missing, a change is impossible or needs inputs that batches lack, the image size is no
            multiple of 8 px, or the case asks for another task or published weights.
    """

    def __init__(self, unet: UNet, changes: Mapping[str, Any], case: Case) -> None:
        if case.task not in ("auto", TASK):
            raise ModelError(f"--task {case.task}: {case.model} is a U-Net of a diffusion model and does {TASK}")
        if case.weights == "pretrained":
            raise ModelError(f"no pretrained weights for {case.model}: none are read; use --weights random")
        if case.target_length is not None:
            raise ModelError(f"--target-length: {case.model} writes no text; leave it out")
        self.size = edges(case.image_size or unet.size)
        if any(edge % _PIXELS for edge in self.size):
            raise ModelError(f"--image-size {write(self.size)}: {case.model} needs multiples of {_PIXELS} px")
        self.case = case
        self.spec = case.model
        make = _unet_class(case.model)
        default = {name: each.default for name, each in inspect.signature(make.__init__).parameters.items()}
        del default["self"]
        self.config = {**default, **unet.config, **_checked(changes, default, case.model)}
        for key, why in chain(_unserved(self.config, default), _unserved_additions(self.config)):
            raise ModelError(f"model {case.model!r}: {key}={self.config[key]}: {why}")  # the first of them
        self._make = make

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the U-Net in training mode with its loss and optimizer; a ModelError if its config is impossible."""
        try:
            module = construct(lambda: self._make(**self.config), materialize=materialize, seed=seed)
        except (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError, ZeroDivisionError) as error:
            raise ModelError(f"{self.spec} cannot be built: {error}") from error
        if self.case.attention == "eager":
            module.set_default_attn_processor()  # type: ignore[operator]
        self.weights_origin = "random" if materialize else folder.without_values(self.case.weights)
        built = Built(model_class=type(module).__name__, task=TASK, image_size=self.size)
        nn.Module.to(module, float_type(self.case))  # diffusers' own warns of layers to keep in float32; it has none
        return base.setup_of(self.case, module, _loss, built=built)

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make latents with noise, and the noise.

        Returns:
            ``noisy_latents (batch_size, in_channels, height / 8, width / 8)``, ``noise`` of its shape but with
            ``out_channels``, and ``encoder_hidden_states (batch_size, 77, cross_attention_dim)``, all of the case's
            type; ``timesteps (batch_size,)`` int64. For SDXL also ``text_embeds (batch_size, 1280)`` of the case's type
            and ``time_ids (batch_size, 6)``, float32.
        """
        random, dtype = base.generator(seed), float_type(self.case)
        height, width = (edge // _PIXELS for edge in self.size)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(batch_size, *shape, generator=random)

        latents, added = (drawn(self.config[key], height, width) for key in ("in_channels", "out_channels"))
        timesteps = torch.randint(_STEPS, (batch_size,), generator=random)
        kept = _kept_signal()[timesteps].view(-1, 1, 1, 1)
        known = latents[:, added.shape[1] :]  # channels without noise, as of a mask for inpainting
        noisy = kept.sqrt() * latents[:, : added.shape[1]] + (1 - kept).sqrt() * added
        batch = {
            "noisy_latents": torch.cat([noisy, known], dim=1).to(dtype),
            "noise": added.to(dtype),
            "encoder_hidden_states": drawn(PROMPT, self.config["cross_attention_dim"]).to(dtype),
            "timesteps": timesteps,
        }
        if self.config["addition_embed_type"] == "text_time":
            batch["text_embeds"] = drawn(_POOLED).to(dtype)
            batch["time_ids"] = torch.tensor([[*self.size, 0, 0, *self.size]] * batch_size, dtype=torch.float32)
        return batch


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of the predicted noise, in float32 (Ho et al. 2020, arXiv 2006.11239, eq. 14)."""
    conditions = {name: batch[name] for name in ("text_embeds", "time_ids") if name in batch}
    (predicted,) = module(
        batch["noisy_latents"],
        batch["timesteps"],
        batch["encoder_hidden_states"],
        added_cond_kwargs=conditions or None,
        return_dict=False,
    )
    return F.mse_loss(predicted.float(), batch["noise"].float())


def _kept_signal() -> Tensor:
    """Return the share of an image's variance that is left after each step of the schedule, ``(1000,)`` float32."""
    betas = torch.linspace(_FIRST_BETA**0.5, _LAST_BETA**0.5, _STEPS) ** 2
    return torch.cumprod(1 - betas, dim=0)


def _unet_class(spec: str) -> Callable[..., nn.Module]:
    logging.disable(logging.WARNING)  # it tells of optional packages of its own that are missing
    try:
        from diffusers import UNet2DConditionModel
    except ImportError as error:
        raise ModelError(
            f"model {spec!r} is built by diffusers, which cannot be imported ({error}): "
            "pip install 'actbench[diffusers]'"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    made: Callable[..., nn.Module] = UNet2DConditionModel  # type: ignore[assignment]
    return made


def _checked(changes: Mapping[str, Any], default: Mapping[str, Any], spec: str) -> dict[str, Any]:
    """Return changes of a config, with ``320/640`` as a tuple; a ModelError if the config has no such key."""
    for key in changes:
        if key not in default:
            close = difflib.get_close_matches(key, default, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "diffusers documents its keys"
            raise ModelError(f"model {spec!r}: a UNet2DConditionModel has no key {key!r}; {hint}")
    return {key: _listed(value) if isinstance(value, str) else value for key, value in changes.items()}


def _unserved(config: Mapping[str, Any], default: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys of a config that batches do not serve, and why. What comes after the first may be wrong."""
    for key in ("in_channels", "out_channels", "cross_attention_dim"):
        if not isinstance(config[key], int) or config[key] < 1:
            yield key, "batches need a whole number of at least 1 here"
    if config["out_channels"] > (channels := config["in_channels"]):
        yield "out_channels", f"noise is added to latents, which have {channels} channels: give {channels} or less"
    for key, lacking in _ABSENT.items():
        if config[key] != default[key]:
            yield key, f"this needs {lacking}, which batches do not have: leave {key} out"


def _unserved_additions(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys that batches do not serve of what the U-Net adds to the embedding of the timestep, and why."""
    added, heads = config["addition_embed_type"], config["addition_embed_type_num_heads"]
    if added not in (None, "text", "text_time"):
        yield "addition_embed_type", "batches have no images as conditions: take text or text_time, or leave it out"
    if added == "text" and config["cross_attention_dim"] % heads:
        yield "cross_attention_dim", f"addition_embed_type=text needs a multiple of its {heads} heads"
    if added == "text_time" and isinstance(width := config["addition_time_embed_dim"], int):
        wide = _POOLED + _TIME_IDS * width
        if config[key := "projection_class_embeddings_input_dim"] != wide:
            yield key, f"{_POOLED} + {_TIME_IDS} * addition_time_embed_dim is {wide}: give {key}={wide}"


def _listed(text: str) -> Any:
    values = tuple(int(part) if part.isdecimal() else part for part in text.split("/"))
    return values if len(values) > 1 else text
