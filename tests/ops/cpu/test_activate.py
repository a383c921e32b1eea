import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import gelu, silu

from actbench.ops import activate as operator
from actbench.ops.activate import cpu as activate
from actbench.ops.cpu import compiled
from actbench.ops.stepwise import encode_reference

SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 1003, 2047, 2048, 2049, 40_003, 65_536, 98_323)
NEAR_ZERO = torch.tensor([-1.5, 0.0, 2.0])
needs_kernel = pytest.mark.usefixtures("kernel")


def words(tensor):
    return tensor.view(torch.int32)


def bounds_of(bits):
    return torch.randn(2**bits - 1, generator=torch.Generator().manual_seed(bits)).sort().values


EXACT = {"silu": silu, "gelu": gelu}


@pytest.fixture(params=EXACT)
def function(request):
    if not activate.agrees(request.param, torch.float32):
        pytest.skip(f"torch computes {request.param} in another way here")
    return request.param


@pytest.fixture
def kernel():
    if not activate.agrees("silu", torch.float32):
        pytest.skip("torch computes silu in another way here")


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="other vectors")
@pytest.mark.skipif(torch.__version__.split("+")[0] != "2.15.0", reason="other versions may compute it otherwise")
@pytest.mark.parametrize("function", EXACT)
def test_this_version_of_torch_has_the_bits_of_the_kernel(function):
    if function == "gelu" and not (torch.backends.cpu.get_cpu_capability() == "AVX512" and activate.two_tables()):
        pytest.skip("oneDNN has another GELU for these vectors")
    # In a process of its own: how torch shares out the work depends on what the tests before did to its threads.
    asked = f"import torch; from actbench.ops.activate import cpu; assert cpu.agrees({function!r}, torch.float32)"
    subprocess.run([sys.executable, "-c", asked], check=True)


def test_every_exponent_and_every_special_number_has_torchs_bits(function):
    numbers = torch.arange(-(2**31), 2**31, 1009).to(torch.int32).view(torch.float32)
    largest = torch.finfo(torch.float32).max
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, largest, -largest])
    near_the_limits = torch.cat([edge + torch.arange(-4096, 4096) * 2.0**-12 for edge in (-104, -88.7, -87.3, 86)])
    near_the_pieces = torch.arange(0x3DC00001, 0x40E00001, 509).to(torch.int32).view(torch.float32)
    for x in (numbers, special.repeat(64), near_the_limits, near_the_pieces, -near_the_pieces):
        y, packed = operator.activate(x, function, NEAR_ZERO, 2, False)
        assert torch.equal(words(y), words(EXACT[function](x)))
        assert torch.equal(packed, encode_reference(x, NEAR_ZERO, 2, False))


@pytest.mark.parametrize("bits", range(1, 9))
def test_sizes_and_widths_equal_torch_and_the_reference(bits, function):
    bounds = bounds_of(bits)
    for size in SIZES:
        x = (6 * torch.randn(size + 1))[1:]  # misaligned
        y, packed = operator.activate(x, function, bounds, bits, False)
        assert torch.equal(words(y), words(EXACT[function](x))), size
        assert torch.equal(packed, encode_reference(x, bounds, bits, False)), size


@needs_kernel
def test_parts_of_threads_end_where_torchs_do(threads):
    if not activate.agrees("silu", torch.float32):
        pytest.skip("torch shares out its work in another way here")
    for size in (*SIZES, 32_768 * threads + 19):
        x = torch.linspace(-8, 1, size)  # where exp of the C library differs most often from that of vectors
        y, packed = operator.activate(x, "silu", NEAR_ZERO, 2, False)
        assert torch.equal(words(y), words(silu(x))), size
        assert torch.equal(packed, encode_reference(x, NEAR_ZERO, 2, False)), size


def test_the_serial_kernel_is_the_same(function, monkeypatch):
    x = torch.randn(20_001)
    monkeypatch.setattr(compiled, "_parallel", lambda: False)
    found = activate.ONE_PASS[function]
    serial = found._replace(kernel=compiled.kernel(found.kernel.__wrapped__))
    monkeypatch.setitem(activate.ONE_PASS, function, serial)
    y, packed = operator.activate(x, function, bounds_of(3), 3, False)
    assert torch.equal(y, EXACT[function](x))
    assert torch.equal(packed, encode_reference(x, bounds_of(3), 3, False))


@pytest.mark.parametrize("where", [100, -1])
def test_one_other_bit_of_torchs_is_noticed(where, function, monkeypatch):
    def other(x):
        y = EXACT[function](x)
        if y.numel() > 100:
            words(y).view(-1)[where] ^= 1
        return y

    asked, threads = getattr(activate, f"_{function}_agrees").__wrapped__, torch.get_num_threads()
    assert asked(threads)
    monkeypatch.setattr(activate.functional, function, other)
    assert not asked(threads)


@needs_kernel
@pytest.mark.parametrize(("name", "value"), [("_LEAST_PART", 20_000), ("_STEPS", {"AVX2": 8, "AVX512": 16})])
def test_other_parts_or_vectors_of_torchs_are_noticed(name, value, monkeypatch):
    monkeypatch.setattr(activate, name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # one thread has no parts
    try:
        assert not activate._silu_agrees.__wrapped__(2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("missing", ["fused products", "vectors of torch"])
def test_without_the_instructions_there_is_no_kernel(missing, monkeypatch):
    if missing == "fused products":
        monkeypatch.setattr(activate, "features", frozenset)
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not activate._silu_agrees.__wrapped__(2)


def test_without_onednn_gelu_is_torchs_own():
    x = torch.randn(5, 1003)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not activate.agrees("gelu", torch.float32)
        assert torch.equal(operator.activate(x, "gelu", NEAR_ZERO, 2, False)[0], gelu(x))


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize("function", EXACT)
@pytest.mark.parametrize(("fold", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
def test_the_operator_is_torchs_either_way(agrees, function, fold, dtype, monkeypatch):
    monkeypatch.setattr(activate, "ONE_PASS", activate.ONE_PASS if agrees else {})
    x = torch.randn(5, 1003).to(dtype)
    y, packed = torch.ops.actbench.stepwise_activate(x, function, NEAR_ZERO, 2, fold)
    assert torch.equal(y, EXACT[function](x))
    assert torch.equal(packed, encode_reference(x, NEAR_ZERO, 2, fold))


@pytest.mark.slow
@pytest.mark.parametrize("function", EXACT)
@pytest.mark.parametrize(
    "limit", [{"ATEN_CPU_CAPABILITY": "avx2"}, {"ATEN_CPU_CAPABILITY": "default"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}]
)
def test_torchs_other_vectors(limit, function):
    code = (
        "import torch; from actbench.ops import activate\n"
        "x, bounds = torch.linspace(-8, 1, 70_003), torch.zeros(1)\n"
        f"y, _ = torch.ops.actbench.stepwise_activate(x, '{function}', bounds, 1, False)\n"
        f"print(torch.equal(y, torch.nn.functional.{function}(x)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | limit)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.slow
def test_all_numbers_have_torchs_gelu():
    if not activate.agrees("gelu", torch.float32):
        pytest.skip("torch computes gelu in another way here")
    step = 2**24
    for first in range(-(2**31), 2**31, step):
        x = torch.arange(first, first + step, dtype=torch.int64).to(torch.int32).view(torch.float32)
        y, _ = operator.activate(x, "gelu", NEAR_ZERO, 2, False)
        expected = gelu(x)
        assert bool(((words(y) == words(expected)) | (y.isnan() & expected.isnan())).all()), hex(first)
