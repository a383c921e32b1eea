"""What oneDNN allocates for a convolution of float32 on an x86 CPU: reordered copies, scratch memory, results.

It multiplies in layouts of its own. In torch's default memory format an operand is copied into blocks of channels, as
wide as a register, and so is the result, from which torch makes the plain one; tensors with their channels last stay as
they are, but for the weight. Which kernel runs, and so which layout it asks for, follows from the shape, by the
conditions of oneDNN's kernels for AVX-512 and AVX2, in their order of preference. The least general come first: kernels
for one channel a group, for blocks of channels, and last the product of matrices, for which each thread unfolds images
into columns.

Left out: buffers of a few KiB for each thread, and, of kernels for channels last, what each thread holds of one image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from actbench.simulator.caching import round_up

BLOCK = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
"""Channels in one block, a register of floats: of AVX-512, or of AVX2."""

_NARROW = 8
"""The block of the kernels for AVX2, which oneDNN takes on AVX-512 too where its own kernels refuse a shape."""

_WIDEST_KERNEL = 14
"""Gradients of wider weights, such as those that cut images into patches, are products of matrices."""

_WIDEST_DEPTHWISE = 3
"""The same where each group has one channel."""


@dataclass(frozen=True)
class Convolution:
    """A convolution from an image to an output; a transposed one is that of its output to its input.

    Attributes:
        image: Images, (batch, channels, …).
        weight: Weight, (channels of the output, channels of a group of the image, …).
        output: Outputs, (batch, channels, …).
        last: Whether torch takes the tensors as having their channels last.
    """

    image: Tensor
    weight: Tensor
    output: Tensor
    stride: int
    padding: int
    dilation: int
    groups: int
    last: bool

    @cached_property
    def kernel(self) -> tuple[int, ...]:
        """The size of the kernel."""
        return tuple(self.weight.shape[2:])

    @cached_property
    def wide(self) -> tuple[int, int]:
        """Channels of a group of the image and of the output."""
        return self.image.shape[1] // self.groups, self.output.shape[1] // self.groups

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one channel."""
        return self.groups > 1 and self.wide == (1, 1)

    @property
    def is_pointwise(self) -> bool:
        """Whether the kernel has one element."""
        return max(self.kernel) == 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return bytes_of(self.weight)

    def block(self, *, least: int) -> int:
        """Return the channels of a block, at least ``least``: groups are not padded. 0 where no block divides them."""
        if self.groups == 1 or self.is_depthwise:
            return BLOCK
        fitting = (size for size in (BLOCK, 8, 4) if least <= size <= BLOCK)
        return next((size for size in fitting if not any(each % size for each in self.wide)), 0)

    def blocked_weight(self, image: int, output: int, *, depthwise: bool = True) -> int:
        """Return the bytes of the weight, with channels of each group padded to multiples.

        ``depthwise`` says whether a convolution of one channel a group runs in the kernel for that.
        """
        if self.is_depthwise and depthwise:
            return round_up(self.groups, BLOCK) * math.prod(self.kernel) * self.weight.element_size()
        padded = round_up(self.wide[0], image) * round_up(self.wide[1], output) * self.groups
        return padded * math.prod(self.kernel) * self.weight.element_size()


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a dense tensor."""
    return tensor.numel() * tensor.element_size()


def output_peak(conv: Convolution) -> int:
    """Return the most bytes allocated at once for the output, the output included."""
    result = bytes_of(conv.output)
    if conv.last:
        return _weight_beside(conv, *conv.wide) + result
    block = conv.block(least=_lowest())
    is_far = conv.dilation > 1 and conv.padding > 3 and (conv.is_depthwise or BLOCK == _NARROW)
    if is_far or max(conv.kernel) > min(conv.image.shape[2:]) + conv.padding:
        block = 0  # a row would begin or end in padding alone
    if not block:
        return max(_columns(conv), result) + result
    copies = conv.blocked_weight(1, block) if _reads_plain(conv) else _blocked(conv.image, block)
    if not _reads_plain(conv):
        copies += conv.blocked_weight(block, block) + _gathered(conv, conv.image)
    return _blocked(conv.output, block) + max(copies, result)


def image_peak(conv: Convolution, *, transposed: bool = False) -> int:
    """Return the most bytes allocated at once for the gradient of the image, the gradient included.

    ``transposed`` says that it is the output of a transposed convolution.
    """
    result = bytes_of(conv.image)
    strided = conv.stride > 1
    if conv.last:
        return _beside_image(conv) + result
    is_refused = conv.dilation > 1 and (
        strided or conv.is_depthwise or (BLOCK == _NARROW and conv.groups > 1 and max(conv.kernel) > 3)
    )
    block = conv.block(least=_lowest())
    if is_refused or (strided and conv.groups > 1 and conv.wide[1] < _NARROW and not block):
        return max(_columns(conv), result) + result
    if strided and not conv.is_depthwise and _prefers_channels_last(conv, transposed):
        # of the result there is one with its channels last, from which torch makes a dense one, and from that the plain
        copies = bytes_of(conv.output) + conv.blocked_weight(BLOCK, 1)
        return result + max(copies, (2 if conv.image.shape[1] > 1 else 1) * result)
    if not block:
        return max(_columns(conv), result) + result
    copies = _blocked(conv.output, block) + conv.blocked_weight(block, block)
    return _blocked(conv.image, block) + max(copies, result)


def _beside_image(conv: Convolution) -> int:
    """Return the bytes of the copied weight, and of columns, beside a gradient of the image with channels last."""
    if conv.dilation > 1 and conv.stride > 1:
        return conv.weight_bytes + (0 if conv.is_depthwise else _unfolded(conv))
    if conv.dilation > 1 and conv.is_depthwise:
        return conv.blocked_weight(BLOCK, BLOCK, depthwise=False)
    return _weight_beside(conv, *reversed(conv.wide))


def weight_peak(conv: Convolution) -> int:
    """Return the most bytes allocated at once for the gradient of the weight, the gradient included."""
    result = conv.weight_bytes
    image, output = _weight_blocks(conv)
    if not output:
        return result + max(_sums(conv), (2 if conv.last else 1) * result)
    made = conv.blocked_weight(image or 1, output, depthwise=_fits_depthwise(conv))
    shared = (_processes_of_batch(conv, image or conv.wide[0], output) - 1) * made
    if conv.last:
        return made + max(shared + _gathered(conv, conv.image), 2 * result)
    copies = _blocked(conv.output, output) + (_blocked(conv.image, image) if image else 0)
    return made + max(copies + shared + _gathered(conv, conv.image), result)


def _lowest() -> int:
    return 4 if BLOCK == 16 else _NARROW


def _reads_plain(conv: Convolution) -> bool:
    """Return whether the kernel for the few channels of a first layer reads the image as it is."""
    return conv.groups == 1 and conv.wide[0] < BLOCK and not conv.is_pointwise


def _prefers_channels_last(conv: Convolution, transposed: bool) -> bool:
    """Return whether the strided gradient of an image is made with channels last, where the groups are wide."""
    is_wide = conv.wide[1] >= 16 and (transposed or BLOCK == _NARROW or max(conv.wide) > 16)
    return conv.groups == 1 or is_wide or conv.block(least=_lowest()) == 0


def _weight_beside(conv: Convolution, summed: int, made: int) -> int:
    """Return the bytes of the copied weight beside tensors with channels last.

    It has blocks of those channels of a group that are made; in narrow groups of those that are summed, too.
    """
    if conv.is_depthwise:
        return conv.blocked_weight(1, 1)
    if conv.groups > 1 and summed <= 16 and BLOCK > _NARROW:
        block = conv.block(least=_lowest()) or BLOCK
        return conv.blocked_weight(block, block)
    padded = round_up(made, BLOCK if made <= BLOCK or BLOCK == _NARROW else 2 * BLOCK)
    return conv.weight_bytes // made * padded


def _weight_blocks(conv: Convolution) -> tuple[int, int]:
    """Return the channels of a block of image and output, 0 for an image as it is; (0, 0) for a product of matrices."""
    if max(conv.kernel) > _WIDEST_KERNEL or not _pads_little(conv) or (conv.dilation > 1 and conv.stride > 1):
        return 0, 0
    if conv.is_depthwise and (_fits_depthwise(conv) or not conv.last or BLOCK == _NARROW):
        return (BLOCK, BLOCK) if _fits_depthwise(conv) else (0, 0)
    channels = conv.wide[0]
    if conv.last and BLOCK > _NARROW:
        return (0 if conv.groups == 1 and channels < BLOCK and not conv.is_pointwise else BLOCK), BLOCK
    if conv.groups == 1 and BLOCK == 16 and (channels >= BLOCK or conv.is_pointwise):
        return BLOCK, BLOCK
    if conv.groups == 1 and not conv.is_pointwise and (channels < 4 if BLOCK == 16 else channels == 3):
        return 0, BLOCK
    block = _NARROW if conv.groups == 1 or conv.last else conv.block(least=_NARROW)
    return (block, block) if block > _NARROW or _narrow_fits(conv) else (0, 0)


def _fits_depthwise(conv: Convolution) -> bool:
    return _narrow_fits(conv) and max(conv.kernel) <= _WIDEST_DEPTHWISE and conv.stride <= max(conv.kernel)


def _narrow_fits(conv: Convolution) -> bool:
    return conv.dilation == 1 and conv.kernel[0] <= conv.image.shape[2]


def _pads_little(conv: Convolution) -> bool:
    """Return whether no row of outputs sees padding alone."""
    return all(conv.padding <= ((size - 1) * conv.dilation + 1) // 2 for size in conv.kernel[-2:])


def _blocked(tensor: Tensor, block: int) -> int:
    return bytes_of(tensor) // max(tensor.shape[1], 1) * round_up(tensor.shape[1], block)


def _threads(conv: Convolution) -> int:
    """Return how many threads unfold images at the same time; large or single ones are multiplied by all together."""
    threads, batch = torch.get_num_threads(), conv.image.shape[0]
    is_small = math.prod(conv.output.shape[2:]) / threads < 256 and (batch > 1 or conv.groups > 2)
    return min(threads, batch * conv.groups) if is_small or conv.is_depthwise else 1


def _unfolded(conv: Convolution) -> int:
    """Return the bytes of a group of one image, a column for each element of the output."""
    return conv.wide[0] * math.prod(conv.kernel) * math.prod(conv.output.shape[2:]) * conv.image.element_size()


def _columns(conv: Convolution) -> int:
    if conv.is_pointwise and conv.stride == 1 and not conv.padding:
        return 0  # the images are the columns
    return _threads(conv) * _unfolded(conv)


def _sums(conv: Convolution) -> int:
    """Return the bytes of each thread's columns, and of the blocks of weights in which it adds up."""
    unfolded = 0 if conv.is_pointwise and conv.stride == 1 else _unfolded(conv)
    turned = bytes_of(conv.image) // (conv.image.shape[0] * conv.groups) if conv.last else 0
    return _threads(conv) * (unfolded + turned + 4 * conv.weight_bytes)


