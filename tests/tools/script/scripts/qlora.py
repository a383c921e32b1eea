"""Fine-tune a language model that is quantized to four bits with LoRA: `python qlora.py FOLDER`."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("model", help="a name of the hub or a folder")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--max-length", type=int, default=512)
parser.add_argument("--max-steps", type=int, default=10)
parser.add_argument("--optim", default="paged_adamw_8bit")
args = parser.parse_args()

quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
device_map = {"": 0} if torch.cuda.is_available() else {"": "cpu"}
tokenizer = AutoTokenizer.from_pretrained(args.model)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=quantization, device_map=device_map)
print(f"{model.get_memory_footprint() / 2**20:.1f} MiB of weights")
model.config.use_cache = False
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
lora = LoraConfig(
    r=16,
    lora_alpha=32,
    lora_dropout=0.05,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, lora)
model.print_trainable_parameters()

words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "two", "dogs", "near", "our", "river"]
texts = [" ".join(words[(i * k) % len(words)] for k in range(args.max_length)) for i in range(1, 65)]
dataset = Dataset.from_dict({"text": texts})
dataset = dataset.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length=args.max_length),
    batched=True,
    remove_columns=["text"],
)
trainer = Trainer(
    model=model,
    train_dataset=dataset,
    args=TrainingArguments(
        output_dir="qlora-out",
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=args.max_steps,
        learning_rate=2e-4,
        bf16=torch.cuda.is_available(),
        max_grad_norm=0.3,
        optim=args.optim,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
model.save_pretrained("qlora-out/adapter")
