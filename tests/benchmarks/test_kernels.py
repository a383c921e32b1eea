"""The benchmark of the operators: it compares like with like, counts bytes, and says what failed."""

from __future__ import annotations

import json

import pytest
import torch

from actbench.methods.formats.ops.smaq.format import SMAQ


def place(script):
    return script.Place(16, 129, torch.float32, torch.device("cpu"), 3)


def subjects(script):
    return {
        name: script.MAKERS[family](name, place(script)) for family, names in script.FAMILIES.items() for name in names
    }


def results(call):
    """Return what a call gives, or what it has written to."""
    found = call()
    found = tuple(each for each in call.args if isinstance(each, torch.Tensor)) if found is None else found
    return [each.clone() for each in (found if isinstance(found, tuple) else (found,))]


def test_operators_and_their_references_give_the_same_bits(script):
    for name, subject in subjects(script).items():
        if not name.startswith("layer:"):
            for ours, theirs in zip(results(subject.call), results(subject.reference), strict=True):
                assert torch.equal(ours, theirs), name


def test_bytes_are_counted(script):
    count = 16 * 129
    codes, mask, size, words = -(-count * 3 // 8), -(-count // 8), 4 * count, 4 * -(-count // 256)
    smaq = SMAQ.packed_bytes(count)
    again = size  # on the CPU the encoder reads the input once more

    assert {name: subject.moved_bytes for name, subject in subjects(script).items()} == {
        "layer:gelu": 4 * size + 2 * codes + again,
        "layer:silu": 4 * size + 2 * codes + again,
        "layer:relu": 4 * size + 2 * mask,
        "stepwise_activate": 2 * size + codes + again,
        "stepwise_encode": size + codes,
        "stepwise_decode": 2 * size + codes,
        "relu_mask": 2 * size + mask,
        "mask_select": 2 * size + mask,
        "pack_codes": count + codes,
        "unpack_codes": count + codes,
        "groupquant_encode": size + codes + words,
        "groupquant_decode": size + codes + words,
        "batchnorm_backward": 3 * size + 2 * (codes + words),
        "smaq_encode": size + smaq,
        "smaq_decode": size + smaq,
        "smaqstep_adam": 3 * size + 4 * smaq,
        "smaqstep_sgd": 3 * size + 2 * smaq,
        "sketch_rademacher": size,
        "sketch_gaussian": size,
        "sketch_halves": 8 * count,
    }


def test_calls_take_turns_in_changing_order(script):
    seen = []
    calls = [lambda: seen.append("a"), lambda: seen.append("b")]
    found = script.interleaved(calls, lambda: seen.append("-"), 3, 0.0, False)

    assert [len(runs) for runs in found] == [3, 3]
    assert "".join(seen) == "ab" * script.WARM_UP_ROUNDS + "-b-a-a-b-b-a"


def test_tables_divide_medians_and_add_up_families(script):
    row = {"operator": "smaq_encode", "family": "smaq", "dtype": "float32", "bits": None, "size": "1x1", "notes": []}
    times = {"moved_bytes": 8, "copied_bytes": 4, "seconds": [2.0, 4.0, 6.0], "copy_seconds": [1.0, 1.0, 1.0]}
    encoded = {**row, **times, "exact_seconds": [8.0, 8.0, 8.0], "reference_seconds": [4.0, 8.0, 9.0]}
    decoded = {**encoded, "operator": "smaq_decode", "seconds": [1.0, 1.0, 1.0], "reference_seconds": [2.0, 2.0, 2.0]}

    assert "| smaq_encode | float32 |  | 1x1 | 4 s ± 4 s | 2e-09 | 50 % | 0.50x |  |" in script.operators_table(
        [encoded]
    )
    (line,) = script.families_table([encoded, decoded]).splitlines()[2:]
    assert line == "| smaq | float32 |  | 1x1 | 5 s | 10 s | 2.00x | 2.00x | 2.00x, 2.00x |"
    assert script.families_table([{**row, **times}]) == ""


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr(script.sys, "argv", ["kernels.py", "--device", "cpu", "--seconds", "0", *arguments])
    return script.main()


def test_tables_and_records_are_written(script, monkeypatch, capsys, tmp_path):
    few = ("--operator", "mask", "pack_codes", "--size", "8x64", "--bits", "1", "2")

    assert run(script, monkeypatch, *few, "--reference", "--output", str(tmp_path)) == 0
    out = capsys.readouterr().out
    (table,), (records,) = (tmp_path.glob(f"kernels/*.kernels.{suffix}") for suffix in ("md", "json"))
    assert f"{table.read_text()}\n" == out
    found = json.loads(records.read_text())
    assert [(row["operator"], row["bits"]) for row in found["rows"]] == [
        ("relu_mask", None),
        ("mask_select", None),
        ("pack_codes", 1),
        ("pack_codes", 2),
    ]
    assert all(len(row["seconds"]) == len(row["reference_seconds"]) == 5 for row in found["rows"])
    assert found["versions"]["torch"] == torch.__version__


def test_one_that_fails_is_told_and_the_others_are_measured(script, monkeypatch, capsys):
    def broken(name, place):
        raise MemoryError("no room")

    monkeypatch.setitem(script.MAKERS, "mask", broken)

    assert run(script, monkeypatch, "--operator", "relu_mask", "pack_codes", "--size", "8x64") == 1
    out = capsys.readouterr().out
    assert "- relu_mask float32 8x64: no room" in out
    assert "| pack_codes | uint8 |" in out


def test_a_compiler_that_does_not_work_is_a_note(script, monkeypatch, capsys):
    def broken(layer):
        def call(x):
            raise RuntimeError("no compiler\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)

    assert run(script, monkeypatch, "--operator", "layer:relu", "--size", "2x8", "--compile") == 0
    out = capsys.readouterr().out
    assert "- layer:relu float32 2x8: torch.compile does not work here: no compiler\n" in out
    assert "| layer:relu | float32 |" in out


@pytest.mark.parametrize(
    "wrong", [("--operator", "relu_mas"), ("--size", "512"), ("--size", "0x4"), ("--bits", "9"), ("--dtype", "float64")]
)
def test_what_cannot_be_measured_is_refused(script, monkeypatch, capsys, wrong):
    with pytest.raises(SystemExit, match="2"):
        run(script, monkeypatch, *wrong)
    assert wrong[1] in capsys.readouterr().err
