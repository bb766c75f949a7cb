"""An engine of DeepSpeed that updates weights in an unknown way: rules go on, and say what they do not see."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from small import attach, messages, sgd
from torch import Tensor, nn

NAME = "deepspeed.runtime.engine"


class DeepSpeedEngine(nn.Module):
    """Wraps a model, and has no method that rules know."""

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def test_rules_act_on_the_optimizer_and_say_that_they_do_not_see_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = ModuleType(NAME)
    module.DeepSpeedEngine = DeepSpeedEngine
    monkeypatch.setitem(sys.modules, NAME, module)
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    engine = DeepSpeedEngine(model, optimizer)
    with attach(engine, {"id": "trap", "action": "nan-trap", "params": "*"}) as session:
        for _ in range(3):
            engine(Tensor([[1.0, 2.0, 3.0]])).sum().backward()
            optimizer.step()
        (notice,) = messages(session, "notice")
        assert notice.startswith("this version of DeepSpeed has no `DeepSpeedEngine._take_model")
        assert session.status()["trap"].fired == 3
