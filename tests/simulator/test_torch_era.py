"""Steps as older torch ran them, and steps without what CUDA's libraries allocate for themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from actbench.errors import UsageError
from actbench.measuring.bench import measure
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.simulator.cublas import Workspaces
from actbench.simulator.operators import old_softmax

FLOAT, HALF = 4, 2
CARD = "v100-16gb"
ROWS, LENGTH, LAYERS, HEADS = 8, 64, 1, 4
SCORES = ROWS * HEADS * LENGTH * LENGTH


def simulated(**settings: Any) -> Measurement:
    model = f"tiny-roberta@num_hidden_layers={LAYERS},num_attention_heads={HEADS},attention_probs_dropout_prob=0.0"
    case = Case(
        model=model,
        batch_size=ROWS,
        sequence_length=LENGTH,
        **{"attention": "eager", "optimizer": "adamw-fused", "device_profile": CARD, **settings},
    )
    return measure(case)


@pytest.mark.parametrize(("name", "known"), [("softmax", torch.softmax), ("log_softmax", torch.log_softmax)])
def test_old_softmax_computes_what_torchs_does_and_saves_its_input_too(name: str, known: Any) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    saved: list[Tensor] = []

    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        y = old_softmax(name, x, -1, False)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)

    assert y.equal(known(x, -1))
    (expected,) = torch.autograd.grad(known(x, -1).square().sum(), x)
    assert gradient.equal(expected)
    assert [each.data_ptr() for each in saved] == [x.data_ptr(), y.data_ptr()]


@pytest.mark.slow
def test_softmax_saved_its_input_before_torch_1_11() -> None:
    now, before = (simulated(torch_era=era).activation_bytes for era in ("1.13", "1.10"))

    logits = 512  # of a few classes, a block of the allocator
    assert before - now == LAYERS * SCORES * FLOAT + logits


def test_under_autocast_the_input_was_saved_in_half_precision() -> None:
    now, before = (simulated(torch_era=era, autocast="float16").activation_bytes for era in ("1.13", "1.10"))

    assert before - now == LAYERS * SCORES * HALF + 512


def test_gradients_stayed_from_step_to_step_before_torch_2() -> None:
    now, before = (simulated(torch_era=era, workspaces=False) for era in (None, "1.13"))

    assert now.phase_peaks is not None
    assert before.phase_peaks is not None
    gradients = before.phase_peaks.forward_bytes - now.phase_peaks.forward_bytes
    assert now.gradients_bytes <= gradients <= 1.05 * now.gradients_bytes  # each rounded up to blocks
    assert before.gradients_bytes == now.gradients_bytes
    assert before.activation_bytes == now.activation_bytes


@pytest.mark.slow
def test_optimizers_ran_a_loop_before_torch_2() -> None:
    now, before = (simulated(torch_era=era, workspaces=False, optimizer="adamw") for era in (None, "1.13"))

    assert now.phase_peaks is not None
    assert before.phase_peaks is not None
    assert before.phase_peaks.optimizer_bytes < now.phase_peaks.optimizer_bytes - now.gradients_bytes // 4


@pytest.mark.slow
def test_micro_batches_add_to_the_gradients_that_are_there() -> None:
    alone, cut = (simulated(torch_era="1.10", scheme=scheme) for scheme in ("exact", "accumulate:2"))

    assert cut.gradients_bytes == alone.gradients_bytes
    assert cut.peak_bytes < alone.peak_bytes


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("device", ["h100-80gb", CARD])
def test_workspaces_can_be_left_out(device: str) -> None:
    settings = {"device_profile": device, "torch_era": "2.14"}
    whole, without = (simulated(**settings, workspaces=counted) for counted in (True, False))

    profile = profiles.of_case(Case(model="x", batch_size=1, **settings))
    assert whole.peak_bytes - without.peak_bytes == sum(Workspaces(profile).kept.values()) > 0


@pytest.mark.slow
def test_copies_of_convolutions_are_workspaces() -> None:
    settings = {"model": "resnet18", "batch_size": 2, "image_size": 64, "device_profile": "a100-80gb"}
    cases = [Case(**settings, torch_era="2.14", workspaces=counted) for counted in (True, False)]
    whole, without = map(measure, cases)

    assert whole.phase_peaks is not None
    assert without.phase_peaks is not None
    more = whole.phase_peaks.backward_bytes - without.phase_peaks.backward_bytes
    assert whole.activation_bytes == without.activation_bytes
    assert more > sum(Workspaces(profiles.of_case(cases[0])).kept.values()) > 0


def test_older_torch_is_known_of_cuda_alone() -> None:
    with pytest.raises(UsageError, match=r"--torch-era 1\.10: what older torch does is known of CUDA cards"):
        profiles.of_case(Case(model="x", batch_size=1, device_profile="cpu", torch_era="1.10"))


def test_cases_of_today_have_the_keys_that_they_had() -> None:
    case = Case(model="x", batch_size=1)

    changed = [case.model_copy(update=update) for update in ({"torch_era": "1.10"}, {"workspaces": False})]
    assert len({each.key() for each in (case, *changed)}) == 3
    assert case.key() == "9539efb724e600b6"


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("era", [None, "1.13"])
def test_without_views_gradients_lie_beside_the_buckets(era: Any) -> None:
    views, copies = (
        simulated(scheme=scheme, torch_era=era, workspaces=False) for scheme in ("ddp:2", "ddp:2,bucket_view=false")
    )

    more = copies.peak_bytes - views.peak_bytes
    if era is None:  # at the peak, most gradients have not been made
        assert 0 <= more < views.gradients_bytes
        assert copies.phase_peaks.optimizer_bytes - views.phase_peaks.optimizer_bytes >= views.gradients_bytes
    else:
        assert views.gradients_bytes <= more <= 1.05 * views.gradients_bytes
