from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.measuring import bench
from actbench.model.records import Case
from actbench.tools.diffusion.unets import PROMPT, _kept_signal

pytest.importorskip("diffusers")

NARROW = "cross_attention_dim=64,layers_per_block=1"
SD = f"sd-1.5-unet@block_out_channels=32/64/64/64,{NARROW}"
SDXL = f"sdxl-unet@block_out_channels=32/64/64,transformer_layers_per_block=1/1/2,attention_head_dim=1/2/2,{NARROW}"
both = pytest.mark.parametrize("model", [SD, SDXL], ids=["sd-1.5", "sdxl"])


def case(model: str, **options: Any) -> Case:
    return Case.model_validate({"model": model, "batch_size": 2, "image_size": 64, **options})


@pytest.mark.parametrize(("model", "parameters"), [("sd-1.5-unet", 859_520_964), ("sdxl-unet", 2_567_463_684)])
def test_they_have_as_many_parameters_as_published(model: str, parameters: int) -> None:
    module = workloads.load_workload(case(model)).setup(materialize=False, seed=0).module

    assert all(parameter.is_meta for parameter in module.parameters())
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


def test_latents_are_an_eighth_of_an_image_and_prompts_have_77_tokens() -> None:
    batch = workloads.load_workload(case("sdxl-unet", image_size="512x1024")).batch(3, seed=0)

    assert batch["noisy_latents"].shape == batch["noise"].shape == (3, 4, 64, 128)
    assert batch["encoder_hidden_states"].shape == (3, PROMPT, 2048)
    assert batch["text_embeds"].shape == (3, 1280)
    assert batch["time_ids"].tolist() == [[512, 1024, 0, 0, 512, 1024]] * 3
    assert batch["timesteps"].dtype == torch.int64
    assert workloads.load_workload(case("sd-1.5-unet", image_size=None)).batch(1, seed=0)["noise"].shape[2:] == (64, 64)


def test_the_noise_schedule_is_that_of_stable_diffusion() -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)

    torch.testing.assert_close(_kept_signal(), scheduler.alphas_cumprod)


def test_a_mask_of_inpainting_gets_no_noise() -> None:
    batch = workloads.load_workload(case(f"{SD},in_channels=9")).batch(2, seed=0)

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


@pytest.mark.exhaustive
def test_eager_attention_keeps_its_scores() -> None:
    def activations(attention: str) -> int:
        return bench.measure(case(SD, image_size=128, meter="simulated", attention=attention)).activation_bytes

    scores = 4 * 2 * 8 * 256**2  # of one layer with latents of 16 px: bytes, samples, heads, pairs of pixels
    assert activations("eager") > activations("sdpa") + 2 * scores


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("sd-1.5-unet@block_out_chanels=32/64", {}, "did you mean block_out_channels"),
        ("sd-1.5-unet@block_out_channels=32/64", {}, "cannot be built: Must provide the same number"),
        ("sd-1.5-unet@layers_per_block=x", {}, "cannot be built"),
        (
            f"{SD},out_channels=8",
            {},
            "out_channels=8: noise is added to latents, which have 4 channels: give 4 or less",
        ),
        (f"{SD},out_channels=0", {}, "out_channels=0: batches need a whole number"),
        (
            "sd-1.5-unet@cross_attention_dim=32/32/32/32",
            {},
            "cross_attention_dim=.*: batches need a whole number",
        ),
        (f"{SD},class_embed_type=timestep", {}, "class_embed_type=timestep: .* labels of classes, .*: leave"),
        (f"{SD},num_class_embeds=10", {}, "num_class_embeds=10: this needs labels of classes"),
        (f"{SD},class_embeddings_concat=true", {}, "class_embeddings_concat=True: this needs labels of classes"),
        (f"{SD},encoder_hid_dim=16", {}, "encoder_hid_dim=16: this needs prompts of another width"),
        (f"{SD},dual_cross_attention=true", {}, "dual_cross_attention=True: this needs two prompts"),
        (f"{SD},addition_embed_type=image", {}, "addition_embed_type=image: batches have no images"),
        (
            "sd-1.5-unet@addition_embed_type=text,cross_attention_dim=96",
            {},
            "cross_attention_dim=96: .* multiple of its 64 heads",
        ),
        (f"{SDXL},addition_time_embed_dim=128", {}, "is 2048: give projection_class_embeddings_input_dim=2048"),
        ("sd-1.5-unet", {"image_size": 100}, "needs multiples of 8 px"),
        ("sd-1.5-unet", {"task": "causal-lm"}, "does text-to-image"),
        ("sd-1.5-unet", {"weights": "pretrained"}, "no pretrained weights"),
        ("sd-1.5-unet", {"target_length": 8}, "writes no text"),
    ],
)
def test_what_is_impossible_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        workloads.load_workload(case(model, **options)).setup(materialize=False, seed=0)


@pytest.mark.parametrize(
    "model",
    [
        f"{SD},addition_embed_type=text",
        f"{SDXL},addition_time_embed_dim=128,projection_class_embeddings_input_dim=2048",
    ],
)
def test_what_is_added_to_the_embedding_of_the_timestep_may_change(model: str) -> None:
    workload = workloads.load_workload(case(model))
    setup = workload.setup(materialize=True, seed=0)

    assert setup.loss(setup.module, workload.batch(1, seed=0)).isfinite()


def test_without_diffusers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)

    with pytest.raises(ModelError, match=r"pip install 'actbench\[diffusers\]'"):
        workloads.load_workload(case("sdxl-unet"))
