import json

import pytest

from actbench.cli.flags import SchemeFlags
from actbench.methods.fewbit.tables import table


def test_a_table_is_printed_and_exported(cli, tmp_path):
    file = tmp_path / "gelu.json"
    ended = cli("tables", "gelu", "--bits", "3", "--export-json", file)
    written = json.loads(file.read_text())

    assert ended.status == 0, ended.err
    assert "0.0119893" in ended.out
    assert "0.0862" in ended.out
    assert all(f"{level:.6f}" in ended.out for level in table("gelu", 3).levels)
    assert tuple(written["levels"]) == table("gelu", 3).levels
    assert written["relative_gradient_error"] == pytest.approx(0.0862, abs=1e-4)


def test_weight_domain_parameters_and_ones_own(cli, tmp_path):
    (tmp_path / "act.py").write_text("import torch\ndef soft(x):\n    return torch.tanh(x)\n")
    assert "0.0118983" in cli("tables", "gelu", "--domain", "-10", "10").out
    assert "0.0647" in cli("tables", "gelu", "--weight", "normal").out
    assert "0.00154" in cli("tables", "elu", "--alpha", "0.5").out
    assert "of |x|" in cli("tables", f"{tmp_path / 'act.py'}:soft").out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["gello"], "did you mean 'gelu'"),
        (["relu"], "one bit keeps it exactly"),
        (["gelu", "--alpha", "2"], "has no parameter 'alpha'"),
        (["gelu", "--scale", "2"], "--weight normal"),
        (["gelu", "--domain", "3", "1"], "lower end first"),
        (["gelu", "--bits", "9"], "--bits"),
        (["nowhere.py:f"], "nowhere.py"),
    ],
)
def test_what_is_wrong_is_refused(cli, arguments, names):
    ended = cli("tables", *arguments)
    assert ended.status == 2
    assert names in ended.err


def test_activation_bits_is_short_for_fewbit(cli):
    assert SchemeFlags(short={"activation_bits": "2"}).schemes == ["fewbit:2"]
    joined = SchemeFlags(scheme=["checkpoint"], short={"linear": "randomized:0.2", "activation_bits": "2"})
    assert joined.schemes == ["checkpoint+fewbit:2+randomized:0.2"]
    cli.refused("measure", "tiny-gpt2", "--gelu-bits", "3", "--activation-bits", "2", naming="give one of them")
