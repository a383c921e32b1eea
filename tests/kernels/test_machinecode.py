"""The machine code of the kernels, run on the CPU: bit for bit the reference, and no more instructions than planned."""

from __future__ import annotations

import instructions
import pytest
import torch
from machinecode import program
from machinecode.launch import Machine

from actbench.methods.fewbit.ops import mask, stepwise
from actbench.ops import rawkernel

pytestmark = pytest.mark.skipif(program.missing() is not None, reason=f"needs {program.missing()}")

ARCHITECTURES = (80, 90, 120)
CASES = [(name, dtype) for name, subject in instructions.SUBJECTS.items() for dtype in subject.dtypes]
WITH_BUDGETS = [case for case in CASES if case[1] in instructions.SUBJECTS[case[0]].budgets]
IN_PIECES = [case for case in CASES if case[0].startswith(("groupquant", "smaq"))]
NEAR = ("activate_gelu", "activate_silu")
"""Their outputs have the last bits of the device's exponential, which is not known here; their codes are exact."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats, all NaN as one, and both zeros, as CUDA's ReLU of -0.0 is not the CPU's."""
    if not tensor.is_floating_point():
        return tensor
    plain = torch.where(tensor.isnan(), torch.nan, tensor) + 0.0
    return plain.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


@pytest.mark.sampled(fast=10, slow=20)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_machine_code_gives_what_the_reference_gives(name: str, dtype: str, architecture: int) -> None:
    assert_equal_to_the_reference(name, dtype, architecture, 2048)


@pytest.mark.sampled(fast=2, slow=4)
@pytest.mark.parametrize(("name", "dtype"), IN_PIECES)
def test_a_second_piece_and_the_end_give_what_the_reference_gives(name: str, dtype: str) -> None:
    assert_equal_to_the_reference(name, dtype, 90, 8 * 1024 + 1024 + 300)  # eight warps, and the first one goes on


def assert_equal_to_the_reference(name: str, dtype: str, architecture: int, count: int) -> None:
    """Run a kernel's machine code, and compare what it wrote with the reference."""
    _, case, found = instructions.run(instructions.SUBJECTS[name], dtype, architecture, count)

    for ours, expected in zip(found, case.reference(), strict=True):
        if name in NEAR and ours.is_floating_point():
            torch.testing.assert_close(ours, expected.view_as(ours))
        else:
            assert torch.equal(bits_of(ours).view(-1), bits_of(expected).view(-1))


@pytest.mark.sampled(fast=20, slow=30)
@pytest.mark.parametrize(("name", "dtype"), WITH_BUDGETS)
def test_an_element_takes_no_more_instructions_than_its_budget(name: str, dtype: str) -> None:
    count = instructions.counted(name, dtype, 90)

    assert count.issued <= instructions.SUBJECTS[name].budgets[dtype]
    assert count.stack == 0


def test_ends_and_misaligned_tensors_are_as_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawkernel, "launch", Machine(90).launch)
    bounds = torch.linspace(-1, 1, 7)
    for count in (1, 7, 255, 300):
        x = torch.randn(count + 1).bfloat16()[1:]
        packed = torch.zeros(-(-3 * count // 8), dtype=torch.uint8)

        stepwise.launch_encode(packed, x, bounds, 3, False)

        assert torch.equal(packed, stepwise.encode_reference(x, bounds, 3, False))


PROBE = """
extern "C" __global__ void probe(const float* x, float* out, long long* count) {
    __shared__ float block[256];
    const int lane = threadIdx.x % 32;
    float value = x[threadIdx.x];
    int steps = 0;
    while (value > 1.0f) {  // lanes leave one by one
        value = __fdiv_rn(value, 3.0f);  // sm_120 multiplies by a third for a mere /
        ++steps;
    }
    if (lane % 3 == 0) value = __fsqrt_rn(value);
    else if (lane % 3 == 1) value = -value;
    block[threadIdx.x] = value + __shfl_xor_sync(~0u, value, 1);
    __syncthreads();
    out[threadIdx.x] = block[255 - threadIdx.x];
    count[threadIdx.x] = (long long)steps * -1234567891011 + __popc(__ballot_sync(~0u, steps > 2)) % 7;
}
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lanes_part_and_meet_and_warps_wait_for_one_another(architecture: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawkernel, "source", lambda stem: PROBE)
    x = torch.rand(256, generator=torch.Generator().manual_seed(1)) * 100
    out, count = torch.empty(256), torch.empty(256, dtype=torch.int64)

    Machine(architecture).launch("probe", "probe", {}, 256, x, out, count)

    value, steps = x.clone(), torch.zeros(256, dtype=torch.int64)
    while (more := value > 1).any():
        value, steps = torch.where(more, value / 3, value), steps + more
    lane = torch.arange(256) % 32
    value = torch.where(lane % 3 == 0, value.double().sqrt().float(), torch.where(lane % 3 == 1, -value, value))
    together = value + value.view(-1, 2).flip(1).flatten()
    votes = (steps > 2).view(-1, 32).sum(1) % 7
    assert torch.equal(out, together.flip(0))
    assert torch.equal(count, steps * -1234567891011 + votes.repeat_interleave(32))


def test_an_access_outside_of_the_tensors_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawkernel, "launch", Machine(90).launch)
    with pytest.raises(RuntimeError, match="outside of all tensors"):
        mask.launch_select(torch.empty(200), torch.zeros(32, dtype=torch.uint8), torch.zeros(256))


def test_the_committed_table_has_every_kernel_and_type() -> None:
    path = instructions.MEASURED.parents[2] / "kernels" / "instructions.md"
    lines = [
        [cell.strip() for cell in line.split("|")] for line in path.read_text().splitlines() if line.startswith("| ")
    ]

    assert [(line[1], line[2], int(line[3])) for line in lines[2:]] == [
        (*case, sm) for case in CASES for sm in ARCHITECTURES
    ]
