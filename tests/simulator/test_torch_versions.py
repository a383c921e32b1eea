"""The table of docs/torch-versions.md, and its facts as the installed torch has them.

Facts that a GPU alone shows have no test here; the table says where they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _foreach_utils

from actbench.simulator import caching, profiles, reductions
from actbench.simulator.card import simulated
from actbench.simulator.fake import fake_mode
from actbench.simulator.profiles import INSTALLED_TORCH, version_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "torch-versions.md").read_text()
HEADERS = Path(torch.__file__).parent / "include"
HALF = torch.bfloat16


class Fact(NamedTuple):
    """A row of the table."""

    what: str
    files: list[str]
    versions: list[str]
    checked: str


def facts() -> Iterator[Fact]:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1].startswith("`"):
            versions = re.findall(r"\d+\.\d+(?:\.\d+)?", cells[2])
            yield Fact(cells[0], re.findall(r"`([^`]+)`", cells[1]), versions, cells[3])


def header(name: str) -> str:
    path = HEADERS / name
    if not path.exists():
        pytest.skip(f"this build of torch has no {name}")
    return path.read_text()


def constant(text: str, name: str) -> int:
    """Return the number that a header gives a name first."""
    found = re.search(rf"\b{name}(?: = |\{{)(\d+)", text)
    assert found is not None, f"{name} is not there any more"
    return int(found[1])


def test_each_fact_has_its_place_and_names_the_versions_that_it_was_read_of() -> None:
    found = list(facts())
    tests = (ROOT / "tests" / "simulator").glob("test_*.py")
    written = "".join(path.read_text() for path in tests)

    assert len(found) >= 15
    for fact in found:
        assert fact.versions, fact.what
        for file in fact.files:
            assert (ROOT / "src" / "actbench" / file).exists(), file
        named = re.findall(r"`(test_\w+)`", fact.checked)
        assert named or fact.checked.startswith("no: "), fact.what
        assert all(f"def {name}(" in written for name in named), named


@pytest.mark.parametrize("fact", [fact for fact in facts() if "`test_" in fact.checked], ids=lambda fact: fact.what)
def test_what_can_be_read_was_read_of_the_installed_torch_or_a_newer_one(fact: Fact) -> None:
    """With a newer torch: run the fact's test; if it passes, the version belongs into the table."""
    assert max(map(version_of, fact.versions)) >= INSTALLED_TORCH


def test_sizes_of_the_allocator() -> None:
    text = header("c10/core/AllocatorConfig.h")

    assert constant(text, "kMinBlockSize") == caching.SMALLEST_BLOCK == profiles.CUDA_BLOCK_BYTES
    assert constant(text, "kSmallSize") == caching._SMALL
    assert constant(text, "kSmallBuffer") == caching._SMALL_SEGMENT
    assert constant(text, "kMinLargeAlloc") == caching._OWN_SEGMENT
    assert constant(text, "kRoundLarge") == caching._SEGMENT_STEP
    name = "large_segment_size_" if "large_segment_size_{" in text else "kLargeBuffer"
    assert constant(text, name) == caching._LARGE_SEGMENT


def test_threads_and_values_of_reductions() -> None:
    text = header("ATen/native/cuda/Reduce.cuh")
    on_cuda = text[text.index("#ifdef USE_ROCM\n  constexpr int min_values_per_thread") :].partition("#else")[2]

    assert constant(text, "MAX_NUM_THREADS") == reductions._MOST_THREADS
    assert constant(on_cuda, "min_values_per_thread") == reductions._LEAST_VALUES
    assert constant(on_cuda, "max_values_per_thread") == reductions._MOST_VALUES


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (nn.functional.softplus, ()),
        (torch.log1p, ()),
        (torch.logsumexp, (1,)),
        (nn.functional.interpolate, (8,)),
        (torch.linalg.vector_norm, ()),
        (torch.cumprod, (1,)),
    ],
)
def test_a_simulated_autocast_returns_float32_where_cudas_does(function: Any, arguments: tuple[Any, ...]) -> None:
    with simulated(profiles.get("a100-80gb")), fake_mode(), torch.autocast("cuda", HALF):
        assert function(torch.rand(2, 3, 4, dtype=HALF, device="cuda"), *arguments).dtype == torch.float32


def test_optimizers_use_lists_on_cuda() -> None:
    assert "cuda" in _foreach_utils._get_foreach_kernels_supported_devices()
    assert "cpu" not in _foreach_utils._get_foreach_kernels_supported_devices()


def test_zero_grad_frees_gradients() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()

    assert layer.weight.grad is None


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_saves_its_result_alone(function: Any) -> None:
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: saved.append(each.data_ptr()) or each, lambda each: each
    ):
        y = function(torch.randn(3, 5, requires_grad=True), -1)

    assert saved == [y.data_ptr()]


def test_flash_attention_keeps_a_float_for_each_row() -> None:
    q = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.float16)
    kept = torch.ops.aten._scaled_dot_product_flash_attention.default(q, q, q)[1]

    assert (kept.shape, kept.dtype) == ((2, 3, 5), torch.float32)


def test_attention_is_tried_in_this_order() -> None:
    backend = torch.nn.attention.SDPBackend
    tried = [int(each) for each in torch._C._get_sdp_priority_order()]  # type: ignore[attr-defined]

    order = [int(each.value) for each in (backend.FLASH_ATTENTION, backend.EFFICIENT_ATTENTION, backend.MATH)]
    assert tried[:3] == order


@pytest.mark.skipif(INSTALLED_TORCH < (2, 15), reason="torch 2.11 sorts")
@pytest.mark.parametrize(("ranks", "sorts"), [(1, False), (50, False), (51, True)])
def test_quantiles_of_few_ranks_are_selected(ranks: int, sorts: bool) -> None:
    with torch.profiler.profile() as profile:
        torch.rand(20_000).quantile(torch.linspace(0, 1, ranks))

    assert ("aten::sort" in {event.name for event in profile.events()}) is sorts
