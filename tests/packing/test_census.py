from torch import nn

from actbench.packing.replacement import census


def test_leaves_are_counted_the_commonest_first():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Tanh()))

    assert census(model) == "2 ReLU, 1 Linear, 1 Tanh"
    assert census(model, kinds=1) == "2 ReLU, 2 other kinds"
