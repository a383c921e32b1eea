"""Kernels on the host: sources compiled by the C++ compiler against host.h, launched in place of CuPy."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from actbench.ops import rawkernel

HERE = Path(__file__).parent
SOURCES = Path(str(resources.files("actbench.kernels")))
FORMATS = [  # of SmaQ, in the tests: lanes of a block, main bits, outlier bits
    dict(zip(("LANES", "MAIN_BITS", "OUTLIER_BITS"), each, strict=True))
    for each in ((8, 6, 7), (8, 6, 8), (8, 3, 8), (8, 3, 3), (8, 8, 8), (32, 4, 6), (32, 5, 7))
]
MACROS = {
    "stepwise": {"BITS": range(1, 9), "SCALAR": rawkernel.SCALARS.values()},
    "activate": {"BITS": range(1, 9), "SCALAR": rawkernel.SCALARS.values()},
    "mask": {"SCALAR": rawkernel.SCALARS.values()},
    "bitpack": {"BITS": range(1, 9)},
    "sketch": {"SCALAR": rawkernel.SCALARS.values()},
    "groupquant": {"SCALAR": rawkernel.SCALARS.values(), "BITS": (1, 2, 3, 5, 8), "LANES": (1, 4, 8, 32)},
    "groupquantrows": {"SCALAR": rawkernel.SCALARS.values(), "LANES": (1, 4, 8, 32)},
    "batchnorm": [
        {"SCALAR": scalar, "BITS": bits, "GROUP": group, "VECTOR": vector}
        for scalar in rawkernel.SCALARS.values()
        for bits, group in ((1, 256), (2, 32), (3, 96), (4, 256), (5, 1024), (6, 256), (7, 96), (8, 32), (8, 256))
        for vector in ((4,) if scalar == "Float32" else (4, 8))
    ],
    "smaq": [{"SCALAR": scalar, **form} for scalar, form in product(rawkernel.SCALARS.values(), FORMATS)],
    "smaqstep": [{"SCALAR": scalar, **form} for scalar, form in product(rawkernel.SCALARS.values(), FORMATS[:3])],
    "probe": {},
}
BLOCKS = 3  # so few that threads stride; host.h runs odd and even ones in opposite orders

Entry = Callable[..., bytes | None]


def key(kernel: str, macros: rawkernel.Macros) -> str:
    return " ".join([kernel, *(f"{name}={value}" for name, value in sorted(macros.items()))])


def specialisations(stem: str) -> list[rawkernel.Macros]:
    given = MACROS[stem]
    if isinstance(given, list):
        return given
    return [dict(zip(given, values, strict=True)) for values in product(*given.values())]


def translation_unit(stem: str, path: Path) -> str:
    """Return C++ with each specialisation of a source in a namespace, and `start`, which finds one by key."""
    kernels = re.findall(r"^KERNEL (\w+)\(", path.read_text(), re.MULTILINE)
    lines, table = ['#include "host.h"', '#include "common.cuh"'], []
    for number, macros in enumerate(specialisations(stem)):
        lines += [f"#undef {name}\n#define {name} {value}" for name, value in macros.items()]
        lines += [f"namespace case{number} {{", f'#include "{path}"', "}"]
        table += [
            f'if (!std::strcmp(key, "{key(kernel, macros)}"))'
            f" return host::launch(case{number}::{kernel}, grid, threads, count, values, sizes);"
            for kernel in kernels
        ]
    arguments = "const char* key, unsigned grid, unsigned threads, unsigned count, void** values, const size_t* sizes"
    return "\n".join([*lines, f'extern "C" const char* start({arguments}) {{', *table, 'return "no such kernel"; }'])


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Entry]:
    """Return what gives a source's `start`, compiled at most once."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++ or clang++) to run kernels on the host with")
    folder, entries = tmp_path_factory.mktemp("kernels"), {}

    def entry(stem: str) -> Entry:
        if stem not in entries:
            path = next(place / f"{stem}.cu" for place in (SOURCES, HERE) if (place / f"{stem}.cu").exists())
            unit, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
            unit.write_text(translation_unit(stem, path))
            flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{SOURCES}", f"-I{HERE}"]
            done = subprocess.run([compiler, *flags, str(unit), "-o", str(library)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            entries[stem] = ctypes.CDLL(str(library)).start
            entries[stem].restype = ctypes.c_char_p
        return entries[stem]

    return entry


@pytest.fixture
def host_launch(compiled: Callable[[str], Entry]) -> Callable[..., None]:
    """Return a stand-in for `rawkernel.launch` that runs kernels on CPU tensors."""

    def launch(
        stem: str, kernel: str, macros: rawkernel.Macros, threads: int, *arguments: torch.Tensor | np.generic
    ) -> None:
        if threads == 0:
            return
        boxes = [np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        boxes = [np.array([box]) for box in boxes]
        values = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
        sizes = (ctypes.c_size_t * len(boxes))(*(box.itemsize for box in boxes))
        grid = min(-(-threads // rawkernel.THREADS), BLOCKS)
        name = key(kernel, macros).encode()
        wrong = compiled(stem)(name, grid, rawkernel.THREADS, len(boxes), values, sizes)
        assert wrong is None, f"{key(kernel, macros)}: {wrong!r}"

    return launch


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Give the CPU, with launches running there, or a CUDA device in a side stream; CuPy must allocate nothing."""
    if request.param == "host":
        monkeypatch.setattr(rawkernel, "launch", request.getfixturevalue("host_launch"))
        yield torch.device("cpu")
        return
    import cupy

    with torch.cuda.stream(torch.cuda.Stream()):
        yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    assert cupy.get_default_memory_pool().total_bytes() == 0
