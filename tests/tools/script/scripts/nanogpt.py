"""Train a small GPT with mixed precision, a gradient scaler and gradient clipping."""

import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--vocab", type=int, default=50304)
parser.add_argument("--context", type=int, default=1024)
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--samples", type=int, default=256)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--max-iters", type=int, default=20)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, width, layers, heads, context):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


torch.manual_seed(1337)
model = GPT(args.vocab, args.width, args.layers, args.heads, args.context).to(device)
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
scaler = torch.amp.GradScaler(device)
dataset = TensorDataset(torch.randint(0, args.vocab, (args.samples, args.context + 1)))
loader = DataLoader(
    dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True
)

for step, (batch,) in enumerate(loader):
    start = time.time()
    batch = batch.to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.float16):
        loss = model(batch[:, :-1], batch[:, 1:])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    memory = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0
    print(f"iter {step}: loss {loss.item():.4f}, norm {norm:.2f}, {time.time() - start:.2f}s, {memory:.0f} MiB")
    if math.isnan(loss.item()):
        raise SystemExit("the loss is NaN")
    if step == args.max_iters:
        break

torch.save(model.state_dict(), "nanogpt.pt")
