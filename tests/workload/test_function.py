from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

from actbench import workload as workloads
from actbench.errors import ModelError, UsageError
from actbench.measuring.bench import Session
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator.fake import fake_mode, to_fake

GOOD = """
    import torch
    from torch import nn
    from neighbour import WIDTH

    def build():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))
        def make_batch(n):
            return {"x": torch.randn(n, WIDTH), "y": torch.randint(10, (n,))}
        def loss(module, batch):
            return nn.functional.cross_entropy(module(batch["x"]), batch["y"])
        return model.eval(), make_batch, loss
"""


def write(folder: Path, text: str) -> str:
    (folder / "neighbour.py").write_text("WIDTH = 8\n")
    (folder / "own.py").write_text(textwrap.dedent(text))
    return f"{folder / 'own.py'}:build"


def test_a_function_gives_model_batches_and_loss(tmp_path: Path) -> None:
    workload = workloads.load_workload(Case(model=write(tmp_path, GOOD), batch_size=4, optimizer="sgd"))
    setup = workload.setup(materialize=True, seed=0)
    batch = workload.batch(4, seed=1)
    assert setup.loss is not None

    setup.loss(setup.module, batch).backward()

    assert setup.module.training
    assert batch["x"].shape == (4, 8)
    assert torch.equal(batch["x"], workload.batch(4, seed=1)["x"])
    assert all(parameter.grad is not None for parameter in setup.module.parameters())
    assert workload.weights_origin == "function"


def test_the_case_decides_the_type(tmp_path: Path) -> None:
    workload = workloads.load_workload(Case(model=write(tmp_path, GOOD), batch_size=4, dtype="bfloat16"))
    setup = workload.setup(materialize=True, seed=0)

    assert {parameter.dtype for parameter in setup.module.parameters()} == {torch.bfloat16}
    assert workload.batch(2, seed=0)["x"].dtype == torch.bfloat16
    assert workload.batch(2, seed=0)["y"].dtype == torch.int64


def test_it_runs_on_fake_tensors(tmp_path: Path) -> None:
    workload = workloads.load_workload(Case(model=write(tmp_path, GOOD), batch_size=4))
    setup = workload.setup(materialize=False, seed=0)
    mode = fake_mode()
    to_fake(setup.module, mode)
    assert setup.loss is not None

    with mode:
        setup.loss(setup.module, workload.batch(2**20, seed=0)).backward()

    assert all(parameter.grad is not None for parameter in setup.module.parameters())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def build(:\n    pass\n", r"own\.py:1: SyntaxError"),
        ("\n\nraise ValueError('oh')\n", r"own\.py:3: ValueError: oh"),
        ("import sys\nsys.exit(3)\n", r"own\.py:2: SystemExit"),
        ("import no_such_module_at_all\n", r"own\.py:1: ModuleNotFoundError"),
        ("other = 1\n", "has no function 'build'"),
        ("build = 1\n", "has no function 'build'"),
        (
            "def build(width, *, depth, heads=2, **others):\n    pass\n",
            "'build' needs width, depth, and .* without arg",
        ),
    ],
)
def test_a_file_that_does_not_run_is_an_error_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        workloads.load_workload(Case(model=write(tmp_path, text), batch_size=1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def build():\n    return 1 / 0\n", r"own\.py:2: ZeroDivisionError"),
        (
            "def build():\n    return 1\n",
            r"returned int; a function .* must return \(model, make_batch, loss\)",
        ),
        ("def build():\n    return 1, 2, 3\n", r"returned \(int, int, int\)"),
        (
            "def build():\n    return 1, 2\n",
            r"returned 2 values \(int, int\); a .* make_batch\(n\) returns a dict of tensors",
        ),
        ("def build():\n    return 1, 2, 3, 4, 5\n", r"returned 5 values"),
    ],
)
def test_a_function_that_returns_something_else_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    workload = workloads.load_workload(Case(model=write(tmp_path, text), batch_size=1))

    with pytest.raises(ModelError, match=words):
        workload.setup(materialize=True, seed=0)


@pytest.mark.parametrize("materialize", [True, False])
def test_a_layer_that_waits_for_its_first_batch_is_an_error_unless_it_had_one(
    tmp_path: Path, materialize: bool
) -> None:
    text = (
        "import torch\nfrom torch import nn\ndef build():\n    m = nn.Sequential(nn.ReLU(), nn.LazyLinear(3))\n"
        "    return m, lambda n: {'x': torch.ones(n, 4)}, lambda m, b: m(b['x']).sum()\n"
    )
    called = text.replace("    return", "    with torch.no_grad():\n        m(torch.ones(2, 4))\n    return")

    lazy, ready = (workloads.load_workload(Case(model=write(tmp_path, each), batch_size=1)) for each in (text, called))
    with pytest.raises(ModelError, match=r"1\.weight has no shape, as LazyLinear waits for its first batch: call"):
        lazy.setup(materialize=materialize, seed=0)
    assert ready.setup(materialize=materialize, seed=0).module[1].weight.shape == (3, 4)


def test_the_line_is_found_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "def build():\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelError, match=r"own\.py:2: ZeroDivisionError"):
        workloads.load_workload(Case(model="own.py:build", batch_size=1)).setup(materialize=True, seed=0)


