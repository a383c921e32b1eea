"""The largest batch of a simulated case takes a handful of steps, whatever the scheme, and is proved."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.measuring import bench
from actbench.model.records import Case
from actbench.units import MIB


def case(scheme: str, **settings: object) -> Case:
    given = {
        "model": "tiny-llama",
        "sequence_length": 64,
        "batch_size": 2,
        "meter": "simulated",
        "device_profile": "cuda-16gib",
        "memory_limit_bytes": 300 * MIB,
        **settings,
    }
    return Case(scheme=scheme, **given)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "scheme",
    ["exact", "checkpoint", "randomized:0.2", "offload"],
)
def test_it_takes_at_most_five_steps_and_the_next_batch_does_not_fit(scheme: str) -> None:
    told: list[tuple[int, bool]] = []
    session = bench.Session(case(scheme, find_largest_batch=True))
    session.tried = lambda batch_size, fits: told.append((batch_size, fits))
    found = session.memory().largest_batch_search

    assert found.trials == len(told) <= 5
    assert bench.measure(case(scheme, batch_size=found.batch_size)).fits
    assert not bench.measure(case(scheme, batch_size=found.batch_size + 1)).fits
    assert (found.batch_size + 1, False) in told


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("limit", [1, 12])
def test_where_little_or_nothing_fits_it_ends_too(limit: int) -> None:
    found = bench.measure(case("exact", find_largest_batch=True, memory_limit_bytes=limit * MIB)).largest_batch_search

    assert found.next_outcome in ("over-limit", "out-of-memory")
    assert found.batch_size == 0 or limit == 12


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["exact", "fewbit:3", "checkpoint", "randomized:0.2", "actnn:L3"])
def test_a_trial_on_the_cpu_reads_the_peak_that_the_case_has(scheme: str) -> None:
    real = case(scheme, meter="cpu", device_profile=None, batch_size=24, memory_limit_bytes=None)
    trial = bench.Trial(real.model_copy(update={"gradient_quality": False})).memory()

    assert trial.peak_bytes == bench.Session(real).memory().peak_bytes


VAE = """
import torch
from torch import nn
from torch.nn import functional as F

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(12, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.decoder = nn.ConvTranspose2d(4, 12, 2, 2)

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * spread.mul(0.5).exp()
        return F.mse_loss(self.decoder(z), x) + (mean.square() + spread.exp() - spread - 1).mean()

def build():
    return VAE(), lambda n: {"x": torch.rand(n, 12, 32, 32)}, lambda model, batch: model(batch["x"])
"""


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["exact", "channels_last"])
def test_the_largest_batch_of_few_channels_on_a_simulated_cpu_is_the_real_one(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "vae.py").write_text(VAE)
    own = {"model": f"{tmp_path}/vae.py:build", "sequence_length": None, "optimizer": "adamw"}
    asked = case(scheme, **own, device_profile="cpu", memory_limit_bytes=12 * MIB, find_largest_batch=True)
    found = bench.Session(asked).memory().largest_batch_search.batch_size

    def needed(batch_size: int) -> int:
        real = case(scheme, **own, meter="cpu", device_profile=None, batch_size=batch_size, memory_limit_bytes=None)
        return bench.Trial(real).memory().peak_bytes

    assert needed(found - 1) <= 12 * MIB < needed(found + 2)
