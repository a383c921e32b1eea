"""What training scripts train, for ``actbench measure``: the same model, batch, loss and optimizer."""

from __future__ import annotations

import ast
from typing import Any

import torch
from cases import SCRIPTS
from torch import nn

BATCH = 4
LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 4, 8, 512, 50304, 512
NANOGPT = f"--layers {LAYERS} --heads {HEADS} --width {WIDTH} --vocab {VOCAB} --context {CONTEXT} --batch-size {BATCH}"
"""Arguments of nanogpt.py that train the model of :func:`nanogpt`."""

COMPARED = (
    *("nanogpt", "llama_peft", "trainer", "vit", "classification", "classification_amp", "retinanet", "gpt_train"),
    *("unet_lora", "gan", "batch_finder", "whisper", "graphs", "dpo", "vision_language", "lightning_resnet"),
    *("ppo", "reinforce", "speech", "pinn"),
)
"""Scripts that are small enough to run for real on a CPU, in one process."""

MORE = {
    "dpo": "--vocab 4096 --length 64",
    "whisper": "--vocab 8192 --batch-size 8 --samples 32",
    "classification_amp": "--samples 256",
    "lightning_resnet": "--precision 32",
}
"""Arguments behind the small ones of a script. With bfloat16, oneDNN's buffers for small products, which nobody knows,
would be the peak. With float16, oneDNN copies the weights of some convolutions, which nobody knows either.
"""


def definitions(script: str) -> dict[str, Any]:
    """Return the classes and functions of a script, which does not run."""
    tree = ast.parse((SCRIPTS / script).read_text())
    kinds = (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    found: dict[str, Any] = {"__name__": script}
    exec(compile(tree, str(SCRIPTS / script), "exec"), found)
    return found


def nanogpt() -> Any:
    """Return what nanogpt.py trains; it also scales the loss, and clips gradients."""
    model = definitions("nanogpt.py")["GPT"](VOCAB, WIDTH, LAYERS, HEADS, CONTEXT)

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        return {"batch": torch.randint(0, VOCAB, (n, CONTEXT + 1))}

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return module(batch["batch"][:, :-1], batch["batch"][:, 1:])

    return model, make_batch, loss, torch.optim.AdamW(model.parameters(), lr=3e-4)


def plain() -> Any:
    """Return what the script below trains."""
    model = definitions("nanogpt.py")["GPT"](VOCAB, WIDTH, LAYERS, HEADS, CONTEXT)

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.randint(0, VOCAB, (n, CONTEXT)), "targets": torch.randint(0, VOCAB, (n, CONTEXT))}

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return module(batch["tokens"], batch["targets"])

    return model, make_batch, loss, torch.optim.AdamW(model.parameters())


PLAIN = f"""
import sys
sys.path.insert(0, {str(SCRIPTS.parent)!r})
import torch
from pairs import definitions
model = definitions("nanogpt.py")["GPT"]({VOCAB}, {WIDTH}, {LAYERS}, {HEADS}, {CONTEXT}).cuda()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, {VOCAB}, ({BATCH}, {CONTEXT}), device="cuda")
targets = torch.randint(0, {VOCAB}, ({BATCH}, {CONTEXT}), device="cuda")
for _ in range(20):
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""A script that does nothing else than what ``actbench measure`` measures."""