def test_a_batch_must_be_a_mapping(tmp_path: Path) -> None:
    text = "from torch import nn\ndef build():\n    return nn.Linear(1, 1), lambda n: [n], lambda m, b: 0\n"
    workload = workloads.load_workload(Case(model=write(tmp_path, text), batch_size=1))

    with pytest.raises(ModelError, match="make_batch returned list"):
        workload.batch(1, seed=0)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("m(b['y']).sum()", r"own\.py:4: the loss asks the batch for 'y', and make_batch gives 'x', 'z'"),
        ("m(b['x']).sum().item()", "the loss returned float, not a scalar tensor"),
        ("m(b['x']).sum().detach()", "depends on no parameter that needs a gradient"),
        ("torch.zeros(())", "depends on no parameter that needs a gradient"),
        ("{}['x']", None),
    ],
)
def test_a_wrong_loss_is_refused_in_words(tmp_path: Path, loss: str, words: str | None) -> None:
    batch = "{'x': torch.ones(n, 2), 'z': torch.ones(n)}"
    parts = f"nn.Linear(2, 1), lambda n: {batch}, lambda m, b: {loss}"
    text = f"import torch\nfrom torch import nn\ndef build():\n    return {parts}\n"
    workload = workloads.load_workload(Case(model=write(tmp_path, text), batch_size=3))
    setup = workload.setup(materialize=True, seed=0)

    with pytest.raises(KeyError if words is None else ModelError, match=words):
        setup.forward(workload.batch(3, seed=0))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        workloads.load_workload(Case(model=f"{tmp_path / 'none.py'}:build", batch_size=1))


def test_the_build_of_the_documentation_is_simulated_as_it_is_measured(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-model.md").read_text()
    (shown,) = re.findall(r"```python\n(def build\(\):.*?)```", page, re.DOTALL)
    model = "import torch\ndef MyModel():\n    return torch.nn.Sequential(torch.nn.Linear(128, 10))\n"
    case = Case(model=write(tmp_path, model + shown), batch_size=4, device_profile="cpu", gradient_quality=False)

    found = [Session(case.model_copy(update={"meter": meter})).memory() for meter in ("simulated", "cpu")]

    for measured in found:
        assert (measured.dtype, measured.optimizer) == ("bfloat16", "SGD")
        assert measured.weights_bytes == measured.optimizer_bytes == 2 * (128 * 10 + 10)
    assert found[0].activation_bytes == found[1].activation_bytes


BATCHES = {
    "pairs": '{"x": torch.randn(2 * n, 64), "y": torch.ones(2 * n)}',
    "packed": '{"x": torch.randn(1, 16 * n, 64), "y": torch.ones(1, 16 * n)}',
    "graphs": '{"x": torch.randn(5 * n, 64), "edges": torch.zeros(2, 12 * n, dtype=torch.int64)}',
    "crops": '{"views": [torch.randn(2 * n, 64), torch.randn(6 * n, 64)]}',
}
ONE_LOSS = 'model(batch["x"]).square().mean()'
LOSSES = {"crops": 'sum(model(view).square().mean() for view in batch["views"])'}


def measured(folder: Path, kind: str, **fields: object) -> Measurement:
    made = f"lambda n: {BATCHES[kind]}"
    loss = f"lambda model, batch: {LOSSES.get(kind, ONE_LOSS)}"
    text = f"""
        import torch
        from torch import nn
        def build():
            model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
            return model, {made}, {loss}, torch.optim.SGD(model.parameters(), lr=0.1)
    """
    settings = {"batch_size": 8, "device_profile": "cpu", "gradient_quality": False, **fields}
    return Session(Case.model_validate({"model": write(folder, text), **settings})).memory()


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_has_the_rows_that_the_function_makes(tmp_path: Path, kind: str) -> None:
    cpu, simulated = (measured(tmp_path, kind, meter=meter) for meter in ("cpu", "simulated"))

    assert simulated.peak_bytes == cpu.peak_bytes
    assert simulated.activation_bytes == cpu.activation_bytes
    assert measured(tmp_path, kind, meter="simulated", batch_size=16).activation_bytes > 1.9 * cpu.activation_bytes


@pytest.mark.slow
def test_the_largest_batch_is_in_the_samples_of_the_function(tmp_path: Path) -> None:
    limit = {"meter": "simulated", "memory_limit_bytes": 2**20, "find_largest_batch": True, "batch_size": 1}
    pairs, packed = (measured(tmp_path, kind, **limit).largest_batch for kind in ("pairs", "packed"))

    assert pairs is not None
    assert packed is not None
    assert pairs / packed == pytest.approx(8, rel=0.1)  # 16 rows a sample in place of 2


@pytest.mark.parametrize("meter", ["cpu", "simulated"])
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_whose_rows_are_no_samples_is_not_cut(tmp_path: Path, kind: str, meter: str) -> None:
    with pytest.raises(UsageError, match=r"make_batch\(8\) returns .*, not 8 rows of each, so it cannot be cut into 2"):
        measured(tmp_path, kind, meter=meter, scheme="accumulate:2")


def test_a_batch_that_is_the_same_for_every_number_is_refused(tmp_path: Path) -> None:
    parts = "nn.Linear(2, 1), lambda n: {'x': torch.ones(6, 2)}, lambda m, b: 0"
    text = f"import torch\nfrom torch import nn\ndef build():\n    return {parts}\n"
    workload = workloads.load_workload(Case(model=write(tmp_path, text), batch_size=3))

    with pytest.raises(ModelError, match=r"make_batch\(3\) and make_batch\(1\) both return x \(6, 2\); .* n samples"):
        workload.batch(3, seed=0)
    with pytest.raises(ModelError, match=r"make_batch\(1\) and make_batch\(2\)"):
        workload.batch(1, seed=0)
