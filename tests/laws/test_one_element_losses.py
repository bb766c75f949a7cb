"""A loss may be a number with dimensions, as a mean over the batch of a model with one output."""

import warnings

import pytest
import torch
from small import sgd
from torch import nn

import gradsurgeon

RULES = {
    "version": 1,
    "rules": [
        {"id": "norms", "action": "norm-log", "params": "*"},
        {"id": "loop", "action": "check-loop", "params": "*"},
    ],
}


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_with_dimensions_is_a_loss(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gradsurgeon.apply(model, RULES) as session:
            for _ in range(5):
                x = torch.randn(8, 4)
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean(0).view(shape)
                optimizer.zero_grad()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
    assert session.history("loss", "loss") == [*enumerate(losses)]
    assert not session.events


def test_a_loss_with_dimensions_that_is_nan_is_found() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, RULES) as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(0, 4)).mean(0).backward()
            optimizer.step()
    (event,) = session.events
    assert (
        "the loss of step 0 (made by `mean`) was NaN although all gradients are finite"
        in event.message
    )
