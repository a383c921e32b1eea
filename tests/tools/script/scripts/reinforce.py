"""Train a language model by rewards of the texts that it writes, near a reference model (REINFORCE, leave one out)."""

import argparse
import copy

import torch
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--hidden-size", type=int, default=1024)
parser.add_argument("--intermediate-size", type=int, default=2816)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=16)
parser.add_argument("--kv-heads", type=int, default=4)
parser.add_argument("--vocab", type=int, default=32000)
parser.add_argument("--prompts", type=int, default=4)
parser.add_argument("--answers", type=int, default=4, help="to each prompt")
parser.add_argument("--length", type=int, default=64, help="of a prompt, and of an answer at most")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
PAD, END = 0, 2

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=args.hidden_size,
    intermediate_size=args.intermediate_size,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    num_key_value_heads=args.kv_heads,
    vocab_size=args.vocab,
    pad_token_id=PAD,
    eos_token_id=END,
)
model = LlamaForCausalLM(config).to(device)
reference = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
scheduler = get_cosine_schedule_with_warmup(optimizer, 5, args.steps)


def log_probs(of, texts):
    scores = of(texts, attention_mask=(texts != PAD).long()).logits[:, args.length - 1 : -1]
    return scores.log_softmax(-1).gather(-1, texts[:, args.length :, None]).squeeze(-1)


def reward(answer):
    """Different words are good."""
    return len(set(answer.tolist())) / args.length


for step in range(args.steps):
    prompts = torch.randint(3, args.vocab, (args.prompts, args.length), device=device)
    model.eval()
    with torch.no_grad():
        texts = model.generate(
            prompts, max_new_tokens=args.length, do_sample=True, top_k=50, num_return_sequences=args.answers
        )
        old = log_probs(reference, texts)
    model.train()
    answers = texts[:, args.length :]
    mask = (answers != PAD).float()
    rewards = torch.tensor([reward(answer) for answer in answers], device=device).view(-1, args.answers)
    others = (rewards.sum(1, keepdim=True) - rewards) / (args.answers - 1)
    new = log_probs(model, texts)
    penalty = (old - new).exp() - (old - new) - 1
    gain = (rewards - others).view(-1, 1) * new - 0.05 * penalty
    loss = -(gain * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    print(f"{step}: loss {loss.item():.4f}, reward {rewards.mean().item():.3f}, {int(mask.sum())} tokens")
