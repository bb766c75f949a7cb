"""P2: after `remove()` nothing keeps a model, its parameters or its optimizer alive, without Python's cycle collector."""

from __future__ import annotations

import gc
import logging
import pathlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import yaml
from models import data
from pairs import singly
from ranks import Json
from small import rule_file
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon.actions import ACTIONS
from gradsurgeon.language import packs
from gradsurgeon.runtime.running_steps import RunningStep
from gradsurgeon.runtime.step_counters import StepCounter

pytestmark = [
    pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning"),
    pytest.mark.no_cover,  # a tracer keeps frames
]
# The rules of one case act together.
CASES = pathlib.Path(__file__).parents[1] / "cases"
BY_ACTION: dict[str, list[Json]] = yaml.safe_load((CASES / "rules_of_actions.yaml").read_text())
PACKS = list(packs.published())


def test_each_action_has_a_case() -> None:
    assert BY_ACTION.keys() == ACTIONS.keys()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = gradsurgeon.tag(torch.tanh(self.first(x)), "hidden")
        return self.second(x), self.third(x)


class Adam(torch.optim.AdamW):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("of the script")
        return super().step(closure)


def train(rules: Any, *, gone: bool) -> tuple[dict[str, weakref.ref[Any]], Any, int]:
    """Return what should be gone, the session, and the number of steps that raised."""
    model = Net()
    weight = nn.Parameter(torch.randn(4))
    optimizer = Adam(model.parameters(), 1e-3)
    other = torch.optim.SGD([weight], 0.1)
    session = gradsurgeon.apply(model, rules, optimizer=optimizer)
    raised = 0
    for number in range(8):
        optimizer.zero_grad()
        # A NaN in one of the steps, and an error of the script in another.
        factor = float("nan") if number == 4 else 5.0 ** (number == 3)
        optimizer.fails = number == 5
        a, b = model(data(number, 5, 4))
        losses = {"a": a.square().mean() * factor, "b": (b * weight).mean()}
        gradsurgeon.backward(losses)
        raised += 1
        with suppress(gradsurgeon.GradSurgeonError, RuntimeError):
            optimizer.step()
            raised -= 1
        other.step()
    if not gone:
        session.remove()
    found = {"model": model, "optimizer": optimizer, "weight": model.first.weight, "other": weight}
    return {name: weakref.ref(thing) for name, thing in found.items()}, session, raised


@pytest.fixture
def _uncollected() -> Iterator[None]:
    # The first step of a process imports parts of torch, which leave cycles behind.
    train(rule_file({"id": "n", "action": "norm-log", "params": "*"}), gone=False)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.usefixtures("_uncollected")
@singly(case=[*BY_ACTION, *PACKS], end=["session held", "session dropped", "model gone"])
def test_nothing_is_kept(
    case: str,
    end: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.CRITICAL, "gradsurgeon")
    entries = BY_ACTION.get(case, [])
    rules: Any = f"gradsurgeon:{case}"
    if entries:
        rules = rule_file(*entries, action=case)
    references, session, raised = train(rules, gone=end == "model gone")
    raises = any(rule.get("then") == "raise" for rule in entries)
    # The error of the script, and that of a rule that raises.
    assert raised >= 1 + (raises and case != "check-loop")
    if end == "session dropped":
        session = None
    assert alive(references) == []
    del session


@pytest.mark.usefixtures("_uncollected")
def test_a_look_at_the_stack_keeps_no_caller_alive() -> None:
    model = Net()
    optimizer = Adam(model.parameters(), 1e-3)

    def look(held: object) -> weakref.ref[Any]:
        frame = sys._getframe()
        update = RunningStep(optimizer, StepCounter(0), frame, lambda _: None)
        assert update.is_on_stack()
        update.frame = None
        del frame
        return weakref.ref(held)

    reference = look(Net())
    assert reference() is None
