"""A module of Lightning, fitted as in training."""

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning")


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch, _):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.gpu_memory(device="rtx-4060", limit="2 GiB")
def test_network_fits(tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(256, 3, 64, 64), torch.randint(0, 10, (256,)))
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    trainer.fit(Network(), torch.utils.data.DataLoader(data, batch_size=64))
