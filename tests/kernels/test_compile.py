"""Every kernel compiles for every architecture, needs no stack, and computes as it says, with no GPU at hand."""

from __future__ import annotations

import re
from itertools import product

import pytest

from actbench.ops import rawkernel

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC, which comes with torch's CUDA builds")

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
SCALARS = tuple(rawkernel.SCALARS.values())
USUAL, *FORMATS = (  # of SmaQ: the default, and those with the most and the fewest high bits, and 32 lanes a block
    {"LANES": lanes, "MAIN_BITS": main, "OUTLIER_BITS": outlier}
    for lanes, main, outlier in ((8, 6, 7), (8, 3, 8), (32, 8, 8), (32, 6, 7))
)
MACROS = {
    "stepwise": [{"BITS": bits, "SCALAR": scalar} for bits, scalar in product(range(1, 9), SCALARS)],
    "activate": [{"BITS": bits, "SCALAR": scalar} for bits, scalar in product(range(1, 9), SCALARS)],
    "mask": [{"SCALAR": scalar} for scalar in SCALARS],
    "bitpack": [{"BITS": bits} for bits in range(1, 9)],
    "sketch": [{"SCALAR": scalar} for scalar in SCALARS],
    "groupquant": [
        {"SCALAR": scalar, "BITS": bits, "LANES": lanes}
        for scalar in SCALARS
        for bits, lanes in [*product(range(1, 9), (8,)), *product((3,), (1, 2, 4, 16, 32))]
    ],
    "groupquantrows": [{"SCALAR": scalar, "LANES": lanes} for scalar, lanes in product(SCALARS, (1, 2, 4, 8, 16, 32))],
    "batchnorm": [
        {"SCALAR": scalar, "BITS": bits, "GROUP": 256, "VECTOR": vector}
        for scalar, bits, vector in product(SCALARS, (2, 3, 4, 7, 8), (4, 8))
        if vector < 8 or scalar != "Float32"
    ],
    "smaq": [{"SCALAR": scalar, **form} for scalar, form in product(SCALARS, (USUAL, *FORMATS))],
    "smaqstep": [{"SCALAR": scalar, **form} for scalar, form in product(SCALARS, (USUAL, FORMATS[0]))],
}
KERNELS = {
    "stepwise": {"stepwise_encode", "stepwise_decode"},
    "activate": {"activate_gelu", "activate_gelu_tanh", "activate_silu"},
    "mask": {"relu_mask", "mask_select"},
    "bitpack": {"pack_codes", "unpack_codes"},
    "sketch": {"sketch_rademacher", "sketch_gaussian", "sketch_halves"},
    "groupquant": {"groupquant_encode", "groupquant_decode"},
    "groupquantrows": {"groupquant_encode_rows", "groupquant_decode_rows", "groupquant_words"},
    "batchnorm": {"batchnorm_sums", "batchnorm_totals", "batchnorm_gradient"},
    "smaq": {"smaq_encode", "smaq_decode"},
    "smaqstep": {"smaqstep_adam", "smaqstep_sgd"},
}
# Of 65,536 a processor: 6 blocks, and all 4 of Turing. What computes erf, tanh or exp needs more: 5 blocks. Group
# quantization holds 32 elements a lane: 4 blocks, with 4 kilobytes on their way to each warp, and 3 for rows of bits of
# their own. SmaQ holds 32 elements and their keys a lane: 2 blocks. A step of an optimizer holds another 32: 2 blocks,
# and before sm_90, whose packed instructions need fewer registers, or with more than one high bit of an outlier, 1.
MOST_REGISTERS = {"activate": 48, "batchnorm": 64, "groupquant": 64, "groupquantrows": 80, "smaq": 128, "smaqstep": 128}
MOST_REGISTERS_OF_OTHERS = 40
MOST_REGISTERS_OF_FOUR_BITS = {"activate": 56}  # 4 blocks: a search holds 15 bounds
MOST_REGISTERS_OF_TURING = {"smaq": 128}
MOST_REGISTERS_OF_ONE_BLOCK = 255
MOST_REGISTERS_OF_OTHERS_OF_TURING = 64
# All are slow: by default each source for one architecture, and one with the limits of Turing. What has 24
# specialisations takes the architectures between in turn, so that each type meets each of them.
BETWEEN = (80, 86, 89, 100)  # the oldest, the usual and the newest architecture are not
EVERYTHING = [
    (stem, macros, arch)
    for stem in MACROS
    for place, macros in enumerate(MACROS[stem])
    for arch in ARCHITECTURES
    if stem not in ("stepwise", "activate", "groupquant")
    or arch not in BETWEEN
    or arch == BETWEEN[place % len(BETWEEN)]
]
FIRST = {stem: macros[0] for stem, macros in MACROS.items()}
QUICK = [*((stem, macros, 90) for stem, macros in FIRST.items()), ("stepwise", FIRST["stepwise"], 75)]
CUPY_ADDS = "-ftz=true"  # after ours, and the last one counts


def read(program: object, what: str) -> bytes:
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    # The binding writes through a bytes object. One of length 1, an empty log, would be Python's only b" ": all who
    # use that byte, pickles among them, would read 0 from then on.
    buffer = bytes(bytearray(size + 1))
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer[:size]


def compiled(source: str, *options: str) -> tuple[str, object]:
    """Return the compiler's log and the program."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = read(program, "ProgramLog").rstrip(b"\0 ").decode()
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log
    return log, program


def needs(log: str) -> dict[str, tuple[int, int, int]]:
    """Return the bytes of stack, the bytes of spills and the registers of each kernel, as ptxas says them."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        stack, stores, loads = re.search(r"(\d+) bytes stack frame, (\d+) .* stores, (\d+) .* loads", part).groups()
        registers = re.search(r"Used (\d+) registers", part)[1]
        found[part.split("'")[0]] = (int(stack), int(stores) + int(loads), int(registers))
    return found


