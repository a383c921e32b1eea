"""The layout of SmaQ blocks in memory, in closed form.

A block of B elements with k outliers, main codes of m bits and outlier codes of o bits holds, in this order:

    header   8 bytes: mean, main end, tail start and tail end as bfloat16, the low byte first
    codes    B * m / 8 bytes: m bits an element, as a stream of :mod:`actbench.ops.bitpack`; the highest bit is the tag
    rest     ceil(k * (o - m) / 8) bytes: the high o - m bits of the outliers' codes, in the order of the elements

So every element costs ``m + (o - m) * k / B + 64 / B`` bits, block i begins at byte ``i * block_bytes``, and any block
can be read or replaced alone. A last block of n < B elements has ``n * k // B`` outliers and room for n rounded up to
a multiple of 8.
"""

from __future__ import annotations

from typing import Final, NamedTuple

HEADER_BYTES: Final = 8


class Format(NamedTuple):
    """A format of SmaQ.

    Attributes:
        main_bits: Bits of an element that is no outlier: tag, sign and a number of steps; 3 to 8.
        outlier_bits: Bits of an outlier, for the same; ``main_bits`` to 8.
        outliers: Outliers of each whole block.
        block: Elements of a block: a multiple of 32 from 64 to 1024.
    """

    main_bits: int
    outlier_bits: int
    outliers: int
    block: int

    @property
    def rest_bits(self) -> int:
        """Bits that an outlier has beyond ``main_bits``."""
        return self.outlier_bits - self.main_bits

    @property
    def main_steps(self) -> int:
        """Steps from the mean to the main end."""
        return (1 << (self.main_bits - 2)) - 1

    @property
    def tail_steps(self) -> int:
        """Steps from the tail start to the tail end."""
        return (1 << (self.outlier_bits - 2)) - 1

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.bytes_of(self.block)

    def outliers_of(self, count: int) -> int:
        """Return the outliers of a block of ``count`` elements."""
        return count * self.outliers // self.block

    def rest_start(self, count: int) -> int:
        """Return the byte of a block of ``count`` elements where the rest of the outliers' codes begins."""
        return HEADER_BYTES + (count + 7) // 8 * self.main_bits

    def bytes_of(self, count: int) -> int:
        """Return the bytes of a block of ``count`` elements, at least 1."""
        rounded = (count + 7) // 8 * 8
        return self.rest_start(count) + (self.outliers_of(rounded) * self.rest_bits + 7) // 8

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` elements."""
        whole, left = count // self.block, count % self.block
        return whole * self.block_bytes + (self.bytes_of(left) if left else 0)

    def room(self, size: int) -> int:
        """Return how many elements ``size`` bytes have room for, a multiple of 8.

        Raises:
            ValueError: No number of elements takes so many bytes.
        """
        whole, left = size // self.block_bytes, size % self.block_bytes
        count = max(0, left - HEADER_BYTES) // self.main_bits * 8  # an upper bound
        while count > 0 and self.bytes_of(count) > left:
            count -= 8
        if left and (count == 0 or self.bytes_of(count) != left):
            raise ValueError(f"no number of elements takes {size} bytes in {self}")
        return whole * self.block + count


def format_of(main_bits: int, outlier_bits: int, outliers: float, block: int) -> Format:
    """Return the format with this share of outliers.

    Raises:
        ValueError: There is no such format.
    """
    count = round(outliers * block)
    if abs(outliers * block - count) > 1e-6:
        raise ValueError(f"the outliers of a block of {block} must be a whole number, found {outliers * block}")
    form = Format(main_bits, outlier_bits, count, block)
    check_format(form)
    return form


SMAQ: Final = Format(6, 7, 64, 256)
"""The default format."""


def check_format(form: Format) -> None:
    """Raise a ValueError unless the format exists."""
    if not 3 <= form.main_bits <= form.outlier_bits <= 8:
        found = f"{form.main_bits} and {form.outlier_bits}"
        raise ValueError(f"main_bits must be from 3 to outlier_bits, and outlier_bits at most 8, found {found}")
    if form.block % 32 or not 64 <= form.block <= 1024:
        raise ValueError(f"block must be a multiple of 32 from 64 to 1024, found {form.block}")
    if not 0 <= form.outliers <= form.block:
        raise ValueError(f"outliers must be from none to all of a block, found {form.outliers} of {form.block}")