def _gathered(conv: Convolution, image: Tensor) -> int:
    """Return the bytes that each thread of a pointwise kernel gathers of an image, where it has a stride."""
    if not conv.is_pointwise or conv.stride == 1 or conv.groups > 1:
        return 0
    return torch.get_num_threads() * image.shape[1] * math.prod(conv.output.shape[2:]) * image.element_size()


def _processes_of_batch(conv: Convolution, image: int, output: int) -> int:
    """Return over how many threads the batch is shared out for the gradient of the weight, of which each has its own.

    Threads work on other images, other blocks of input channels or other blocks of output channels, in the way that
    reads and writes the fewest bytes.
    """
    threads, batch = torch.get_num_threads(), conv.image.shape[0]
    if threads < conv.groups or output == _NARROW:  # kernels for AVX2 share out blocks of channels alone
        return 1
    threads //= conv.groups
    inputs, outputs = (-(-wide // block) for wide, block in zip(conv.wide, (image, output), strict=True))
    seen = image * math.prod(size / conv.stride for size in conv.image.shape[2:])
    made, added = math.prod(conv.output.shape[2:]) * output, math.prod(conv.kernel) * image * output

    def cost(share: tuple[int, int, int]) -> float:
        images, of_outputs, of_inputs = share
        most = [-(-whole // part) for whole, part in ((batch, images), (outputs, of_outputs), (inputs, of_inputs))]
        return most[0] * most[2] * seen + most[0] * most[1] * made + 8 * most[1] * most[2] * added

    best = min(reversed([*_shares(threads, batch, outputs, inputs)]), key=cost)[0]
    # oneDNN gives the batch all threads rather than leave up to half of them idle
    return min(batch, threads) if threads / 2 < best < threads else best


def _shares(threads: int, batch: int, outputs: int, inputs: int) -> Iterator[tuple[int, int, int]]:
    """Yield ways to share out threads over images, blocks of outputs and blocks of inputs."""
    for images, of_outputs in itertools.product(range(1, min(threads, batch) + 1), range(1, min(threads, outputs) + 1)):
        if images * of_outputs <= threads:
            yield images, of_outputs, min(threads // images // of_outputs, inputs)
