"""The networks of examples/graphs.py at a size for tests."""

from functools import partial

from graphs import GAT, GCN, GraphSAGE, build

_small = partial(build, nodes=240, pairs=900, width=16, classes=4, hidden_size=32)


def gcn():
    return _small(GCN)


def graphsage():
    return _small(GraphSAGE)


def gat():
    return _small(GAT, dropout=0.75)
