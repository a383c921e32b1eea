"""Keeping tensors for the backward pass in few bits: in what form, for which place, and who does it."""

from actbench.nn.keeping.forms import Form, Kept, Parts
from actbench.nn.keeping.keeper import Keeper
from actbench.nn.keeping.places import Place

__all__ = ["Form", "Keeper", "Kept", "Parts", "Place"]
