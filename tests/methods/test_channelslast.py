"""Weights and images with their channels last: the same numbers, in another order in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actbench
from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, NothingToConvertError, SpecError
from actbench.measuring.bench import gradients_of, measure, relative_error_and_cosine
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep

CASE = Case(model="resnet-cifar", batch_size=8, gradient_quality=False)
LAST = torch.channels_last


def setup(case: Case = CASE, dtype: torch.dtype = torch.float64) -> TrainingSetup:
    found = workloads.load_workload(case).setup(materialize=True, seed=0)
    found.module.to(dtype)
    return found


def batch(case: Case = CASE, dtype: torch.dtype = torch.float64) -> Batch:
    found = workloads.load_workload(case).batch(case.batch_size, seed=0)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


def named(found: TrainingSetup, spec: str = "") -> dict[str, Tensor]:
    """Return the gradients by the names of their parameters, since the models differ."""
    gradients = gradients_of(found, batch(), seed=0)
    return {name: gradients[parameter] for name, parameter in found.module.named_parameters()}


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "+checkpoint,blocks=ResidualBlock",
        "+offload",
        "+release",
        pytest.param("+compile:0.5", marks=pytest.mark.exhaustive),
    ],
)
def test_loss_and_gradients_are_those_of_the_default_format_to_rounding(spec: str) -> None:
    exact, changed = setup(), schemes.build(f"channels_last{spec}").apply(setup())

    torch.testing.assert_close(changed.forward(batch()), exact.forward(batch()))
    before, after = named(exact), named(changed)
    assert before.keys() == after.keys()
    for name, gradient in before.items():
        torch.testing.assert_close(after[name], gradient)


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("spec", ["actnn:L3,per_layer=false", "gact:L1", "smaq,on=activations", "division:4"])
def test_schemes_that_pack_err_as_much_as_in_the_default_format(spec: str) -> None:
    case = CASE
    errors = []
    for stack in (spec, f"channels_last+{spec}"):
        exact, changed = setup(case, torch.float32), schemes.build(stack).apply(setup(case, torch.float32))
        images = batch(case, torch.float32)
        right = dict(enumerate(gradients_of(exact, images, seed=0).values()))
        drawn = [dict(enumerate(gradients_of(changed, images, seed=seed).values())) for seed in range(4)]
        # over single draws: the error of one mean of all draws is one draw of a length that varies by half
        squares = [relative_error_and_cosine(each, right)[0] ** 2 for each in drawn]
        errors.append(math.sqrt(sum(squares) / len(squares)))

    assert errors[1] == pytest.approx(errors[0], rel=0.3)


def test_parameters_stay_the_same_objects_with_the_same_values() -> None:
    before = setup()
    parameters, state = list(before.module.parameters()), {k: v.clone() for k, v in before.module.state_dict().items()}

    changed = schemes.build("channels_last").apply(before)

    assert all(one is other for one, other in zip(changed.module.parameters(), parameters, strict=True))
    assert changed.module.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in changed.module.state_dict().items())
    kernels = [parameter for parameter in parameters if parameter.dim() == 4]
    assert kernels
    assert all(kernel.is_contiguous(memory_format=LAST) for kernel in kernels)


@pytest.mark.parametrize(
    "parametrized", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_what_a_weight_is_computed_from_is_converted(parametrized: Callable[[nn.Module], nn.Module]) -> None:
    def gradients(spec: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(parametrized(nn.Conv2d(3, 4, 3)), nn.ReLU(), parametrized(nn.Conv2d(4, 4, 3))).double()
        found = TrainingSetup(
            model,
            loss=lambda module, batch: module(batch["images"]).square().sum(),
            make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )
        changed = schemes.build(spec).apply(found)
        kernels = [parameter for parameter in model.parameters() if parameter.dim() == 4 and parameter[0].numel() > 1]
        seen.append([kernel.is_contiguous(memory_format=LAST) for kernel in kernels])
        named = gradients_of(changed, {"images": torch.ones(2, 3, 8, 8, dtype=torch.float64)}, seed=0)
        return {name: named[parameter] for name, parameter in changed.module.named_parameters()}

    seen: list[list[bool]] = []
    exact, changed = gradients("exact"), gradients("channels_last")

    assert seen == [[False, False], [True, True]]
    torch.testing.assert_close(changed, exact)


def test_gradients_and_state_of_the_optimizer_and_what_layers_save_have_the_format() -> None:
    changed = schemes.build("channels_last").apply(setup())
    step = TrainStep(changed, batch())
    seen: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        seen.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = step.forward()
    step.backward(loss)
    images = [saved for saved in seen if saved.dim() == 4 and saved.shape[1] > 1 and saved.shape[2] > 1]
    gradients = [parameter.grad for parameter in changed.module.parameters() if parameter.dim() == 4]
    step.optimizer.step()
    moments = [state["exp_avg"] for parameter, state in step.optimizer.state.items() if parameter.dim() == 4]

    assert images
    assert all(each.is_contiguous(memory_format=LAST) for each in [*images, *gradients, *moments] if each is not None)


@pytest.mark.parametrize("parts", [1, 4])
def test_images_are_converted_before_the_step_and_stay_so_in_micro_batches(parts: int) -> None:
    spec = "channels_last" if parts == 1 else f"channels_last+accumulate:{parts}"
    step = TrainStep(schemes.build(spec).apply(setup()), batch())

    assert len(step.micro_batches) == parts
    assert all(part.batch["images"].is_contiguous(memory_format=LAST) for part in step.micro_batches)


def test_the_type_of_inputs_changes_beside_the_format() -> None:
    changed = schemes.build("channels_last+pure:bfloat16").apply(setup(dtype=torch.float32))

    found = changed.cast(batch(dtype=torch.float32))["images"]

    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=LAST)


@pytest.mark.slow
def test_the_simulation_saves_the_same_bytes_and_finds_half_types_faster_with_it_and_others_not() -> None:
    case = Case(model="resnet18", batch_size=64, image_size=224, meter="simulated", device_profile="rtx-3090")

    def seconds(**fields: Any) -> tuple[int, float]:
        found = measure(case.model_copy(update=fields))
        assert found.estimated is not None
        return found.activation_bytes, found.estimated.step_seconds

    half, half_last = seconds(autocast="float16"), seconds(autocast="float16", scheme="channels_last")
    single, single_last = seconds(), seconds(scheme="channels_last")

    assert half_last[0] == half[0]
    assert half_last[1] < 0.85 * half[1]
    assert single_last[1] == pytest.approx(single[1], rel=0.01)


def test_a_model_without_convolutions_of_images_is_refused() -> None:
    with pytest.raises(NothingToConvertError, match="has no two-dimensional convolution"):
        schemes.build("channels_last").apply(
            setup(CASE.model_copy(update={"model": "tiny-gpt2", "sequence_length": 8}))
        )


def test_a_converted_model_cannot_carry_it() -> None:
    with pytest.raises(ConversionError, match="the memory format of inputs"):
        actbench.convert(nn.Sequential(nn.Conv2d(3, 4, 3)), "channels_last")


def test_fsdp_shares_out_no_parameters_of_it() -> None:
    case = CASE.model_copy(update={"scheme": "channels_last+fsdp:8", "meter": "simulated"})
    with pytest.raises(
        ConversionError, match="channels_last: FSDP shards parameters only in the default memory format"
    ):
        measure(case)  # which leaves the made-up process group that it joins


def test_it_is_not_limited_to_parts() -> None:
    with pytest.raises(SpecError, match="changes memory format"):
        schemes.build("channels_last,only=layer1")
