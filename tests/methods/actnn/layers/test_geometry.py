import pytest
import torch
from torch import nn

from actbench.methods.actnn.layers.geometry import Geometry

LAYERS = [
    (nn.Conv1d(1, 1, 3), (9,)),
    (nn.Conv1d(1, 1, 4, stride=3, padding=2), (8,)),
    (nn.Conv2d(1, 1, 3, padding=1), (2, 2)),
    (nn.Conv2d(1, 1, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (8, 9)),
    (nn.Conv3d(1, 1, 3, padding=2, dilation=2), (4, 5, 6)),
    (nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), (4, 4)),
]


@pytest.mark.parametrize(("layer", "size"), LAYERS)
def test_the_share_inside_is_the_mean_of_ones_convolved_with_ones(layer, size):
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    mean = layer(torch.ones(1, 1, *size)).detach().mean() / layer.weight.numel()

    assert Geometry.of(layer).share_inside(size, layer.kernel_size) == pytest.approx(float(mean), rel=1e-6)


def test_windows_of_a_transposed_convolution_lie_on_the_output():
    assert Geometry.of(nn.ConvTranspose2d(1, 1, 3, padding=1)).share_inside((4, 4), (3, 3)) == 1
