"""Train a recogniser of speech by CTC, on spectrograms of several lengths."""

import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--bands", type=int, default=80)
parser.add_argument("--frames", type=int, default=1200, help="of the longest recording")
parser.add_argument("--letters", type=int, default=120, help="of the longest text")
parser.add_argument("--alphabet", type=int, default=32, help="classes; 0 is the blank")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Recordings(Dataset):
    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        part = random.Random(index).uniform(0.5, 1)
        text = torch.randint(1, args.alphabet, (int(part * args.letters),))
        return torch.randn(int(part * args.frames), args.bands), text


def collate(samples):
    sounds, texts = zip(*samples, strict=True)
    frames = torch.tensor([len(sound) for sound in sounds])
    return pad_sequence(sounds, batch_first=True), frames, torch.cat(texts), torch.tensor([len(t) for t in texts])


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(args.bands)
        self.halve = nn.Conv1d(args.bands, args.width, 3, stride=2, padding=1)
        layer = nn.TransformerEncoderLayer(args.width, args.heads, 4 * args.width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, args.alphabet)

    def forward(self, sound, frames):
        x = F.gelu(self.halve(self.norm(sound.transpose(1, 2)))).transpose(1, 2)
        lengths = (frames + 1) // 2
        is_padding = torch.arange(x.size(1), device=x.device) >= lengths.to(x.device)[:, None]
        return self.head(self.encoder(x, src_key_padding_mask=is_padding)), lengths


torch.manual_seed(0)
loader = DataLoader(Recordings(), args.batch_size, collate_fn=collate, drop_last=True)
model = Recogniser().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=len(loader))
scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
for step, (sound, frames, text, letters) in enumerate(loader):
    with torch.autocast(device.type, enabled=args.amp):
        scores, lengths = model(sound.to(device, non_blocking=True), frames)
        log_probs = scores.float().log_softmax(-1)
    loss = F.ctc_loss(log_probs.transpose(0, 1), text.to(device), lengths, letters, zero_infinity=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
    heard = scores.argmax(-1)
    print(f"{step}: loss {loss.item():.4f}, {len(heard.unique())} letters heard, {(heard == 0).sum().item()} blanks")
