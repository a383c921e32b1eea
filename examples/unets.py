"""The U-Nets of Stable Diffusion: ``actbench measure examples/unets.py:sdxl -b 4 -s autocast:fp16+checkpoint``.

They are built by diffusers with their published configs, and trained as by diffusers' ``train_text_to_image.py``. The
image encoder and the text encoders are frozen in that script; here their outputs are drawn at random, as if they had
been computed before. For another size or config write a function of your own that returns ``build(...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F

PROMPT = 77  # tokens of a prompt: CLIP's text encoders pad each to so many
PIXELS = 8  # of an image, in each direction, in one latent of the autoencoder
POOLED = 1280  # SDXL's second text encoder summarises a prompt in so many numbers

SD_1_5: Mapping[str, Any] = {  # Rombach et al. 2022, arXiv 2112.10752
    "block_out_channels": (320, 640, 1280, 1280),
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
}
SDXL: Mapping[str, Any] = {  # Podell et al. 2023, arXiv 2307.01952
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
}


def build(
    config: Mapping[str, Any], size: tuple[int, int]
) -> tuple[nn.Module, Callable[[int], Mapping[str, Tensor]], Callable[[nn.Module, Mapping[str, Tensor]], Tensor]]:
    """Return a U-Net, its batches for images of ``size`` pixels (height, width), and its loss."""
    module = UNet2DConditionModel(**config)
    height, width = (edge // PIXELS for edge in size)

    def make_batch(n: int) -> Mapping[str, Tensor]:
        latents = torch.randn(n, module.config.in_channels, height, width)
        noise = torch.randn(n, module.config.out_channels, height, width)
        timesteps = torch.randint(1000, (n,))
        kept = kept_signal()[timesteps].view(-1, 1, 1, 1)
        channels = noise.shape[1]
        known = latents[:, channels:]  # channels without noise, as of a mask for inpainting
        noisy = kept.sqrt() * latents[:, :channels] + (1 - kept).sqrt() * noise
        batch = {
            "noisy_latents": torch.cat([noisy, known], dim=1),
            "noise": noise,
            "encoder_hidden_states": torch.randn(n, PROMPT, module.config.cross_attention_dim),
            "timesteps": timesteps,
        }
        if module.config.addition_embed_type == "text_time":
            batch["text_embeds"] = torch.randn(n, POOLED)
            batch["time_ids"] = torch.tensor([[*size, 0, 0, *size]] * n, dtype=torch.float32)  # sizes and crops
        return batch

    return module, make_batch, loss


def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean squared error of the predicted noise (Ho et al. 2020, arXiv 2006.11239, eq. 14)."""
    conditions = {name: batch[name] for name in ("text_embeds", "time_ids") if name in batch}
    (predicted,) = module(
        batch["noisy_latents"],
        batch["timesteps"],
        batch["encoder_hidden_states"],
        added_cond_kwargs=conditions or None,
        return_dict=False,
    )
    return F.mse_loss(predicted.float(), batch["noise"].float())


def kept_signal() -> Tensor:
    """Return the share of an image's variance that is left after each of 1000 steps of noise, float32."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    return torch.cumprod(1 - betas, dim=0)


def sd_1_5():
    """Return the U-Net of Stable Diffusion 1.5: 860 million parameters, images of 512 px."""
    return build(SD_1_5, (512, 512))


def sdxl():
    """Return the U-Net of Stable Diffusion XL: 2.57 billion parameters, images of 1024 px."""
    return build(SDXL, (1024, 1024))
