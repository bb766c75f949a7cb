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


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_forward", [True, False])
def test_tags_of_training_passes_count_once_and_an_evaluation_adds_none(
    in_forward: bool, guard: type[torch.no_grad]
) -> None:
    model = Root()
    ids = torch.arange(10, 16)
    optimizer = sgd(model)
    with warnings.catch_warnings(action="ignore"), gradsurgeon.apply(model, TRAP) as session:
        if not in_forward:
            gradsurgeon.tag(ids, "sample_ids")
        model(batch(), ids if in_forward else None).square().mean().backward()
        with guard():
            gradsurgeon.tag(torch.arange(90, 96), "sample_ids")
            model(torch.rand(6, 4))
        optimizer.step()
    (event,) = session.events
    assert event.sample_ids == (10, 11, 12, 13, 14, 15)
    assert event.diagnosis is not None
    assert event.diagnosis["rows"]["ids"] == [12]
