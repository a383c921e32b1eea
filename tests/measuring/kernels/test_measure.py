import pytest
import torch

from actbench.errors import MeasurementError
from actbench.measuring.kernels import measure, subjects
from actbench.measuring.kernels.choices import OPERATORS, Plan, Size
from actbench.measuring.kernels.measure import LEAST_ROUNDS, interleaved
from actbench.ops.activate import one_pass
from actbench.results.kernels import KernelReport, report_table


def plan(*operators, bits=(3,), dtypes=("float32",), device="cpu"):
    return Plan(device, operators or OPERATORS, (Size(16, 129),), dtypes, bits, seconds=0.0, compiled=False)


@pytest.mark.slow
def test_every_operator_is_measured_and_its_bytes_are_counted():
    report = measure.run(plan(), "actbench kernels")
    count = 16 * 129
    codes, mask, size = -(-count * 3 // 8), -(-count // 8), 4 * count
    words = 4 * -(-count // 256)
    smaq = 8 * (8 + 6 * 32 + 8) + 8 + 6 * 2 + 1  # 8 blocks and 16 elements, 4 of them outliers
    floors = {
        "layer:gelu": 4 * size + 2 * codes,
        "layer:silu": 4 * size + 2 * codes,
        "layer:relu": 4 * size + 2 * mask,
        "stepwise_activate": 2 * size + codes,
        "stepwise_encode": size + codes,
        "stepwise_decode": 2 * size + codes,
        "relu_mask": 2 * size + mask,
        "mask_select": 2 * size + mask,
        "pack_codes": count + codes,
        "unpack_codes": count + codes,
        "groupquant_encode": size + codes + words,
        "groupquant_decode": size + codes + words,
        "smaq_encode": size + smaq,
        "smaq_decode": size + smaq,
        "sketch_rademacher": size,
        "sketch_gaussian": size,
    }
    users = {"gelu": {"layer:gelu", "stepwise_activate"}, "silu": {"layer:silu"}}
    twice = [name for name in users if not one_pass(name, torch.float32, torch.device("cpu"))]
    again = set().union(*(users[name] for name in twice))  # the encoder reads the input once more

    assert {result.operator: result.floor_bytes for result in report.results} == floors
    for result in report.results:
        assert result.moved_bytes - result.floor_bytes == (size if result.operator in again else 0)
        assert result.copied_bytes == 2 * (count if result.dtype == "uint8" else size)
        assert len(result.seconds) == len(result.copy_seconds) == LEAST_ROUNDS
        assert min(result.seconds) > 0
    assert KernelReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.slow
def test_types_and_bits_multiply_only_what_has_them():
    report = measure.run(
        plan("relu_mask", "pack_codes", "stepwise_encode", bits=(2, 3), dtypes=("float32", "float16")), ""
    )
    found = [(result.operator, result.dtype, result.bits) for result in report.results]

    assert found == [
        ("relu_mask", "float32", 1),
        ("relu_mask", "float16", 1),
        ("pack_codes", "uint8", 2),
        ("pack_codes", "uint8", 3),
        *(("stepwise_encode", dtype, bits) for dtype in ("float32", "float16") for bits in (2, 3)),
    ]


def test_the_table_divides_by_the_copy_and_by_the_exact_operator():
    report = measure.run(plan("layer:relu"), "")
    result = report.results[0].model_copy(
        update={"seconds": (2.0, 4.0, 6.0), "copy_seconds": (1.0, 1.0, 1.0), "exact_seconds": (8.0, 8.0, 8.0)}
    )
    (row,) = report_table(report.model_copy(update={"results": (result,)})).rows

    assert row["seconds"] == 4
    assert row["gigabytes_per_second"] == result.moved_bytes / 4 / 1e9
    assert row["copy_share"] == pytest.approx(result.moved_bytes / 4 / result.copied_bytes)
    assert row["over_exact"] == 0.5
    assert row["moved_over_floor"] == 1


def test_calls_take_turns_in_changing_order():
    seen = []
    calls = [lambda: seen.append("a"), lambda: seen.append("b")]
    found = interleaved(calls, lambda: seen.append("-"), 0.0, torch.device("cpu"))

    assert [len(runs) for runs in found] == [LEAST_ROUNDS] * 2
    assert "".join(seen[6:18]) == "-b-a-a-b-b-a"


def test_a_missing_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasurementError, match="--device cuda: torch finds no CUDA device here"):
        measure.run(plan(device="cuda"), "")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError(), RuntimeError("std::bad_alloc")])
def test_a_size_that_does_not_fit_is_named(monkeypatch, error):
    def full(place):
        raise error

    monkeypatch.setitem(subjects.SUBJECTS, "relu_mask", full)
    with pytest.raises(MeasurementError, match="relu_mask at --size 16x129 in float32 does not fit"):
        measure.run(plan("relu_mask"), "")


def test_a_compiler_that_does_not_work_is_a_note(monkeypatch):
    def broken(layer):
        def call(x):
            raise RuntimeError("no compiler\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    chosen = Plan("cpu", ("layer:relu",), (Size(2, 8),), ("float32",), (3,), 0.0, compiled=True)
    report = measure.run(chosen, "")

    assert report.notes == ("torch.compile does not work here, so its columns are empty: no compiler",)
    assert report.results[0].compiled_seconds is None
