"""Train ViT-B/16 on ImageNet-like pictures, in the manner of torch's old ImageNet example."""

import argparse
import time

import torch
import torchvision
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("-b", "--batch-size", type=int, default=64)
parser.add_argument("-j", "--workers", type=int, default=8)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()


class Pictures(Dataset):
    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        return torch.randn(3, args.image_size, args.image_size), index % args.classes


def accuracy(output, target, topk=(1, 5)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


torch.backends.cudnn.benchmark = True
model = torchvision.models.vit_b_16(image_size=args.image_size, num_classes=args.classes)
model = model.cuda().to(memory_format=torch.channels_last)
criterion = torch.nn.CrossEntropyLoss().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
scaler = torch.amp.GradScaler("cuda")
loader = DataLoader(
    Pictures(), args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True
)

for epoch in range(args.epochs):
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.cuda(non_blocking=True).to(memory_format=torch.channels_last)
        target = target.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(images)
            loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
        print(
            f"Epoch [{epoch}][{i}/{len(loader)}] time {time.time() - end:.3f} loss {loss.item():.4f} "
            f"acc@1 {acc1[0]:6.2f} acc@5 {acc5.item():6.2f} mem {torch.cuda.max_memory_allocated() / 2**20:.0f}"
        )
        end = time.time()
    scheduler.step()
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pth")
