"""A stack of schemes that change all of a step, in a loop of one's own."""

from __future__ import annotations

import pytest
import torch
import transformers

import actbench


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("spec", ["lora:16+adam8bit+chunked_loss:8+accumulate:4", "checkpoint+release+chunked_loss:4"])
def test_a_stack_trains_in_a_loop_of_ones_own(spec: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.arange(8 * 16).view(8, 16) % 7
    batches = [{"input_ids": ids, "labels": ids}] * 16

    setup = actbench.apply(actbench.TrainingSetup(model, loss=loss, make_optimizer=adamw), spec)
    step, losses = actbench.TrainStep(setup, batches[0]), []
    for step.batch in batches:
        losses.append(float(step()))

    assert losses[-1] < 0.8 * losses[0]
    moved = {name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])}
    assert bool(moved) == ("lora" not in spec)
    assert type(step.optimizer) is not torch.optim.AdamW


def test_a_model_alone_cannot_carry_an_optimizer_and_the_message_says_what_can() -> None:
    with pytest.raises(
        actbench.ConversionError, match=r"make torchao.optim.AdamW8bit .* whole step with actbench.apply"
    ):
        actbench.convert(torch.nn.Linear(64, 64), "adam8bit")
