"""A warning is of the line of the script that led to it, not of the line of ours that says it."""

from __future__ import annotations

import linecache

import pytest
import torch
from kept_sink import Kept, fail
from small import sgd
from torch import nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning


def test_a_warning_is_of_the_line_of_the_script() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    rules = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
    with gradsurgeon.apply(model, rules, optimizer=optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model.weight = nn.Parameter(model.weight.detach().clone())
        optimizer = sgd(model)
        with pytest.warns(GradSurgeonWarning, match="weight was replaced") as warned:
            model(torch.ones(1, 2)).sum().backward()  # here
            optimizer.step()
    (one,) = warned
    assert one.filename == __file__
    assert linecache.getline(one.filename, one.lineno).endswith("# here\n")


def test_a_warning_at_the_end_is_of_the_line_that_ends_the_session() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    rules = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
    session = gradsurgeon.apply(model, rules, sinks=[Kept(scalars=fail)])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.warns(GradSurgeonWarning, match="has failed") as warned:
        session.remove()  # here
    (one,) = warned
    assert one.filename == __file__
    assert linecache.getline(one.filename, one.lineno).endswith("# here\n")
