from __future__ import annotations

import math

import pytest
import torch

from actbench.tools.train.evaluation import Tally, correlation, f1


def test_f1_is_that_of_scikit_learn() -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    random = torch.Generator().manual_seed(0)
    predicted, labels = torch.randint(2, (2, 50), generator=random)

    assert f1(predicted, labels) == pytest.approx(sklearn_metrics.f1_score(labels, predicted))
    assert f1(torch.zeros(3).long(), torch.zeros(3).long()) == 0


def test_correlation_is_the_mean_of_pearsons_and_spearmans() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (40,), generator=random).float()  # ties
    predicted = labels + torch.randn(40, generator=random)
    pearson, spearman = (getattr(scipy_stats, f"{name}r")(predicted, labels)[0] for name in ("pearson", "spearman"))

    assert correlation(predicted, labels) == pytest.approx((pearson + spearman) / 2)
    assert math.isnan(correlation(torch.ones(3), torch.tensor([1.0, 2.0, 3.0])))


def test_a_tally_counts_classes_tokens_and_ratings() -> None:
    classes, tokens, ratings = Tally("f1"), Tally("loss"), Tally("correlation")
    classes.add(torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 1, 1]))
    tokens.add(torch.eye(3).expand(2, 3, 3), torch.tensor([[2, 0, 1], [2, 1, 1]]))  # says 0 then 1 after the first two
    ratings.add(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 2.0]))

    assert (classes.hits, classes.count) == (2, 3)
    assert torch.cat(classes.predicted).tolist() == [1, 0, 1]
    assert (tokens.hits, tokens.count) == (2 + 1, 2 * 2)
    assert tokens.predicted == []
    assert (ratings.loss, ratings.count) == (1.0 + 4.0, 2)
