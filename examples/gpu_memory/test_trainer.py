"""A Trainer of transformers: the test makes it as the training script does, and calls train()."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def make_trainer(folder):
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 8192, (64, 256))]
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=8, bf16=True, report_to="none", save_strategy="no"
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8192, n_positions=256, n_embd=256, n_layer=4, n_head=4))
    return Trainer(model, arguments, train_dataset=rows)


@pytest.mark.gpu_memory(device="rtx-4060", limit="2 GiB")
def test_trainer_fits(tmp_path):
    make_trainer(tmp_path).train()
