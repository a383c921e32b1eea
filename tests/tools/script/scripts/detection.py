"""Train RetinaNet or Faster R-CNN in the manner of torchvision's detection reference."""

import argparse
import math
import random
import sys
import time

import torch
import torchvision
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes


class Rectangles(Dataset):
    """Pictures of different sizes, each with one to eight coloured rectangles."""

    def __init__(self, samples, size, classes, transforms):
        self.samples, self.size, self.classes, self.transforms = samples, size, classes, transforms

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        rng = random.Random(index)
        width, height = (rng.randrange(3 * self.size // 4, self.size) for _ in range(2))
        image = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
        draw = ImageDraw.Draw(image)
        boxes, labels = [], []
        for _ in range(rng.randint(1, 8)):
            x, y = rng.randrange(width // 2), rng.randrange(height // 2)
            box = [x, y, x + rng.randrange(8, width // 2), y + rng.randrange(8, height // 2)]
            draw.rectangle(box, fill=tuple(rng.randrange(256) for _ in range(3)))
            boxes.append(box)
            labels.append(rng.randrange(1, self.classes))
        target = {
            "boxes": BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width), dtype=torch.float32),
            "labels": torch.tensor(labels),
            "image_id": index,
        }
        return self.transforms(image, target)


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


def train_one_epoch(model, optimizer, data_loader, device, epoch, scaler=None):
    model.train()
    lr_scheduler = None
    if epoch == 0:
        iters = min(1000, max(len(data_loader) - 1, 1))
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0 / 1000, total_iters=iters)
    for i, (images, targets) in enumerate(data_loader):
        start = time.time()
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
        with torch.autocast(device.type, enabled=scaler is not None):
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            print(loss_dict)
            sys.exit(1)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            losses.backward()
            optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0
        parts = ", ".join(f"{name} {loss.item():.4f}" for name, loss in loss_dict.items())
        print(
            f"Epoch: [{epoch}] [{i}] loss {loss_value:.4f} ({parts}) {time.time() - start:.2f}s max mem: {memory:.0f}"
        )


def main(args):
    device = torch.device(args.device)
    transforms = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.PILToTensor(), v2.ToDtype(torch.float, scale=True)])
    dataset = Rectangles(args.samples, args.size, args.classes, transforms)
    data_loader = DataLoader(
        dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, collate_fn=collate_fn
    )
    kwargs = {"min_size": args.min_size, "max_size": args.max_size, "trainable_backbone_layers": 3}
    model = torchvision.models.get_model(
        args.model, weights=None, weights_backbone=None, num_classes=args.classes, **kwargs
    )
    model.to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.001, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device.type) if args.amp else None
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[16, 22], gamma=0.1)
    for epoch in range(args.epochs):
        train_one_epoch(model, optimizer, data_loader, device, epoch, scaler)
        lr_scheduler.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"model_{epoch}.pth")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="fasterrcnn_resnet50_fpn", help="or retinanet_resnet50_fpn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-b", "--batch-size", default=2, type=int)
    parser.add_argument("-j", "--workers", default=4, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--samples", default=32, type=int)
    parser.add_argument("--classes", default=91, type=int)
    parser.add_argument("--size", default=640, type=int)
    parser.add_argument("--min-size", default=800, type=int)
    parser.add_argument("--max-size", default=1333, type=int)
    parser.add_argument("--amp", action="store_true")
    main(parser.parse_args())
