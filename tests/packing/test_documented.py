"""The codec that the page on the architecture shows is one."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
IMPORTS = """
from dataclasses import dataclass
from torch import Tensor
from actbench.packing.layout import Layout
from actbench.packing.codecs import Codec, Parts
from actbench.packing.sitestate import SiteState
"""


def test_the_codec_of_the_documentation_packs_a_model_of_any_layout() -> None:
    from actbench.packing import SavedTensors
    from actbench.packing.sitestate import SiteState

    (source,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Codec" in block]
    names: dict[str, type] = {}
    exec(IMPORTS + source, names)
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)

    packed = SavedTensors(names["Half"]()).pack(x, SiteState("layer", 16))

    assert sum(part.nbytes for part in packed.parts) == packed.codec.packed_bytes(packed.layout) == 2 * x.numel()
    assert packed.unpack().stride() == x.stride()
    assert torch.equal(packed.unpack(), x.half().float())
