"""Trains a classifier of words and evaluates it after each epoch, keeping all scores on the card until the end.

A step fits where the evaluation does not: actbench run --device-profile rtx-4060 --whole examples/train_evaluate.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS, CLASSES = 30_000, 5_000


class Sentences(Dataset):
    """Sentences of 10 to 128 made-up words, each of a class."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        words = torch.arange(10 + i * 37 % 119) * (i + 1) % WORDS
        return words, words % CLASSES


def padded(rows):
    words, classes = zip(*rows, strict=True)
    return (
        nn.utils.rnn.pad_sequence(words, batch_first=True),
        nn.utils.rnn.pad_sequence(classes, batch_first=True, padding_value=-100),
    )


class Tagger(nn.Module):
    """Two transformer blocks between an embedding and a layer that scores the classes of each word."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 512)
        block = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(512, CLASSES)

    def forward(self, words):
        return self.scores(self.blocks(self.embedding(words)))


def main():
    model = Tagger().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    train = DataLoader(Sentences(20_000), 64, shuffle=True, collate_fn=padded)
    test = DataLoader(Sentences(2_000), 64, collate_fn=padded)
    for epoch in range(5):
        model.train()
        for words, classes in train:
            scores = model(words.to("cuda"))
            loss = F.cross_entropy(scores.flatten(0, 1), classes.to("cuda").flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            kept = [model(words.to("cuda")).flatten(0, 1) for words, _ in test]
            best = torch.cat(kept).argmax(dim=1)
        print(f"epoch {epoch}: loss {loss.item():.3f}, words evaluated: {len(best)}")
        del kept, best
        torch.save(model.state_dict(), "tagger.pt")


if __name__ == "__main__":
    main()
