"""Workspaces of cuBLAS by torch's version, as the installed torch itself has them, and in simulated steps."""

from __future__ import annotations

import ctypes
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actbench.measuring.meters.meter import MemoryReading
from actbench.measuring.meters.peak import Event
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.cublas import CACHE, CONFIG, LT_SIZE, RULES, UNIFIED, Workspaces, rule
from actbench.simulator.profiles import INSTALLED_TORCH, TorchVersion
from actbench.simulator.simulated import SimulatedMeter
from actbench.units import KIB, MIB

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
LARGE, SMALL, OF_LT = 32 * MIB, 8320 * KIB, MIB
MAJORS = (7, 8, 9, 10, 11, 12)
aten = torch.ops.aten
WIDTH = 64


def workspaces(name: str = "rtx-4090", version: TorchVersion = (2, 15), **environment: str) -> Workspaces:
    return Workspaces(replace(profiles.get(name), torch=version), environment)


def of_major(major: int, version: TorchVersion, **environment: str) -> Workspaces:
    return Workspaces(replace(profiles.get("rtx-4090"), compute_capability=(major, 0), torch=version), environment)


def product_of(found: Workspaces, func: Any = aten.mm.default, *shapes: tuple[int, ...], **options: Any) -> int:
    given = [torch.empty(shape) for shape in shapes or ((4, 4), (4, 4))]
    return found.product_bytes(func, given, options, func(*given, **options))


def kept_bytes(found: Workspaces) -> int:
    """Return the bytes that stay after steps with products of both passes, one of them with a bias."""
    given = torch.empty(8), torch.empty(4, 6), torch.empty(6, 8)
    of_bias = found.kept_by(aten.addmm.default, given, {}, aten.addmm.default(*given), in_backward=False)
    return sum({**found.kept, **of_bias}.values())


@pytest.mark.parametrize(
    ("version", "large"),
    [
        ((2, 11), {9}),
        ((2, 12), {9, 10, 12}),
        ((2, 13), {9, 10, 12}),
        ((2, 14), {9, 10, 11, 12}),
        ((2, 15), {9, 10, 11, 12}),
    ],
)
def test_cards_with_32_mib(version: TorchVersion, large: set[int]) -> None:
    kept = {CACHE: "1", UNIFIED: "1"}
    found = {major: kept_bytes(of_major(major, version, **kept)) for major in MAJORS}

    assert found == {major: 2 * (LARGE if major in large else SMALL) for major in MAJORS}


@pytest.mark.parametrize("name", ["rtx-5090", "rtx-5070", "b200", "h100-80gb"])
def test_a_product_on_hopper_and_blackwell_has_32_mib(name: str) -> None:
    assert product_of(workspaces(name)) == LARGE


@pytest.mark.parametrize("major", [9, 10, 11, 12])
def test_a_product_of_each_such_capability_has_32_mib(major: int) -> None:
    assert product_of(of_major(major, (2, 15))) == LARGE
    assert product_of(of_major(8, (2, 15))) == SMALL


@pytest.mark.parametrize(
    ("version", "environment", "kept", "of_product"),
    [
        ((1, 13), {}, 0, 0),
        ((2, 11), {}, 2 * SMALL + OF_LT, 0),
        ((2, 11), {CACHE: "0"}, 2 * SMALL + OF_LT, 0),  # which 2.11 does not read
        ((2, 11), {UNIFIED: "1"}, 2 * SMALL, 0),
        ((2, 14), {}, 2 * SMALL, 0),
        ((2, 14), {UNIFIED: "0"}, 2 * SMALL + OF_LT, 0),
        ((2, 15), {}, 0, SMALL),
        ((2, 15), {CACHE: "0"}, 0, SMALL),
        ((2, 15), {CACHE: "yes"}, 0, SMALL),
        ((2, 15), {CACHE: "1"}, 2 * SMALL, 0),
        ((2, 15), {CACHE: "1", UNIFIED: "0", LT_SIZE: "4096"}, 2 * SMALL + 4 * MIB, 0),
        ((2, 15), {CONFIG: ":4096:8"}, 0, 32 * MIB),
        ((2, 15), {CONFIG: ":16:8"}, 0, 128 * KIB),
        ((2, 15), {CONFIG: ":4096:2:16:8"}, 0, SMALL),
        ((2, 15), {CONFIG: "no size"}, 0, SMALL),
        ((2, 15), {CONFIG: ":0:0"}, 0, 0),
        ((2, 99), {}, 0, SMALL),
    ],
)
def test_what_stays_and_what_a_product_has(
    version: TorchVersion, environment: dict[str, str], kept: int, of_product: int
) -> None:
    found = workspaces(version=version, **environment)

    assert (kept_bytes(found), product_of(found)) == (kept, of_product)


