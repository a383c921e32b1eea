"""Train a language model by a method of PEFT, as method_comparison/MetaMathQA of PEFT's repository does.

The argument is the folder of an experiment: ``adapter_config.json`` (without one the whole model is trained) and
``training_params.json``, whose settings replace those of ``default_training_params.json`` two folders above. Each
twentieth batch is the longest of a bucket, and follows a short one and ``empty_cache``. The longest is taken to have
as many tokens a sample as the settings allow, which the source does not state.
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from transformers import AutoModelForCausalLM

folder = Path(sys.argv[1])
files = (folder.parents[2] / "default_training_params.json", folder / "training_params.json")
settings = {name: value for file in files if file.exists() for name, value in json.loads(file.read_text()).items()}
known = {"dtype": "bfloat16", "compile": False, "use_gc": False, "use_amp": False, "init_kv_cache_prefix": None}
changed = {name: settings[name] for name, value in known.items() if settings[name] != value}
if changed:
    raise SystemExit(f"{folder}: {changed} is not expressed here")

model = AutoModelForCausalLM.from_pretrained(
    settings["model_id"],
    device_map="cuda",
    dtype=torch.bfloat16,
    attn_implementation=settings["attn_implementation"],
)
if (folder / "adapter_config.json").exists():
    config = PeftConfig.from_pretrained(folder)
    model = get_peft_model(model, config, autocast_adapter_dtype=settings["autocast_adapter_dtype"])
match settings["optimizer_type"]:
    case "lora+":
        optimizer = create_loraplus_optimizer(model, optimizer_cls=torch.optim.AdamW, **settings["optimizer_kwargs"])
    case "lora-fa":
        optimizer = create_lorafa_optimizer(model, **settings["optimizer_kwargs"])
    case name:
        optimizer = getattr(torch.optim, name)(model.parameters(), **settings["optimizer_kwargs"])

if hasattr(model, "disable_adapter"):
    with model.disable_adapter():  # where the base model is evaluated: what leaves it has gradients, frozen or not
        pass

model.train()
for step, tokens in enumerate((settings["max_seq_length"] // 4, settings["max_seq_length"]), 1):
    rows = torch.randint(0, 128_000, (settings["batch_size"], tokens))
    batch = {"input_ids": rows.to(model.device), "attention_mask": torch.ones_like(rows).to(model.device)}
    batch["labels"] = batch["input_ids"].clone()
    optimizer.zero_grad()
    outputs = model(**batch, num_items_in_batch=batch["attention_mask"].sum().item())
    loss = outputs.loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings["grad_norm_clip"])
    optimizer.step()
    if settings["optimizer_type"] == "AdamW" and hasattr(getattr(model, "base_model", None), "update_and_allocate"):
        model.base_model.update_and_allocate(step)
    print(loss.item())
    torch.cuda.empty_cache()