def check(stem: str, macros: dict[str, str | int], architecture: int) -> None:
    flags = [*rawkernel.options(macros), CUPY_ADDS, f"-arch=sm_{architecture}", "--ptxas-options=-v"]

    log, _ = compiled(rawkernel.source(stem), *flags)

    found = needs(log)
    assert found.keys() == KERNELS[stem]
    for kernel, (stack, spills, registers) in found.items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= most_registers(stem, macros, architecture), kernel


def most_registers(stem: str, macros: dict[str, str | int], architecture: int) -> int:
    if stem == "smaqstep" and (architecture < 90 or macros["OUTLIER_BITS"] - macros["MAIN_BITS"] > 1):
        return MOST_REGISTERS_OF_ONE_BLOCK
    if architecture == 75:
        return MOST_REGISTERS_OF_TURING.get(stem, MOST_REGISTERS_OF_OTHERS_OF_TURING)
    if macros.get("BITS") == 4 and stem in MOST_REGISTERS_OF_FOUR_BITS:
        return MOST_REGISTERS_OF_FOUR_BITS[stem]
    return MOST_REGISTERS.get(stem, MOST_REGISTERS_OF_OTHERS)


def name(value: object) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.sampled(fast=4, slow=1)
@pytest.mark.parametrize(("stem", "macros", "architecture"), QUICK, ids=name)
def test_a_kernel_compiles_without_spills_or_stack(stem, macros, architecture) -> None:
    check(stem, macros, architecture)


@pytest.mark.sampled(slow=10)
@pytest.mark.parametrize(("stem", "macros", "architecture"), [x for x in EVERYTHING if x not in QUICK], ids=name)
def test_all_the_others_compile_without_spills_or_stack(stem, macros, architecture) -> None:
    check(stem, macros, architecture)


def test_stack_would_be_seen() -> None:
    greedy = """extern "C" __global__ void greedy(int* x, int n) {
        int kept[512];
        for (int i = 0; i < n; ++i) kept[x[i]] = i;
        for (int i = 0; i < n; ++i) x[i] = kept[x[n - i]];
    }"""

    log, _ = compiled(greedy, "-arch=sm_90", "--ptxas-options=-v")

    assert needs(log)["greedy"][0] == 512 * 4


EXACT = [
    pytest.param(stem, macros, marks=() if macros == FIRST[stem] else pytest.mark.sampled(slow=8))
    for stem in ("stepwise", "groupquant", "groupquantrows", "smaq", "smaqstep")
    for macros in MACROS[stem]
]


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("stem", "macros"), EXACT, ids=name)
def test_no_instruction_flushes_subnormal_numbers(stem, macros) -> None:
    _, program = compiled(rawkernel.source(stem), *rawkernel.options(macros), CUPY_ADDS, "-arch=compute_90")
    ptx = read(program, "PTX").decode()

    assert "setp.gt.f32" in ptx
    assert "mul.rn.f32" in ptx
    assert not re.findall(r"^\s.*\.ftz.*$", ptx, re.MULTILINE)
    named = re.compile(r"// begin inline asm.*?// end inline asm", re.DOTALL)  # what a kernel asks for
    assert not re.findall(r"^\s*fma\..*$", named.sub("", ptx), re.MULTILINE)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("scalar", "vectors"),
    [
        ("Float32", 2),
        ("Float16", 1),
        ("BFloat16", 1),
    ],
)
def test_eight_elements_are_moved_as_vectors_of_16_bytes(scalar: str, vectors: int) -> None:
    """A lane loads or stores eight elements in one or two accesses, and most kernels their warp's codes in one."""
    one_pass = [vectors, vectors + 1]  # loads of x; stores of the output and the codes
    expected = {
        "stepwise_encode": [vectors, 1],
        "stepwise_decode": [vectors + 1, vectors],
        **dict.fromkeys(("activate_gelu", "activate_gelu_tanh", "activate_silu", "relu_mask"), one_pass),
        "mask_select": [vectors + 1, vectors],
        # four runs of eight a lane; three words of codes a lane in pieces that are whole, and vectors in others
        **{f"groupquant_{part}": [4 * vectors, 1] for part in ("encode", "encode_rows")},
        "groupquant_words": [4 * vectors, 0],
        "groupquant_decode": [1, 8 * vectors],  # of both
        "groupquant_decode_rows": [1, 4 * vectors],
        "smaq_encode": [4 * vectors, 1],  # 32 elements a lane
        "smaq_decode": [1, 4 * vectors],
        "smaqstep_adam": [12 * vectors + 2, 4 * vectors + 1],  # the parameter twice, or once without weight decay
        "smaqstep_sgd": [12 * vectors + 1, 4 * vectors + 1],
    }

    stems = ("stepwise", "activate", "mask", "groupquant", "groupquantrows", "smaq", "smaqstep")
    assert {k: v for stem in stems for k, v in accesses(stem, scalar).items()} == expected


def accesses(stem: str, scalar: str) -> dict[str, list[int]]:
    """Return, for each kernel of a source, its loads and stores of 16 bytes."""
    macros = {"BITS": 3, "LANES": 8, **USUAL, "SCALAR": scalar}
    _, program = compiled(rawkernel.source(stem), *rawkernel.options(macros), "-arch=compute_90")
    _, *parts = re.split(r"\.entry (\w+)\(", read(program, "PTX").decode())
    return {
        kernel: [len(re.findall(rf"{access}\.global\.v4\.\w32", body)) for access in ("ld", "st")]
        for kernel, body in zip(parts[::2], parts[1::2], strict=True)
    }