@pytest.mark.parametrize(
    ("func", "shapes", "options", "expected"),
    [
        (aten.addmm.default, ((8,), (4, 6), (6, 8)), {}, OF_LT),
        (aten.addmm.default, ((8,), (4, 6), (6, 8)), {"beta": 2}, SMALL),
        (aten.addmm.default, ((4, 8), (4, 6), (6, 8)), {}, SMALL),
        (aten.addmm.default, ((1,), (4, 6), (6, 8)), {}, SMALL),
        (aten.addmm.default, ((8,), (1, 6), (6, 8)), {}, SMALL),  # a matrix of one row
        (aten.bmm.default, ((2, 4, 6), (2, 6, 8)), {}, SMALL),
        (aten.baddbmm.default, ((2, 4, 8), (2, 4, 6), (2, 6, 8)), {}, SMALL),
        (aten.addmm_.default, ((4, 8), (4, 6), (6, 8)), {}, SMALL),
        (aten.mv.default, ((4, 6), (6,)), {}, SMALL),
        (aten.dot.default, ((6,), (6,)), {}, SMALL),
        (aten.add.Tensor, ((6,), (6,)), {}, 0),
    ],
)
def test_a_vector_that_is_added_to_each_row_is_cublaslts(
    func: Any, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], expected: int
) -> None:
    assert product_of(workspaces(), func, *shapes, **options) == expected


def test_the_environment_is_read_at_the_first_product() -> None:
    environment: dict[str, str] = {}
    found = Workspaces(replace(profiles.get("rtx-4090"), torch=(2, 15)), environment)
    environment[CONFIG] = ":16:8"  # as a script does, after the simulation has begun

    assert product_of(found) == 128 * KIB
    environment[CONFIG] = ":4096:8"
    assert product_of(found) == 128 * KIB


def read(name: str, version: TorchVersion, *, bias: bool = False) -> tuple[MemoryReading, list[Event]]:
    """Return the step of two products, one after the other, and what it allocates and frees."""
    meter = SimulatedMeter(replace(profiles.get(name), torch=version))
    setup = TrainingSetup(
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)),
        loss=lambda module, batch: module(batch["x"]).sum(),
        make_optimizer=lambda module: torch.optim.SGD(module.parameters()),
    )
    with meter.active():
        step = TrainStep(meter.adopt(setup), meter.place({"x": torch.randn(8, WIDTH)}))
        found = meter.memory(step)
    assert meter.ran is not None
    return found, [event for part in meter.ran.parts[:2] for event in part]


