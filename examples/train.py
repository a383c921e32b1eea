"""Train a small GPT to continue sums such as 12+30=42, on one GPU."""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

CHARACTERS = "\n 0123456789+="


class Sums(Dataset):
    """Rows of sums, one after the other, cut at the length of the context."""

    def __init__(self, rows, context):
        numbers, text = random.Random(0), ""
        while len(text) <= rows * (context + 1):
            a, b = numbers.randrange(100), numbers.randrange(100)
            text += f"{a}+{b}={a + b}\n"
        codes = torch.tensor([CHARACTERS.index(character) for character in text])
        self.rows = codes[: rows * (context + 1)].view(rows, context + 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i, :-1], self.rows[i, 1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, depth, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    args = parser.parse_args()
    model = GPT(len(CHARACTERS), args.context, args.width, args.depth, heads=args.width // 64).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    loader = DataLoader(Sums(480, args.context), args.batch_size, shuffle=True, num_workers=2, pin_memory=True)
    for epoch in range(10):
        for ids, targets in loader:
            ids, targets = ids.to("cuda", non_blocking=True), targets.to("cuda", non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(ids)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.3f}", f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    torch.save(model.state_dict(), "gpt.pt")


if __name__ == "__main__":
    main()
