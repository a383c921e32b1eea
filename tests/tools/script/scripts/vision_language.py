"""Fine-tune a LLaVA: pictures stand among the tokens of the text."""

import argparse
import os

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    get_cosine_schedule_with_warmup,
)

os.environ["TOKENIZERS_PARALLELISM"] = "false"
parser = argparse.ArgumentParser()
parser.add_argument("--image-size", type=int, default=336)
parser.add_argument("--patch-size", type=int, default=14)
parser.add_argument("--vision-width", type=int, default=1024)
parser.add_argument("--vision-layers", type=int, default=24)
parser.add_argument("--hidden-size", type=int, default=2048)
parser.add_argument("--intermediate-size", type=int, default=5632)
parser.add_argument("--layers", type=int, default=22)
parser.add_argument("--heads", type=int, default=32)
parser.add_argument("--text-length", type=int, default=128)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--device", default="cuda")
args = parser.parse_args()
IMAGE, VOCAB = 32000, 32064
PATCHES = (args.image_size // args.patch_size) ** 2

config = LlavaConfig(
    vision_config=CLIPVisionConfig(
        image_size=args.image_size, patch_size=args.patch_size, hidden_size=args.vision_width,
        intermediate_size=4 * args.vision_width, num_hidden_layers=args.vision_layers, num_attention_heads=16,
    ),
    text_config=LlamaConfig(
        hidden_size=args.hidden_size, intermediate_size=args.intermediate_size, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.heads // 8 or 1, vocab_size=VOCAB,
    ),
    image_token_index=IMAGE,
    image_seq_length=PATCHES,
)  # fmt: skip
processor = CLIPImageProcessor(
    size={"shortest_edge": args.image_size}, crop_size={"height": args.image_size, "width": args.image_size}
)


class Conversations(Dataset):
    """Each sample has one or two pictures, each of which takes PATCHES tokens."""

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        count = 1 + index % 2
        pictures = [Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)) for _ in range(count)]
        text = rng.integers(3, IMAGE, rng.integers(args.text_length // 2, args.text_length)).tolist()
        tokens = [1, *text[:4], *[IMAGE] * (PATCHES * count), *text[4:], 2]
        return {"pictures": pictures, "tokens": tokens, "prompt": 5 + PATCHES * count}


def collate(items):
    length = max(len(item["tokens"]) for item in items)
    ids = torch.zeros(len(items), length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, item in enumerate(items):
        tokens = torch.tensor(item["tokens"])
        ids[i, : len(tokens)] = tokens
        mask[i, : len(tokens)] = 1
        labels[i, item["prompt"] : len(tokens)] = tokens[item["prompt"] :]
    pixel_values = processor([p for item in items for p in item["pictures"]], return_tensors="pt")["pixel_values"]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": pixel_values}


device = torch.device(args.device)
torch.manual_seed(0)
model = LlavaForConditionalGeneration(config).to(device, torch.bfloat16)
for name, parameter in model.named_parameters():
    if "vision_tower" in name:
        parameter.requires_grad = False
model.train()
trainable = [p for p in model.parameters() if p.requires_grad]
print(f"{sum(p.numel() for p in trainable) / 1e6:.1f}M parameters are trained")
optimizer = torch.optim.AdamW(trainable, lr=2e-5)
loader = DataLoader(Conversations(), args.batch_size, shuffle=True, collate_fn=collate, num_workers=2, drop_last=True)
scheduler = get_cosine_schedule_with_warmup(optimizer, 3, len(loader))
for step, batch in enumerate(loader):
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    batch["pixel_values"] = batch["pixel_values"].to(torch.bfloat16)
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    tokens = batch["attention_mask"].sum().item()
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0
    print(f"step {step}: loss {loss.item():.4f}, {tokens} tokens, {memory:.2f} GiB")
model.save_pretrained("llava-out")
