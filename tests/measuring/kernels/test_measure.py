import pytest
import torch

from actbench.errors import MeasurementError
from actbench.measuring.kernels import measure, subjects
from actbench.measuring.kernels.choices import OPERATORS, Plan, Size
from actbench.measuring.kernels.measure import LEAST_ROUNDS, interleaved
from actbench.ops.activate import one_pass
from actbench.results.kernels import KernelRecord, KernelTimes, kernel_tables
from actbench.results.machine import now, provenance


def results(found):
    """Measure the cases of a plan, each of which must succeed."""
    measured = list(measure.outcomes(measure.cases(found), found.seconds))
    assert all(isinstance(outcome, KernelTimes) for _, outcome in measured)
    return measured


def plan(*operators, bits=(3,), dtypes=("float32",), device="cpu"):
    return Plan(device, operators or OPERATORS, (Size(16, 129),), dtypes, bits, seconds=0.0, compiled=False)


@pytest.mark.slow
def test_every_operator_is_measured_and_its_bytes_are_counted():
    measured = results(plan())
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

    assert {case.operator: result.floor_bytes for case, result in measured} == floors
    for case, result in measured:
        assert result.moved_bytes - result.floor_bytes == (size if case.operator in again else 0)
        assert result.copied_bytes == 2 * (count if case.dtype == "uint8" else size)
        assert len(result.seconds) == len(result.copy_seconds) == LEAST_ROUNDS
        assert min(result.seconds) > 0
        assert KernelTimes.model_validate_json(result.model_dump_json()) == result


def test_types_and_bits_multiply_only_what_has_them():
    many = plan("relu_mask", "pack_codes", "stepwise_encode", bits=(2, 3), dtypes=("float32", "float16"))

    assert [(case.operator, case.dtype, case.bits) for case in measure.cases(many)] == [
        ("relu_mask", "float32", None),
        ("relu_mask", "float16", None),
        ("pack_codes", "uint8", 2),
        ("pack_codes", "uint8", 3),
        *(("stepwise_encode", dtype, bits) for dtype in ("float32", "float16") for bits in (2, 3)),
    ]


def test_the_table_divides_by_the_copy_and_by_the_exact_operator():
    [(case, measured)] = results(plan("layer:relu"))
    times = {"seconds": (2.0, 4.0, 6.0), "copy_seconds": (1.0, 1.0, 1.0), "exact_seconds": (8.0, 8.0, 8.0)}
    outcome = measured.model_copy(update=times)
    record = KernelRecord(recipe="kernels", case=case, outcome=outcome, recorded_at=now(), **provenance(""))
    (table,) = kernel_tables([record])
    (row,) = table.rows

    assert row["bits"] == 1
    assert row["seconds"] == 4
    assert row["gigabytes_per_second"] == measured.moved_bytes / 4 / 1e9
    assert row["copy_share"] == pytest.approx(measured.moved_bytes / 4 / measured.copied_bytes)
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
        measure.device_named("cuda")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError(), RuntimeError("std::bad_alloc")])
def test_a_size_that_does_not_fit_is_named(monkeypatch, error):
    def full(place):
        raise error

    monkeypatch.setitem(subjects.SUBJECTS, "relu_mask", full)
    [(case, failure)] = measure.outcomes(measure.cases(plan("relu_mask")), 0.0)
    assert case.name == "relu_mask float32 16x129"
    assert failure.reason == "out-of-memory"
    assert failure.message == "16x129 does not fit in the memory of cpu; give a smaller --size"


def test_a_compiler_that_does_not_work_is_a_note(monkeypatch):
    def broken(layer):
        def call(x):
            raise RuntimeError("no compiler\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    chosen = Plan("cpu", ("layer:relu",), (Size(2, 8),), ("float32",), (3,), 0.0, compiled=True)
    [(_, found)] = results(chosen)

    assert found.note == "torch.compile does not work here, so its columns are empty: no compiler"
    assert found.compiled_seconds is None
