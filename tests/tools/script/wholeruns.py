"""Scripts that train, and then run out of memory, in the manner of public threads: fifteen ways, of ten kinds.

Each way is written for three models whose operators differ in what they keep, and that of generation in three ways.
"""

from __future__ import annotations

from collections.abc import Iterator

BEGIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, count, longest):
        self.count, self.longest = count, longest

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((self.longest if i == self.count - 2 else 64,), 3)


def padded(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def loader(count, rows=8, longest=64):
    return DataLoader(Rows(count, longest), rows, collate_fn=padded)


class Mixed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(500, 64), inner, nn.Linear(64, 500)

    def forward(self, x):
        mixed = self.inner(self.table(x))
        return self.head(mixed[0] if isinstance(mixed, tuple) else mixed)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.over = nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x):
        return x + self.over(x.mT).mT.relu()


torch.backends.mha.set_fastpath_enabled(False)  # one operator, whose buffers are not simulated
torch.manual_seed(0)
model = Mixed({inner}).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)


def step(x):
    loss = model(x.cuda()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""

MODELS = {
    "perceptron": "nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))",
    "transformer": "nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)",
    "convolution": "nn.Sequential(Shifted(), Shifted())",
}

BEGINS_ANEW = """
for x in loader(640, 64): step(x)
optimizer.state.clear()
for x in loader(80): step(x)
"""

FAILS = """
for x in loader(80): step(x)
model.eval()
with torch.no_grad():
    for x in loader(160): model(x.cuda())
{}["accuracy"]
"""

ENDINGS = {
    "keeps outputs": """
kept = []
for x in loader(240):
    step(x); kept.append(model(x.cuda()).detach())
""",
    "sums losses with graphs": """
total = 0
for x in loader(240):
    loss = model(x.cuda()).pow(2).mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
    total = total + model(x.cuda()).mean()
""",
    "keeps outputs for an epoch": """
for epoch in range(2):
    kept = []
    for x in loader(160):
        step(x); kept.append(model(x.cuda()).detach())
    del kept
""",
    "evaluates larger batches": """
for x in loader(80): step(x)
model.eval()
with torch.no_grad():
    for x in loader(640, 128): model(x.cuda())
""",
    "meets its longest batch late": """
for x in loader(160, longest=256): step(x)
""",
    "accumulates, and meets its longest batch late": """
for i, x in enumerate(loader(320, longest=256)):
    model(x.cuda()).pow(2).mean().backward()
    if i % 4 == 3: optimizer.step(); optimizer.zero_grad()
""",
    "evaluates a longest batch": """
for epoch in range(2):
    model.train()
    for x in loader(80): step(x)
    model.eval()
    with torch.no_grad():
        for x in loader(160, longest=512): model(x.cuda())
""",
    "unfreezes layers": """
for part in (model.table, model.inner):
    part.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
for i, x in enumerate(loader(160)):
    if i == 3:
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(x)
""",
    "evaluates with graphs": """
for epoch in range(2):
    model.train()
    for x in loader(80): step(x)
    model.eval()
    losses = [model(x.cuda()).mean() for x in loader(160)]
    torch.stack(losses).mean().item()
    del losses
""",
    "evaluates in training mode": """
for epoch in range(2):
    for x in loader(80): step(x)
    with torch.no_grad():
        out = [model(x.cuda()) for x in loader(160)]
        del out
""",
    "saves copies": """
best = None
for epoch in range(2):
    for x in loader(80): step(x)
    best = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save({"model": best, "optimizer": optimizer.state_dict()}, "FILE")
""",
    "loads a second copy": """
for x in loader(80): step(x)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "FILE")
state = torch.load("FILE", map_location="cuda", weights_only=True)
model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"])
for x in loader(80): step(x)
""",
    "resumes twice as large": """
from safetensors.torch import load_file, save_model
for x in loader(80): step(x)
save_model(model, "FILE")
torch.save(optimizer.state_dict(), "FILE.optimizer")
del optimizer
model = Mixed({inner}).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
state = torch.load("FILE.optimizer", map_location="cuda", weights_only=True)
copies = {i: {name: value.clone() for name, value in each.items()} for i, each in state["state"].items()}
optimizer.load_state_dict({**state, "state": copies})
weights = load_file("FILE", device="cuda")
model.load_state_dict(weights)
del weights, state, copies
for x in loader(80): step(x)
""",
    "joins scores": """
for epoch in range(2):
    model.train()
    for x in loader(80): step(x)
    model.eval()
    scores = torch.empty(0, device="cuda")
    with torch.no_grad():
        for x in loader(160): scores = torch.cat([scores, model(x.cuda()).flatten()])
    (scores > 0.5).float().mean().item()
    del scores
""",
}

KINDS = {
    "keeps outputs": "leak by list",
    "keeps outputs for an epoch": "leak by list",
    "sums losses with graphs": "leak by summed loss",
    "evaluates with graphs": "leak by graph",
    "evaluates in training mode": "evaluation logits kept",
    "joins scores": "evaluation logits kept",
    "evaluates larger batches": "larger evaluation batch",
    "evaluates a longest batch": "longest batch late",
    "meets its longest batch late": "longest batch late",
    "accumulates, and meets its longest batch late": "longest batch late",
    "unfreezes layers": "unfreezing",
    "saves copies": "save that copies",
    "loads a second copy": "resume that loads twice",
    "resumes twice as large": "resume that loads twice",
}
"""What each ending is an example of."""

GENERATES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for epoch in range(2):
    model.train()
    for _ in range(10):
        ids = torch.full((4, 32), 3, device="cuda")
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.eval()
    ids = torch.full((64, 32), 3, device="cuda")
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, eos_token_id=None, pad_token_id=0, {generation}
    )
    del written
