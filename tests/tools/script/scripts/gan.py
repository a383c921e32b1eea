"""Train a DCGAN with Lightning: two optimizers and manual optimization."""

import argparse

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def init_weights(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator(latent, width):
    layers = [nn.ConvTranspose2d(latent, width * 8, 4, 1, 0, bias=False), nn.BatchNorm2d(width * 8), nn.ReLU(True)]
    for wide, narrow in ((8, 4), (4, 2), (2, 1)):
        layers += [nn.ConvTranspose2d(width * wide, width * narrow, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(width * narrow), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(width):
    layers = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for narrow, wide in ((1, 2), (2, 4), (4, 8)):
        layers += [nn.Conv2d(width * narrow, width * wide, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(width * wide), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(width * 8, 1, 4, 1, 0, bias=False), nn.Flatten(0))


class DCGAN(L.LightningModule):
    def __init__(self, latent=100, width=64, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = generator(latent, width).apply(init_weights)
        self.discriminator = discriminator(width).apply(init_weights)

    def forward(self, noise):
        return self.generator(noise)

    def adversarial_loss(self, logits, real):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch):
        (images,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        noise = torch.randn(len(images), self.hparams.latent, 1, 1).type_as(images)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(noise)), True)
        self.log("g_loss", g_loss, prog_bar=True)
        optimizer_g.zero_grad()
        self.manual_backward(g_loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(images), True)
        fake_loss = self.adversarial_loss(self.discriminator(self(noise).detach()), False)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(optimizer_d, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        options = {"lr": self.hparams.lr, "betas": (0.5, 0.999)}
        optimizer_g = torch.optim.Adam(self.generator.parameters(), **options)
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), **options)
        return [optimizer_g, optimizer_d], []


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--latent", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--samples", type=int, default=2560)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    L.seed_everything(0)
    images = TensorDataset(torch.rand(args.samples, 3, 64, 64) * 2 - 1)
    loader = DataLoader(
        images, args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True
    )
    trainer = L.Trainer(accelerator="auto", devices=1, max_epochs=args.epochs, default_root_dir="gan-out")
    trainer.fit(DCGAN(args.latent, args.width), loader)
