"""Batches of codes as bases and differences, after base-delta-immediate compression (Pekhimenko et al., PACT 2012).

Lossless, and everything that decoding needs is counted. A batch is 64 codes. A configuration says which sources its
codes are covered by (the implied base zero, and bases that the batch stores), how many bits a difference to a source
has, and whether zeros are left out, for a mask. A source covers ``low .. low + 2**delta - 1``, where low is 0, or half
of that below a base. Each code that is not left out is a field: the number of its source, then its difference to low.
The smallest configuration that covers a batch is taken; configuration 0, the implied base with as many bits as a code
has, covers everything and is the batch as it is.
"""

from __future__ import annotations

from actbench.codecs.encodings.bdi.configurations import BATCH, Configuration, configurations
from actbench.codecs.encodings.bdi.covering import BaseChoice
from actbench.codecs.encodings.bdi.stream import Compressed, compress, decompress

__all__ = ["BATCH", "BaseChoice", "Compressed", "Configuration", "compress", "configurations", "decompress"]
