"""Packs tensors for the backward pass: which tensors, by which codec, for which site, in which placement."""

from actbench.packing.codecs import Codec, Identity, OfRows, Packed, Parts
from actbench.packing.hostoffload import HostOffload
from actbench.packing.layout import Layout
from actbench.packing.packer import Exclude, SavedTensors
from actbench.packing.sitestate import SiteState

__all__ = [
    "Codec",
    "Exclude",
    "HostOffload",
    "Identity",
    "Layout",
    "OfRows",
    "Packed",
    "Parts",
    "SavedTensors",
    "SiteState",
]
