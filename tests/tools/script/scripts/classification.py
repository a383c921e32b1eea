"""Train an image classifier in the manner of torchvision's classification reference."""

import argparse
import datetime
import os
import time

import torch
import torchvision
from torch import nn
from torch.utils.data.dataloader import default_collate
from torchvision.transforms import v2


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        if target.ndim == 2:
            target = target.max(dim=1)[1]
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def exponential_moving_average(averaged, current, num_averaged, decay=0.999):
    return decay * averaged + (1 - decay) * current


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None, scaler=None):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        start = time.time()
        image, target = image.to(device), target.to(device)
        with torch.autocast(device.type, enabled=scaler is not None, dtype=torch.float16):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
        if model_ema and i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0
        rate = image.shape[0] / (time.time() - start)
        print(
            f"Epoch: [{epoch}] [{i}/{len(data_loader)}] lr: {optimizer.param_groups[0]['lr']} loss: {loss.item():.4f} "
            f"acc1: {acc1.item():.2f} acc5: {acc5.item():.2f} img/s: {rate:.1f} max mem: {memory:.0f}"
        )


@torch.inference_mode()
def evaluate(model, criterion, data_loader, device):
    model.eval()
    total, right = 0, 0.0
    for image, target in data_loader:
        image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(image)
        right += accuracy(output, target)[0].item() * image.shape[0]
        total += image.shape[0]
    print(f"Test: loss {criterion(output, target).item():.4f} Acc@1 {right / total:.3f}")


def main(args):
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    usual = [
        v2.PILToTensor(),
        v2.ToDtype(torch.float, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    train_transform = v2.Compose([v2.RandomResizedCrop(args.crop_size), v2.RandomHorizontalFlip(), *usual])
    val_transform = v2.Compose([v2.Resize(args.crop_size + 8), v2.CenterCrop(args.crop_size), *usual])
    size = (3, args.crop_size + 32, args.crop_size + 64)
    dataset = torchvision.datasets.FakeData(args.samples, size, args.classes, train_transform)
    dataset_test = torchvision.datasets.FakeData(args.batch_size, size, args.classes, val_transform)
    mix = v2.RandomChoice([v2.MixUp(num_classes=args.classes, alpha=0.2), v2.CutMix(num_classes=args.classes)])
    data_loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True,
        collate_fn=(lambda batch: mix(*default_collate(batch))) if args.mix else None,
    )  # fmt: skip
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=args.batch_size, pin_memory=True)

    model = torchvision.models.get_model(args.model, weights=None, num_classes=args.classes).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 2e-5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(device.type) if args.amp else None
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=85)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
    model_ema = None
    if args.ema:
        model_ema = torch.optim.swa_utils.AveragedModel(model, device, exponential_moving_average, use_buffers=True)

    start = time.time()
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, device)
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "args": args}
        torch.save(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("-j", "--workers", default=16, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--samples", default=512, type=int)
    parser.add_argument("--classes", default=1000, type=int)
    parser.add_argument("--crop-size", default=224, type=int)
    parser.add_argument("--label-smoothing", default=0.1, type=float)
    parser.add_argument("--clip-grad-norm", default=1.0, type=float)
    parser.add_argument("--model-ema-steps", default=1, type=int)
    parser.add_argument("--output-dir", default=".")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--mix", action="store_true")
    parser.add_argument("--ema", action="store_true")
    main(parser.parse_args())
