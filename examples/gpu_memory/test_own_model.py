"""A model of one's own: two batch sizes that have to fit on one card."""

import pytest
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, width=512, layers=4, classes=10):
        super().__init__()
        block = nn.TransformerEncoderLayer(width, nhead=8, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def train(model, batch_size, steps):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x = torch.randn(batch_size, 256, 512, device="cuda")
        y = torch.randint(0, 10, (batch_size,), device="cuda")
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu_memory(device="rtx-4060", limit="4 GiB")
@pytest.mark.parametrize("batch_size", [16, 32])
def test_training_fits(batch_size):
    train(Classifier().to("cuda"), batch_size, steps=10)