@pytest.mark.parametrize(("name", "size"), [("rtx-4090", SMALL), ("rtx-5090", LARGE)])
def test_nothing_is_held_between_products(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    found, events = read(name, (2, 15))

    begun = [(at, label) for at, (label, amount) in enumerate(events) if amount == size]
    assert len(begun) == 5  # two of the forward pass and three of the backward pass: the batch has no gradient
    assert all(events[at + 1] == (label, 0) for at, label in begun)
    assert size < found.peak_bytes < size + MIB


@pytest.mark.parametrize(("name", "size"), [("rtx-4090", SMALL), ("rtx-5090", LARGE)])
def test_workspaces_stay_where_the_environment_says_so(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "1")
    found, events = read(name, (2, 15))

    labels = [label for label, amount in events if amount >= size]
    assert len(labels) == 2  # of the forward pass, and of the backward pass
    assert not any((label, 0) in events for label in labels)
    assert 2 * size < found.peak_bytes < 2 * size + MIB


def test_the_torch_that_is_named_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (CACHE, CONFIG, LT_SIZE, UNIFIED):
        monkeypatch.delenv(variable, raising=False)
    peaks = {era: read("rtx-4090", era)[0].peak_bytes for era in [(2, 11), (2, 13), (2, 14), (2, 15)]}

    assert peaks[2, 11] == peaks[2, 13] == peaks[2, 14] == peaks[2, 15] + SMALL
    of_bias = [read("rtx-4090", era, bias=True)[0].peak_bytes for era in [(2, 11), (2, 13)]]
    assert of_bias[0] == of_bias[1] + OF_LT


def test_a_workspace_is_of_the_pass_that_multiplies() -> None:
    device = SimulatedMeter(replace(profiles.get("rtx-4090"), torch=(2, 11)))
    x, weight = torch.randn(8, 1, WIDTH), torch.randn(1, WIDTH, WIDTH)
    setup = TrainingSetup(
        nn.PReLU(),
        loss=lambda module, batch: module(batch["x"] @ batch["weight"]).sum(),  # no gradients of products
        make_optimizer=lambda module: torch.optim.SGD(module.parameters()),
    )
    with device.active():
        step = TrainStep(device.adopt(setup), device.place({"x": x, "weight": weight}))
        found = device.memory(step)

    assert SMALL < found.peak_bytes < SMALL + MIB


def test_a_product_with_a_bias_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    _, events = read("rtx-4090", (2, 15), bias=True)

    assert sum(amount == OF_LT for _, amount in events) == 2
    assert sum(amount == SMALL for _, amount in events) == 3


def test_a_rule_is_known_of_the_installed_torch() -> None:
    assert RULES[-1].until >= INSTALLED_TORCH, "read the rule of this version, as the tests below do"


@pytest.mark.skipif(not LIBRARY.exists(), reason="torch was built without CUDA")
def test_the_installed_torch_keeps_workspaces_as_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read of 2.11.0, 2.12.0, 2.13.0, 2.14.1, which have no such function, and of 2.15.0."""
    monkeypatch.delenv(CACHE, raising=False)
    keeps = getattr(ctypes.CDLL(str(LIBRARY)), "_ZN2at4cuda33isCUDABlasWorkspaceCachingEnabledEv", None)
    if keeps is not None:
        keeps.restype = ctypes.c_bool

    assert (keeps is None or keeps()) is rule(INSTALLED_TORCH).keeps


_SIZES = """
import ctypes, json, os, re, subprocess, sys
import torch

library = sys.argv[1]
loaded, libc = ctypes.CDLL(library), ctypes.CDLL(None)
symbols = subprocess.run(["nm", "--defined-only", library], capture_output=True, text=True, check=True).stdout
base = ctypes.cast(loaded._handle, ctypes.POINTER(ctypes.c_void_p))[0]
card = (ctypes.c_int * 1024)()  # cudaDeviceProp
major = 0x168 // 4

# torch asks for the properties of the card by this function, whose code becomes a jump to one that returns `card`
asked = ctypes.cast(loaded._ZN2at4cuda26getCurrentDevicePropertiesEv, ctypes.c_void_p).value
answer = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(card))
page = os.sysconf("SC_PAGE_SIZE")
assert libc.mprotect(ctypes.c_void_p(asked // page * page), 2 * page, 7) == 0
jump = b"\\x48\\xb8" + ctypes.cast(answer, ctypes.c_void_p).value.to_bytes(8, "little") + b"\\xff\\xe0"
ctypes.memmove(asked, jump, len(jump))


def function(name):
    at = int(re.search(rf"^([0-9a-f]+) [tT] {name}$", symbols, re.M)[1], 16)
    return ctypes.CFUNCTYPE(ctypes.c_size_t)(base + at)


def sizes(name, variable, values):
    found, size = {}, function(name)
    for value in values:
        os.environ.update({variable: value} if value else {})
        found[value] = size()
        os.environ.pop(variable, None)
    return found


cublas, lt = "_ZN2at4cuda24parseChosenWorkspaceSizeEv", "_ZN2at4cuda28parseCUDABlasLtWorkspaceSizeEv"
of_major, usual = {}, function(cublas)
for each in map(int, sys.argv[2].split(",")):
    card[major] = each
    of_major[each] = usual()
card[major] = 8
configured = sizes(cublas, "CUBLAS_WORKSPACE_CONFIG", ["", ":4096:8", ":16:8", ":4096:2:16:8", "no size", ":0:0"])
print(json.dumps([of_major, configured, sizes(lt, "CUBLASLT_WORKSPACE_SIZE", ["", "4096", "12 and more", "none"])]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not LIBRARY.exists(), reason="torch was built without CUDA")
@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("nm") is None, reason="changes code of x86-64")
def test_the_installed_torch_has_these_sizes() -> None:
    """The functions of the installed torch run, for a card that only seems to be there."""
    ran = subprocess.run(
        [sys.executable, "-c", _SIZES, str(LIBRARY), ",".join(map(str, MAJORS))], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    of_major_found, of_configs, of_lt = json.loads(ran.stdout)
    kept = {CACHE: "1"}

    for major, size in of_major_found.items():
        assert kept_bytes(of_major(int(major), INSTALLED_TORCH, **kept, **{UNIFIED: "1"})) == 2 * size, major
    for text, size in of_configs.items():
        assert kept_bytes(workspaces(version=INSTALLED_TORCH, **kept, **{CONFIG: text, UNIFIED: "1"})) == 2 * size, text
    for text, size in of_lt.items():
        told = {CONFIG: ":0:0", LT_SIZE: text, UNIFIED: "0"}
        assert kept_bytes(workspaces(version=INSTALLED_TORCH, **kept, **told)) == size, text
