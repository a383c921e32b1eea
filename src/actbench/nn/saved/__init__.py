"""Packs tensors for the backward pass: which tensors, by which codec, for which site, in which placement."""

from actbench.nn.saved.codecs import Codec, Identity, Packed, Parts
from actbench.nn.saved.hostoffload import HostOffload
from actbench.nn.saved.packer import Exclude, SavedTensors
from actbench.nn.saved.sitestate import SiteState

__all__ = [
    "Codec",
    "Exclude",
    "HostOffload",
    "Identity",
    "Packed",
    "Parts",
    "SavedTensors",
    "SiteState",
]
