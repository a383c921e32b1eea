from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actbench import workload as workloads
from actbench.measuring import bench
from actbench.model.records import Case

pytest.importorskip("diffusers")
import unets

SMALL = Path(__file__).with_name("smallunets.py")
both = pytest.mark.parametrize("model", [f"{SMALL}:sd_1_5", f"{SMALL}:sdxl"], ids=["sd-1.5", "sdxl"])


def case(model: str, **options: Any) -> Case:
    return Case.model_validate({"model": model, "batch_size": 2, **options})


@pytest.mark.parametrize(("model", "parameters"), [("sd_1_5", 859_520_964), ("sdxl", 2_567_463_684)])
def test_they_have_as_many_parameters_as_published(model: str, parameters: int) -> None:
    module = workloads.load_workload(case(f"{unets.__file__}:{model}")).setup(materialize=False, seed=0).module

    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


def test_latents_are_an_eighth_of_an_image_and_prompts_have_77_tokens() -> None:
    config = {**unets.SDXL, "block_out_channels": (32, 64, 64), "transformer_layers_per_block": 1}
    _, make_batch, _ = unets.build({**config, "attention_head_dim": (1, 2, 2)}, (512, 1024))
    batch = make_batch(3)

    assert batch["noisy_latents"].shape == batch["noise"].shape == (3, 4, 64, 128)
    assert batch["encoder_hidden_states"].shape == (3, unets.PROMPT, 2048)
    assert batch["text_embeds"].shape == (3, 1280)
    assert batch["time_ids"].tolist() == [[512, 1024, 0, 0, 512, 1024]] * 3
    assert batch["timesteps"].dtype == torch.int64


def test_the_noise_schedule_is_that_of_stable_diffusion() -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)

    torch.testing.assert_close(unets.kept_signal(), scheduler.alphas_cumprod)


def test_a_mask_of_inpainting_gets_no_noise() -> None:
    batch = workloads.load_workload(case(f"{SMALL}:inpainting")).batch(2, seed=0)

    assert batch["noisy_latents"].shape[1] == 9
    assert batch["noise"].shape[1] == 4


@pytest.mark.sampled(fast=1, slow=1)
@both
def test_the_loss_falls_in_training(model: str) -> None:
    workload = workloads.load_workload(case(model))
    setup = workload.setup(materialize=True, seed=0)
    batch = workload.batch(2, seed=0)
    optimizer = torch.optim.Adam(setup.module.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = setup.forward(batch)
        loss.backward()
        losses.append(loss.item())
        assert all(parameter.grad is not None for parameter in setup.module.parameters())
        optimizer.step()
        optimizer.zero_grad()

    assert losses[0] == pytest.approx(1, abs=0.4)  # noise of variance 1, of which nothing is known yet
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.exhaustive
@both
def test_a_simulation_agrees_with_the_allocations(model: str) -> None:
    options = {"scheme": "checkpoint", "device_profile": "cpu", "warmup_steps": 0, "min_steps": 1, "min_seconds": 0}
    simulated, real = (bench.measure(case(model, meter=meter, **options)) for meter in ("simulated", "cpu"))

    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    assert simulated.activation_bytes == pytest.approx(real.activation_bytes, rel=0.02)
