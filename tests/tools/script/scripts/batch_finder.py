"""Fine-tune BERT on pairs of sentences; accelerate halves the batch until it fits."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class SentencePairs(Dataset):
    def __init__(self, samples, length, vocab):
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(length // 2, length + 1, (samples,), generator=generator).tolist()
        self.vocab = vocab

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": torch.randint(0, self.vocab, (self.lengths[index],)), "labels": index % 2}


def collate_fn(examples):
    ids = torch.nn.utils.rnn.pad_sequence([e["input_ids"] for e in examples], batch_first=True, padding_value=0)
    lengths = torch.tensor([len(e["input_ids"]) for e in examples])
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([e["labels"] for e in examples])}


def training_function(args):
    accelerator = Accelerator(mixed_precision=args.mixed_precision)

    @find_executable_batch_size(starting_batch_size=args.batch_size)
    def inner_training_loop(batch_size):
        nonlocal accelerator
        accelerator.free_memory()
        accelerator.print(f"Trying a batch of {batch_size}")
        set_seed(42)
        config = BertConfig(
            hidden_size=args.hidden_size,
            intermediate_size=4 * args.hidden_size,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
        )
        model = BertForSequenceClassification(config)
        model = model.to(accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
        train = SentencePairs(args.samples, args.length, config.vocab_size)
        train_loader = DataLoader(train, shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True)
        eval_loader = DataLoader(
            SentencePairs(args.samples // 4, args.length, config.vocab_size),
            collate_fn=collate_fn,
            batch_size=batch_size,
        )
        scheduler = get_linear_schedule_with_warmup(optimizer, 10, len(train_loader) * args.epochs)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        for epoch in range(args.epochs):
            model.train()
            for step, batch in enumerate(train_loader):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                accelerator.print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")
            model.eval()
            right = total = 0
            for batch in eval_loader:
                with torch.no_grad():
                    outputs = model(**batch)
                predictions = outputs.logits.argmax(dim=-1)
                predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
                right += (predictions == references).sum().item()
                total += len(references)
            accelerator.print(f"epoch {epoch}: accuracy {right / total:.3f}")
        accelerator.save_state("batch-finder-out")

    inner_training_loop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--mixed-precision", default="bf16", choices=["no", "fp16", "bf16"])
    training_function(parser.parse_args())
