"""What gradsurgeon no longer has is refused, and the error says what to use instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import rule_file

import gradsurgeon
from gradsurgeon.actions import _methods


@pytest.mark.parametrize("method", _methods.GONE)
def test_a_method_that_is_gone(method: str) -> None:
    rule = {"id": "a", "action": "combine", "params": "*", "losses": ["x", "y"], "method": method}
    with pytest.raises(gradsurgeon.RuleFileError) as refused:
        gradsurgeon.load(rule_file(rule))
    (problem,) = refused.value.problems
    assert problem.message == f"`method: {method}` is gone"
    assert problem.hint == _methods.GONE[method]


def test_what_is_used_instead_of_an_average_is_one() -> None:
    rule = {"id": "a", "params": "*", "losses": ["x", "y"], "method": "fairgrad", "alpha": 0}
    weigh = gradsurgeon.Combine.model_validate(rule).compile().weigh
    products = torch.tensor([[4.0, -3.0], [-3.0, 9.0]], dtype=torch.float64)
    assert weigh(products).tolist() == [0.5, 0.5]


def test_a_picture_that_is_gone() -> None:
    model = torch.nn.Linear(1, 1)
    rules = rule_file({"id": "norms", "action": "norm-log", "params": "*"})
    with gradsurgeon.apply(model, rules) as session:
        plot: Any = session.plot
        with pytest.raises(
            ValueError, match=r"'heatmap' is gone: .*`gradsurgeon report RUN --html"
        ):
            plot("heatmap")
