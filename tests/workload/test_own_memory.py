"""Memory of a process that simulates a model of the user's own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from actbench import workload as workloads
from actbench.errors import ModelError, UntraceableError
from actbench.measuring import bench
from actbench.model.records import Case

LARGE = """
    import torch
    from torch import nn

    def build():
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))  # 2 GiB
        teacher = nn.Linear(8192, 8192).requires_grad_(False)
        seen = torch.randn(1000, 8192)
        def make_batch(n):
            return {"x": seen[torch.randint(1000, (n,))]}
        def loss(model, batch):
            return nn.functional.mse_loss(model(batch["x"]), teacher(batch["x"]))
        return model.to(torch.bfloat16).float(), make_batch, loss
"""
SIMULATE = r"""
    import re, sys
    import actbench
    def peak():  # not resource's, to which the process that started this one adds its own peak
        return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
    actbench.measure(actbench.Case(model="resnet-cifar", batch_size=2, scheme="randomized:0.5"))
    before = peak()
    measured = actbench.measure(actbench.Case(model=sys.argv[1], batch_size=2, scheme="randomized:0.5"))
    assert measured.weights_bytes == 8 * (8192 * 8193) * 4, measured.weights_bytes
    print(peak() - before)
"""
LOOKS = """
    import torch
    from torch import nn
    def build():
        model = nn.Linear(256, 256)
        assert model.weight.norm() > 0
        return model, lambda n: {"x": torch.randn(n, 256)}, lambda model, batch: model(batch["x"]).sum()
    def batches():
        def make_batch(n):
            x = torch.randn(n, 256)
            return {"x": x / x.max().item()}
        return nn.Linear(256, 256), make_batch, lambda model, batch: model(batch["x"]).sum()
"""
MIXED = """
    import numpy
    import torch
    from torch import nn
    def array(*shape):
        return torch.from_numpy(numpy.zeros(shape, numpy.float32))
    def batch(n):
        return {"x": torch.randn(n, 256)}
    def loss(model, batch):
        return model(batch["x"]).sum()
    def data():
        model = nn.Linear(256, 256)
        model.weight.data = array(256, 256)
        return model, batch, loss
    def parameter():
        model = nn.Linear(8, 8)
        model.weight.data, model.bias = torch.zeros(256, 256), nn.Parameter(array(256))
        return model, batch, loss
    def values():
        model = nn.Linear(256, 256)
        model.weight.data.copy_(array(256, 256))
        model.bias.data[:] = model.weight.data[0] + array(256)
        return model, batch, loss
    def types():
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256).bfloat16())
        return model, batch, loss
"""

LAZY = """
    import torch
    from torch import nn
    def batch(n):
        return {"x": torch.randn(n, 3, 32, 32)}
    def loss(model, batch):
        return model(batch["x"]).sum()
    def lazy():
        model = nn.Sequential(nn.LazyConv2d(64, 3), nn.ReLU(), nn.LazyConv2d(128, 3), nn.Flatten(), nn.LazyLinear(10))
        with torch.no_grad():
            model(batch(1)["x"])
        return model, batch, loss
    def ordinary():
        model = nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.Flatten(), nn.Linear(128 * 28 * 28, 10)
        )
        return model, batch, loss
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "own.py"
    file.write_text(textwrap.dedent(text))
    return file


@pytest.mark.exhaustive
def test_two_gibibytes_of_weights_are_simulated_without_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SIMULATE), f"{written(tmp_path, LARGE)}:build"],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200 * 1024**2


@pytest.mark.parametrize(("function", "line"), [("build", 6), ("batches", 11)])
def test_who_looks_at_values_is_told_the_line_and_what_to_do(tmp_path: Path, function: str, line: int) -> None:
    case = Case(model=f"{written(tmp_path, LOOKS)}:{function}", batch_size=2)

    with pytest.raises(UntraceableError, match=rf"own\.py:{line}: .*no values.*--meter cpu") as refused:
        bench.measure(case)

    assert bench.failure_of(refused.value).reason == "unsupported"
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("function", ["build", "batches"])
def test_real_meters_let_it_look(tmp_path: Path, function: str) -> None:
    case = Case(model=f"{written(tmp_path, LOOKS)}:{function}", batch_size=2, meter="cpu")

    assert bench.Session(case).memory().weights_bytes == 256 * 257 * 4


def test_a_batch_before_there_is_a_model_builds_one_without_memory(tmp_path: Path) -> None:
    workload = workloads.load_workload(Case(model=f"{written(tmp_path, LARGE)}:build", batch_size=2))

    assert workload.batch(2, seed=0)["x"].shape == (2, 8192)


@pytest.mark.parametrize("function", ["data", "parameter", "values"])
def test_real_tensors_may_be_mixed_with_fake_ones_while_building(tmp_path: Path, function: str) -> None:
    case = Case(model=f"{written(tmp_path, MIXED)}:{function}", batch_size=2)

    simulated = bench.measure(case)
    assert simulated.weights_bytes == 256 * 257 * 4
    assert simulated.peak_bytes > 4 * simulated.weights_bytes


@pytest.mark.parametrize(
    ("meter", "scheme", "refusal", "naming"),
    [
        ("simulated", "exact", ModelError, r"addmm.*bfloat16 and float32.*refuses.*--autocast"),
        ("cpu", "gact:L2", ModelError, r"addmm.*bfloat16 and float32.*refuses.*--autocast"),
        ("cpu", "exact", RuntimeError, "must have the same dtype"),  # torch's own: nothing is traced for it
    ],
)
def test_products_of_two_types_are_refused_as_in_a_real_step(
    tmp_path: Path, meter: str, scheme: str, refusal: type[Exception], naming: str
) -> None:
    model = f"{written(tmp_path, MIXED)}:types"
    case = Case(model=model, scheme=scheme, batch_size=2, meter=meter, gradient_quality=False)

    with pytest.raises(refusal, match=naming):
        bench.measure(case)
    autocast = case.model_copy(update={"autocast": "bfloat16", "min_steps": 1, "min_seconds": 0.0})
    assert bench.measure(autocast).weights_bytes == 256 * 257 * 6


@pytest.mark.parametrize("scheme", ["exact", "actnn:L3"])
def test_lazy_layers_that_saw_a_batch_are_simulated_as_ordinary_ones(tmp_path: Path, scheme: str) -> None:
    file = written(tmp_path, LAZY)
    lazy, ordinary = (
        bench.measure(Case(model=f"{file}:{function}", batch_size=2, scheme=scheme))
        for function in ("lazy", "ordinary")
    )

    assert lazy.weights_bytes == ordinary.weights_bytes > 4 * 10 * 128 * 28 * 28
    assert lazy.peak_bytes == ordinary.peak_bytes
