"""Updates that the script undoes by the old values, and trainings that write weights for a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from pack_trainings import launched
from small import linears, sgd, weights_of
from torch import Tensor, nn

SERVERS: list[nn.Module] = []
Write = Callable[[nn.Module, Sequence[Tensor]], None]


@torch.no_grad()
def _put(model: nn.Module, values: Sequence[Tensor]) -> None:
    for param, value in zip(model.parameters(), values, strict=True):
        param.copy_(value)


def old_copy_put_back(model: nn.Module, before: Sequence[Tensor]) -> None:
    _put(model, before)


def old_data_put_back(model: nn.Module, before: Sequence[Tensor]) -> None:
    for param, value in zip(model.parameters(), before, strict=True):
        param.data = value.clone()


def client_of_a_round(model: nn.Module, before: Sequence[Tensor]) -> None:
    """The next client begins from the weights that all clients of a round begin from."""
    model.load_state_dict(dict(zip(model.state_dict(), before, strict=True)))


def client_of_a_kept_model(model: nn.Module, before: Sequence[Tensor]) -> None:
    """Likewise; the script copies the weights of the model of the server by hand."""
    SERVERS.append(copy.deepcopy(model))
    _put(SERVERS[-1], before)
    _put(model, before)


def one_layer_put_back(model: nn.Module, before: Sequence[Tensor]) -> None:
    """The script keeps a layer as it is, while others learn."""
    weights = weights_of(model)
    _put(model, [*before[:2], *weights[2:]])


def all_but_a_row_put_back(model: nn.Module, before: Sequence[Tensor]) -> None:
    """Textual inversion: one row of the table learns."""
    weights = weights_of(model)
    row = weights[0][:1]
    _put(model, [torch.cat([row, before[0][1:]]), *before[1:]])


def reptile(model: nn.Module, before: Sequence[Tensor]) -> None:
    after = weights_of(model)
    _put(model, [old.lerp(new, 0.1) for old, new in zip(before, after, strict=True)])


def average_evaluated(model: nn.Module, before: Sequence[Tensor]) -> None:
    """Other weights are evaluated, and the own ones put back."""
    after = weights_of(model)
    _put(model, before)
    with torch.no_grad():
        model(torch.randn(2, 4))
    _put(model, after)


def line_search(model: nn.Module, before: Sequence[Tensor]) -> None:
    """Half of the step is taken."""
    after = weights_of(model)
    _put(model, before)
    _put(model, [(old + new) / 2 for old, new in zip(before, after, strict=True)])


CASES: dict[Write, str] = {
    old_copy_put_back: "  look: ",
    old_data_put_back: "  look: ",
    client_of_a_round: "    ",
    client_of_a_kept_model: "    ",
    one_layer_put_back: "",
    all_but_a_row_put_back: "",
    reptile: "",
    average_evaluated: "",
    line_search: "",
}


@pytest.mark.parametrize("write", CASES, ids=lambda write: write.__name__)
def test_update_that_is_undone_ten_times_is_told_once(write: Write) -> None:
    model = linears(4, 4, 2)
    params = list(model.parameters())

    def train() -> Sequence[Tensor]:
        optimizer = sgd(model, 0.01)
        for _ in range(15):
            loss = model(torch.randn(6, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            before = weights_of(model)
            optimizer.step()
            write(model, before)
        return params

    summary = [line for line in launched(train).lines if line.startswith("  ")]
    told = [line for line in summary if "was undone" in line]
    assert len(told) == bool(CASES[write])
    for line in told:
        assert line.startswith(CASES[write])
        assert (
            "the last 10 updates of 0.weight, 0.bias, 1.weight and 1 more was undone before the next backward pass"
            in line
        )
