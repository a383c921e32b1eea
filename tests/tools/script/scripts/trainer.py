"""Pretrain a Llama of one billion parameters with transformers' Trainer."""

import os

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

HIDDEN_SIZE = int(os.environ.get("HIDDEN_SIZE", 2048))
INTERMEDIATE_SIZE = int(os.environ.get("INTERMEDIATE_SIZE", 8192))
LAYERS = int(os.environ.get("LAYERS", 16))
HEADS = int(os.environ.get("HEADS", 32))
KV_HEADS = int(os.environ.get("KV_HEADS", 8))
VOCAB_SIZE = int(os.environ.get("VOCAB_SIZE", 128256))
LENGTH = int(os.environ.get("LENGTH", 1024))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 4))
MAX_STEPS = int(os.environ.get("MAX_STEPS", 6))


class RandomTokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, VOCAB_SIZE, (LENGTH,))
        return {"input_ids": tokens, "labels": tokens}


set_seed(0)
config = LlamaConfig(
    hidden_size=HIDDEN_SIZE,
    intermediate_size=INTERMEDIATE_SIZE,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    vocab_size=VOCAB_SIZE,
    tie_word_embeddings=True,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
print(f"{model.num_parameters():,} parameters")

arguments = TrainingArguments(
    output_dir="trainer-out",
    per_device_train_batch_size=BATCH_SIZE,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    optim="adamw_torch_fused",
    learning_rate=3e-4,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    max_steps=MAX_STEPS,
    dataloader_num_workers=2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=RandomTokens())
result = trainer.train()
print(result.metrics)
trainer.save_model()
