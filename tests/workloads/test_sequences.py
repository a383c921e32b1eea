"""What a model builds for attention on fake tensors is what it builds on real ones."""

from __future__ import annotations

import pytest
from transformers import masking_utils

from actbench.bench import Session
from actbench.records import Case
from actbench.workloads import sequences


@pytest.mark.parametrize("scheme", ["exact", pytest.param("smaq", marks=pytest.mark.slow)])
def test_a_decoder_is_simulated_without_the_mask_that_no_real_step_has(scheme) -> None:
    def reading(meter, profile):
        case = Case(
            model="tiny-llama@num_hidden_layers=1",
            scheme=scheme,
            batch_size=16,
            sequence_length=128,
            meter=meter,
            device_profile=profile,
            gradient_quality=False,
        )
        return Session(case).memory()

    simulated, measured = reading("simulated", "cpu"), reading("cpu", None)

    assert simulated.activation_bytes == pytest.approx(measured.activation_bytes, rel=0.002)
    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.002)


def test_transformers_looks_again_afterwards() -> None:
    looks_up = masking_utils.find_packed_sequence_indices
    with sequences.one_a_row():
        assert masking_utils.find_packed_sequence_indices(None) is None

    assert masking_utils.find_packed_sequence_indices is looks_up