"""

GENERATIONS = {
    "greedy": "do_sample=False",
    "beams": "do_sample=False, num_beams=4",
    "with scores": "do_sample=False, output_scores=True, return_dict_in_generate=True",
}

TRAINER = """
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments


class Rows(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        ids = torch.full((32,), 5)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


config = BertConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
arguments = TrainingArguments(
    "OUT", per_device_train_batch_size=8, per_device_eval_batch_size=32, num_train_epochs=1, eval_strategy="steps",
    eval_steps=15, save_steps=15, report_to=[], disable_tqdm=True, use_cpu=False, optim="adamw_torch",
)
Trainer(
    BertForMaskedLM(config), arguments, train_dataset=Rows(128), eval_dataset=Rows(320),
    compute_metrics=lambda found: {"rows": len(found.predictions)},
).train()
"""
"""A Trainer that evaluates larger batches than it trains on; OUT is the folder to write to."""


def scripts() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the kind and the text of each script; FILE in a text is a path to write to."""
    for ending, text in ENDINGS.items():
        for model, inner in MODELS.items():
            yield f"{ending}: {model}", KINDS[ending], (BEGIN + text).replace("{inner}", inner)
    for name, arguments in GENERATIONS.items():
        yield f"generates: {name}", "generation", GENERATES.replace("{generation}", arguments)


OF_LIBRARIES = {
    "SFT": """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

data = Dataset.from_dict({"text": ["the cat sat on a mat and looked at two dogs"] * 64})
arguments = SFTConfig("OUT", max_length=16, per_device_eval_batch_size=16, eval_strategy="steps", **COMMON)
SFTTrainer("LLAMA", args=arguments, train_dataset=data, eval_dataset=data).train()
""",
    "DPO": """
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

pairs = {"prompt": ["the cat sat on"], "chosen": [" a mat and looked"], "rejected": [" two dogs"]}
data = Dataset.from_dict({name: texts * 64 for name, texts in pairs.items()})
arguments = DPOConfig("OUT", max_length=16, per_device_eval_batch_size=16, eval_strategy="steps", **COMMON)
DPOTrainer("LLAMA", args=arguments, train_dataset=data, eval_dataset=data).train()
""",
    "metrics": """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

rows = [{"input_ids": torch.full((16,), 5), "labels": torch.full((16,), 5)}] * 64
arguments = TrainingArguments("OUT", per_device_eval_batch_size=16, eval_strategy="steps", **COMMON)
model = AutoModelForCausalLM.from_pretrained("LLAMA", dtype="float32")
metrics = lambda found: {"rows": len(found.predictions)}
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics).train()
""",
    "generation in evaluations": """
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

rows = [{"input_ids": torch.full((16,), 5), "labels": torch.full((8,), 5)}] * 64
arguments = Seq2SeqTrainingArguments(
    "OUT", per_device_eval_batch_size=32, eval_strategy="steps", predict_with_generate=True, generation_max_length=24,
    **COMMON,
)
config = T5Config(
    vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
)
model = T5ForConditionalGeneration(config)
model.generation_config.eos_token_id = None  # untrained, it would end at any length
metrics = lambda found: {"rows": len(found.predictions)}
Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics).train()
""",
}
"""Scripts of trainers that evaluate in ways of their own; OUT is the folder to write to, LLAMA that of a model."""

COMMON = """
COMMON = dict(
    per_device_train_batch_size=4, eval_steps=8, save_steps=8, num_train_epochs=1, report_to=[], disable_tqdm=True,
    use_cpu=False, optim="adamw_torch", bf16=False, save_total_limit=1, dataloader_pin_memory=False,
)
"""
