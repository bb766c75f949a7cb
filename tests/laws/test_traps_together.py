"""Several traps trip in one update: the most severe decides, and no report says otherwise."""

import warnings

import pytest
import torch
from small import fields_of, sgd
from torch import nn

import gradsurgeon
from gradsurgeon.errors import NonFiniteGradientError

SPIKES = {
    "id": "spikes",
    "action": "spike-trap",
    "params": "*",
    "above": {"sigmas": 4},
    "then": "warn",
}


def events_of_a_nan(then: str) -> list[tuple[str, str]]:
    """Return kind and text of the events of an update with NaN gradients, under a trap and a spike trap that warns."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = sgd(model, 0.01)
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": then, "forensics": False}
    with (
        warnings.catch_warnings(),
        gradsurgeon.apply(model, {"version": 1, "rules": [SPIKES, trap]}) as session,
    ):
        warnings.simplefilter("ignore")
        for step in range(40):
            x = torch.randn(8, 4)
            if step == 39:
                x[0] = float("nan")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            try:
                optimizer.step()
            except NonFiniteGradientError:
                assert then == "raise"
    return fields_of(session, "kind", "message", step=39)


@pytest.mark.parametrize("then", ["skip-step", "raise"])
def test_a_warning_does_not_say_that_an_update_goes_on_that_another_rule_holds_back(
    then: str,
) -> None:
    texts = dict(events_of_a_nan(then))
    assert "the norm is NaN" in texts["spike"]
    assert "goes on" not in texts["spike"]
    assert "another rule holds this update back" in texts["spike"]


def test_the_update_goes_on_if_all_warn() -> None:
    texts = dict(events_of_a_nan("warn"))
    assert "the update goes on" in texts["spike"]
    assert "the update goes on" in texts["trap"]


def test_a_stopped_update_does_not_count_as_skipped() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model, 0.01)
    skips = {"id": "skips", "action": "nan-trap", "params": "weight", "then": "skip-step"}
    stops = {"id": "stops", "action": "nan-trap", "params": "bias", "then": "raise"}
    rules = {"version": 1, "rules": [skips, stops]}
    with warnings.catch_warnings(), gradsurgeon.apply(model, rules) as session:
        warnings.simplefilter("ignore")
        model(torch.full((8, 4), float("nan"))).square().mean().backward()
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()
    assert fields_of(session, "kind", "rule") == [
        ("trap", "skips"),
        ("trap", "stops"),
    ]
    assert "step skipped" not in session.events[0].message
