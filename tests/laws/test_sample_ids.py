"""The samples of a step are those that the script tagged for its training passes: no evaluation and no replay adds any."""

import warnings

import pytest
import torch
from small import sgd
from torch import Tensor, nn

import gradsurgeon

TRAP = {
    "version": 1,
    "rules": [{"id": "trap", "action": "nan-trap", "params": "*", "then": "warn"}],
}


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is not None:
            gradsurgeon.tag(ids, "sample_ids")
        out: Tensor = self.out(x.sqrt())
        return out


def batch() -> Tensor:
    x = torch.rand(6, 4)
    x[2] = -1
    return x


def test_a_tag_in_the_forward_pass_counts_once() -> None:
    model = Root()
    optimizer = sgd(model)
    with warnings.catch_warnings(), gradsurgeon.apply(model, TRAP) as session:
        warnings.simplefilter("ignore")
        model(batch(), torch.arange(10, 16)).square().mean().backward()
        optimizer.step()
    (event,) = session.events
    assert event.sample_ids == (10, 11, 12, 13, 14, 15)
    assert event.diagnosis is not None
    assert event.diagnosis["rows"]["ids"] == [12]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_adds_no_sample(guard: type[torch.no_grad]) -> None:
    model = Root()
    optimizer = sgd(model)
    with warnings.catch_warnings(), gradsurgeon.apply(model, TRAP) as session:
        warnings.simplefilter("ignore")
        gradsurgeon.tag(torch.arange(10, 16), "sample_ids")
        model(batch()).square().mean().backward()
        with guard():
            gradsurgeon.tag(torch.arange(90, 96), "sample_ids")
            model(torch.rand(6, 4))
        optimizer.step()
    (event,) = session.events
    assert event.sample_ids == (10, 11, 12, 13, 14, 15)
    assert event.diagnosis is not None
    assert event.diagnosis["rows"]["ids"] == [12]
