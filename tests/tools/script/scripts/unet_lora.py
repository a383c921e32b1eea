"""Fine-tune the U-Net of a latent diffusion model with LoRA, in the manner of diffusers' text-to-image example."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from transformers import CLIPTextConfig, CLIPTextModel

parser = argparse.ArgumentParser()
parser.add_argument("--resolution", type=int, default=512)
parser.add_argument("--channels", type=int, nargs="+", default=[320, 640, 1280, 1280])
parser.add_argument("--layers-per-block", type=int, default=2)
parser.add_argument("--text-width", type=int, default=768)
parser.add_argument("--text-layers", type=int, default=12)
parser.add_argument("--vae-channels", type=int, nargs="+", default=[128, 256, 512, 512])
parser.add_argument("--groups", type=int, default=32)
parser.add_argument("--train-batch-size", type=int, default=4)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--rank", type=int, default=4)
parser.add_argument("--max-train-steps", type=int, default=16)
parser.add_argument("--mixed-precision", default="fp16", choices=["no", "fp16", "bf16"])
parser.add_argument("--gradient-checkpointing", action="store_true")
args = parser.parse_args()


class Captioned(Dataset):
    transform = transforms.Compose([
        transforms.Resize(args.resolution), transforms.CenterCrop(args.resolution), transforms.RandomHorizontalFlip(),
        transforms.ToTensor(), transforms.Normalize([0.5], [0.5]),
    ])  # fmt: skip

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        return {"pixel_values": self.transform(Image.fromarray(pixels)), "input_ids": torch.randint(0, 1000, (77,))}


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    pixel_values = pixel_values.to(memory_format=torch.contiguous_format).float()
    return {"pixel_values": pixel_values, "input_ids": torch.stack([example["input_ids"] for example in examples])}


accelerator = Accelerator(mixed_precision=args.mixed_precision)
set_seed(0)
noise_scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
text_encoder = CLIPTextModel(CLIPTextConfig(
    vocab_size=49408, hidden_size=args.text_width, intermediate_size=4 * args.text_width,
    num_hidden_layers=args.text_layers, num_attention_heads=args.text_width // 64 or 1,
))  # fmt: skip
down, up = len(args.vae_channels) * ("DownEncoderBlock2D",), len(args.vae_channels) * ("UpDecoderBlock2D",)
vae = AutoencoderKL(
    block_out_channels=args.vae_channels, down_block_types=down, up_block_types=up, layers_per_block=2,
    latent_channels=4, norm_num_groups=args.groups, sample_size=args.resolution,
)  # fmt: skip
n = len(args.channels) - 1
unet = UNet2DConditionModel(
    block_out_channels=args.channels, layers_per_block=args.layers_per_block, cross_attention_dim=args.text_width,
    down_block_types=n * ("CrossAttnDownBlock2D",) + ("DownBlock2D",), norm_num_groups=args.groups,
    up_block_types=("UpBlock2D",) + n * ("CrossAttnUpBlock2D",), attention_head_dim=8, sample_size=args.resolution // 8,
)  # fmt: skip
for model in (unet, vae, text_encoder):
    model.requires_grad_(False)
weight_dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[accelerator.mixed_precision]
for model in (unet, vae, text_encoder):
    model.to(accelerator.device, dtype=weight_dtype)
unet.add_adapter(LoraConfig(
    r=args.rank, lora_alpha=args.rank, init_lora_weights="gaussian",
    target_modules=["to_k", "to_q", "to_v", "to_out.0"],
))  # fmt: skip
if args.mixed_precision == "fp16":
    cast_training_params(unet, dtype=torch.float32)
if args.gradient_checkpointing:
    unet.enable_gradient_checkpointing()

lora_layers = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(lora_layers, lr=1e-4, weight_decay=1e-2)
loader = DataLoader(Captioned(), shuffle=True, collate_fn=collate_fn, batch_size=args.train_batch_size, num_workers=2)
lr_scheduler = get_scheduler("constant", optimizer=optimizer, num_warmup_steps=0)
unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)

for step, batch in enumerate(loader):
    with accelerator.accumulate(unet):
        latents = vae.encode(batch["pixel_values"].to(dtype=weight_dtype)).latent_dist.sample()
        latents = latents * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),), device=latents.device)
        noisy = noise_scheduler.add_noise(latents, noise, timesteps.long())
        hidden = text_encoder(batch["input_ids"], return_dict=False)[0]
        prediction = unet(noisy, timesteps, hidden, return_dict=False)[0]
        loss = F.mse_loss(prediction.float(), noise.float(), reduction="mean")
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(lora_layers, 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    average = accelerator.gather(loss.repeat(args.train_batch_size)).mean()
    print(
        f"step {step}: loss {loss.detach().item():.4f}, gathered {average.item():.4f}, lr {lr_scheduler.get_last_lr()}"
    )
    if step + 1 >= args.max_train_steps:
        break
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    unet = accelerator.unwrap_model(unet).to(torch.float32)
    save_file(get_peft_model_state_dict(unet), "pytorch_lora_weights.safetensors")
