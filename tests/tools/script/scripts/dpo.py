"""Train a language model on preferences by DPO: a policy, its frozen reference, chosen and rejected answers."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, Qwen2Config


class Preferences(Dataset):
    """A prompt with two answers of different lengths."""

    def __init__(self, samples, length, vocab):
        self.samples, self.length, self.vocab = samples, length, vocab

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        prompt = torch.randint(0, self.vocab, (self.length // 4,), generator=generator)
        item = {"prompt": prompt}
        for name in ("chosen", "rejected"):
            answer = torch.randint(self.length // 4, 3 * self.length // 4, (1,), generator=generator).item()
            item[name] = torch.cat([prompt, torch.randint(0, self.vocab, (answer,), generator=generator)])
        return item


def collate(items):
    """Chosen answers first, rejected ones after them: 2n rows, padded to the longest."""
    rows = [item["chosen"] for item in items] + [item["rejected"] for item in items]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    starts = torch.tensor([len(item["prompt"]) for item in items]).repeat(2)[:, None]
    positions = torch.arange(input_ids.size(1))[None]
    mask = positions < lengths
    return {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "labels": input_ids.masked_fill(~mask | (positions < starts), -100),
    }


def log_probabilities(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    tokens = torch.gather(logits.float().log_softmax(-1), 2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (tokens * mask).sum(-1).chunk(2)


def main(args):
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    config = Qwen2Config(
        hidden_size=args.hidden_size, intermediate_size=args.intermediate_size, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, vocab_size=args.vocab,
        tie_word_embeddings=True,
    )  # fmt: skip
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    reference = copy.deepcopy(policy).to(torch.bfloat16).eval().requires_grad_(False)
    policy.gradient_checkpointing_enable()
    policy.train()
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-7)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 150))
    loader = DataLoader(
        Preferences(args.samples, args.length, args.vocab), args.batch_size, shuffle=True, collate_fn=collate,
        num_workers=2, pin_memory=True, drop_last=True,
    )  # fmt: skip
    for step, batch in enumerate(loader):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            with torch.no_grad():
                reference_chosen, reference_rejected = log_probabilities(reference, batch)
            policy_chosen, policy_rejected = log_probabilities(policy, batch)
        chosen_rewards = args.beta * (policy_chosen - reference_chosen)
        rejected_rewards = args.beta * (policy_rejected - reference_rejected)
        loss = -F.logsigmoid(chosen_rewards - rejected_rewards).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0).item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accuracy = (chosen_rewards > rejected_rewards).float().mean().cpu().numpy()
        margins = (chosen_rewards - rejected_rewards).detach().cpu().tolist()
        print(f"{step}: loss {loss.item():.4f} accuracy {accuracy:.2f} margin {margins[0]:.3f} norm {norm:.2f}")
        if torch.cuda.is_available():
            print(f"{step}: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    torch.save({"state": policy.state_dict(), "step": step}, "policy.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden-size", type=int, default=896)
    parser.add_argument("--intermediate-size", type=int, default=4864)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
