"""Train ResNet-50 with Lightning in 16-bit mixed precision."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, samples, size, classes):
        self.samples, self.size, self.classes = samples, size, classes

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.randn(3, self.size, self.size), index % self.classes


class Classifier(L.LightningModule):
    def __init__(self, arch="resnet50", classes=1000, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.model = getattr(torchvision.models, arch)(num_classes=classes)

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        images, target = batch
        logits = self(images)
        loss = F.cross_entropy(logits, target)
        accuracy = (logits.argmax(dim=1) == target).float().mean()
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", accuracy, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, target = batch
        self.log("val_loss", F.cross_entropy(self(images), target), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
        return [optimizer], [scheduler]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--precision", default="16-mixed")
    args = parser.parse_args()

    L.seed_everything(1, workers=True)
    train = Pictures(args.samples, args.image_size, args.classes)
    val = Pictures(args.batch_size, args.image_size, args.classes)
    options = {"batch_size": args.batch_size, "num_workers": args.workers, "persistent_workers": args.workers > 0}
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=1,
        precision=args.precision,
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        default_root_dir="lightning-out",
    )
    trainer.fit(
        Classifier(args.arch, args.classes),
        DataLoader(train, shuffle=True, drop_last=True, pin_memory=True, **options),
        DataLoader(val, pin_memory=True, **options),
    )
