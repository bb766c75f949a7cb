"""P3: rules act among the hooks of the script in the order in which both came."""

from __future__ import annotations

from typing import Any

import torch
from small import attach, sgd, take_step
from torch import nn


def test_hooks_of_the_script_act_in_the_order_in_which_they_came() -> None:
    model: Any = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    (weight,) = model
    optimizer = sgd(model, 1.0)
    seen: list[tuple[str, float]] = []

    def note(word: str) -> None:
        seen.append((word, weight.grad.item()))

    optimizer.register_step_pre_hook(lambda *_: note("step, before"))
    weight.register_hook(lambda grad: seen.append(("backward, before", grad.item())))
    double = {"action": "scale", "params": "*", "factor": 2.0}
    with attach(model, {**double, "at": "step"}, {**double, "at": "backward"}):
        weight.register_hook(lambda grad: seen.append(("backward, after", grad.item())))
        for step in range(2):
            if step == 1:
                optimizer.register_step_pre_hook(lambda *_: note("step, after"))
            take_step(optimizer, weight.sum())
    first = [("backward, before", 1.0), ("backward, after", 2.0), ("step, before", 2.0)]
    assert seen == [*first, *first, ("step, after", 4.0)]
