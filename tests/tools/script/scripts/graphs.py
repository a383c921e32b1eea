"""Train a message passing network on batches of graphs that stand side by side."""

import argparse
import random
import time
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=200, help="of the largest graph")
parser.add_argument("--degree", type=int, default=8)
parser.add_argument("--features", type=int, default=32)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--samples", type=int, default=4096)
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Graphs:
    x: torch.Tensor
    edge_index: torch.Tensor
    edge_attr: torch.Tensor
    batch: torch.Tensor
    y: torch.Tensor

    def to(self, device, non_blocking=False):
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return Graphs(**moved)


class Molecules(Dataset):
    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        n = random.Random(index).randint(args.nodes // 4, args.nodes)
        edge_index = torch.randint(0, n, (2, n * args.degree))
        x, edge_attr = torch.randn(n, args.features), torch.randn(n * args.degree, 4)
        return Graphs(x, edge_index, edge_attr, torch.zeros(n, dtype=torch.long), x.mean().view(1))


def collate(graphs):
    offsets = torch.tensor([0, *(len(g.x) for g in graphs)]).cumsum(0)
    return Graphs(
        x=torch.cat([g.x for g in graphs]),
        edge_index=torch.cat([g.edge_index + offset for g, offset in zip(graphs, offsets, strict=False)], dim=1),
        edge_attr=torch.cat([g.edge_attr for g in graphs]),
        batch=torch.cat([g.batch + i for i, g in enumerate(graphs)]),
        y=torch.cat([g.y for g in graphs]),
    )


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * hidden + 4, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.update = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU())

    def forward(self, x, edge_index, edge_attr):
        source, target = edge_index
        messages = self.message(torch.cat([x[source], x[target], edge_attr], dim=-1))
        degree = torch.bincount(target, minlength=x.size(0)).clamp(min=1).unsqueeze(-1)
        summed = torch.zeros_like(x).index_add(0, target, messages)
        return x + self.update(torch.cat([x, summed / degree], dim=-1))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(args.features, args.hidden)
        self.layers = nn.ModuleList(Layer(args.hidden) for _ in range(args.layers))
        self.head = nn.Sequential(nn.Linear(args.hidden, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 1))

    def forward(self, data):
        x = self.embed(data.x)
        for layer in self.layers:
            x = layer(x, data.edge_index, data.edge_attr)
        graphs = int(data.batch.max()) + 1
        pooled = torch.zeros(graphs, x.size(1), device=x.device, dtype=x.dtype).index_add_(0, data.batch, x)
        counts = torch.bincount(data.batch, minlength=graphs).unsqueeze(-1)
        return self.head(pooled / counts).squeeze(-1)


loader = DataLoader(
    Molecules(), args.batch_size, shuffle=True, collate_fn=collate, num_workers=args.workers, drop_last=True
)
model = Network().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=5)
for epoch in range(args.epochs):
    total, start = 0.0, time.time()
    for step, data in enumerate(loader):
        data = data.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.l1_loss(model(data), data.y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        total += loss.item() * len(data.y)
        memory = torch.cuda.max_memory_allocated() >> 20 if torch.cuda.is_available() else 0
        print(f"{epoch} {step}: {len(data.x)} nodes, {data.edge_index.size(1)} edges, loss {loss:.4f}, {memory} MiB")
    scheduler.step(total / args.samples)
    print(f"epoch {epoch}: {total / args.samples:.4f} in {time.time() - start:.1f} s")
torch.save(model.state_dict(), "graphs.pt")
