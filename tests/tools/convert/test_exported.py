"""``torch.export`` of converted models: it says to undo the conversion, and the model undone is exported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import actbench
from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.scheme.base import OF_PARTS


class Block(nn.Module):
    """A block with something for every scheme of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.gelu, self.silu, self.relu = nn.GELU(), nn.SiLU(), nn.ReLU()
        self.root = nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(self.relu(self.silu(self.gelu(self.root(self.wide(self.norm(x)))))))
        return result


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(32, 8))


X = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
WITH_VALUES = {
    "checkpoint": "checkpoint,blocks=Block",
    "compile": "compile:0.5,backend=aot_eager_decomp_partition",
    "encode": "encode:int:6,on=activations",
    "fewbit": "fewbit:3",
    "randomized": "randomized:0.5",
    "selective": "selective,blocks=Block",
    "smaq": "smaq,on=activations",
}
NAMES = [name for name in schemes.alone() if set(schemes.lookup(name).model_construct().changes) & OF_PARTS]
SPECS = [*(WITH_VALUES.get(name, name) for name in NAMES), "encode:int:8,on=maps", "chunked_loss,head=2", "invact"]
SPECS += ["gact:L1,only=1.wide"]
PLAIN = ("lora",)  # of torch's operators alone


@pytest.mark.sampled(fast=10, slow=8)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in PLAIN])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_says_to_undo_the_conversion(spec: str, strict: bool) -> None:
    """In the strict form the message stands inside of the compiler's own."""
    module = actbench.convert(model(), spec)

    with pytest.raises(Exception, match=r"cannot be exported: .*actbench\.conversion_of\(model\)\.undo\(\)") as raised:
        torch.export.export(module, (X,), strict=strict)
    assert strict or isinstance(raised.value, ConversionError)


@pytest.mark.sampled(fast=5, slow=6)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in ("qlora", "lora")])
def test_undone_or_without_gradients_it_is_exported(spec: str) -> None:
    exact = model().eval()
    module = actbench.convert(model(), spec).eval()

    if spec != "encode:int:8,on=maps":  # its forward pass is exact too, and its hooks are not traced
        with torch.no_grad():
            exported = torch.export.export(module, (X,)).module()
            torch.testing.assert_close(exported(X), exact(X))
    undone = actbench.conversion_of(module).undo()  # type: ignore[union-attr]
    torch.testing.assert_close(torch.export.export(undone, (X,)).module()(X), exact(X))


def test_an_adapted_model_is_exported_as_it_is() -> None:
    module = actbench.convert(model(), "lora").eval()

    torch.testing.assert_close(torch.export.export(module, (X,)).module()(X), module(X))
