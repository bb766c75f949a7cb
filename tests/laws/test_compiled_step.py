"""A compiled `optimizer.step`, and a compiled train step: rules act, updates count, traps stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from laws.test_compiled_modules import Outcome, hold, outcome
from models import data, same
from ranks import Json
from small import attach, kinds_of, net, sgd, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError

STEPS = 4
RULES = """
version: 1
rules:
  - {id: clamp-backward, action: clamp, at: backward, params: "0.*", max: 0.02}
  - {id: norm-log-accumulated, action: norm-log, params: "*"}
  - {id: clip-step, action: clip-norm, params: "*", max_norm: 0.05, per: rule}
  - {id: freeze-step, action: freeze, params: 2.bias}
  - {id: norm-log-step, action: norm-log, params: "*", at: step}
  - {id: capture-step, action: capture, params: "*", at: step}
  - {id: nan-trap, action: nan-trap, params: "*"}
  - {id: spike, action: spike-trap, params: "*", above: {times: 1.01, warmup: 2}}
  - {id: scale-module, action: scale, factor: 0.5, modules: "1", tensor: output.grad}
"""
WHAT = ["opt.step", "a function that steps", "the train step", "the model and the train step"]
WHEN = ["before", "after", "after the first call"]
SETUPS = [f"{what}, {when}" for what in WHAT for when in WHEN]
OPTIMIZERS: dict[str, Json] = {"SGD": {"momentum": 0.9}, "AdamW": {"eps": 1e-2}}

# As in the tests of rules on modules: torch warns about its own doing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Importing inductor, which is what compiling an optimizer does, torch warns of its own function.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:the rules on modules.*came after the first compiled call"),
    pytest.mark.no_cover,  # which would trace the compiler as well
]


def trainer(what: str, model: nn.Module, optimizer: Any) -> Callable[[Tensor], None]:
    step = optimizer.step

    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        step()

    if what == "opt.step":
        step = torch.compile(optimizer.step, backend="eager")
    elif what == "a function that steps":

        @torch.compile(backend="eager")
        def step() -> None:
            optimizer.step()

    elif "the train step" in what:
        if "the model" in what:
            model.compile(backend="eager")
        compiled: Any = torch.compile(train, backend="eager")
        return compiled  # type: ignore[no-any-return]
    return train


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def run(setup: str, kind: str) -> tuple[Outcome, list[int], bool]:
    """Train; return also the steps of the session, and whether a trap stopped an update."""
    what, _, when = setup.partition(", ")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = net()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **OPTIMIZERS[kind])
    session = gradsurgeon.apply(model, RULES) if when == "before" else None
    train = trainer(what, model, optimizer)
    if when == "after the first call":
        train(data(99, 5, 4))
        model.load_state_dict(state)
        optimizer.state.clear()
    if session is None:
        session = gradsurgeon.apply(model, RULES)
    clock, compiled = [], []
    with session:
        for step in range(STEPS):
            train(data(step, 5, 4))
            clock.append(session.step)
            compiled.append(graphs())
        recorded = dict.fromkeys(("norm-log-accumulated", "norm-log-step"), ("0.weight",))
        found = outcome(model.parameters(), session, recorded, compiled)
        stopped = False
        try:
            train(data(0, 5, 4) * float("nan"))
        except NonFiniteGradientError:
            stopped = same(weights_of(model), found.params)
        return found, clock, stopped


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("setup", SETUPS)
def test_all_is_as_without_compilation(setup: str, kind: str) -> None:
    found, clock, is_stopped = run(setup, kind)
    hold(found, run("nothing", kind)[0])
    # An update is counted when it has happened, not when the next one begins.
    assert clock == [1, 2, 3, 4]
    assert found.compiled[0] > 0
    # Once its state is there, an optimizer is compiled no more.
    assert found.compiled[1] == found.compiled[-1]
    assert is_stopped


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("what", WHAT)
def test_a_skipped_step_touches_nothing(what: str, kind: str) -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 2)
    before = weights_of(model)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **OPTIMIZERS[kind])
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    with attach(model, rule) as session:
        train = trainer(what, model, optimizer)
        train(data(0, 5, 4) * float("nan"))
        assert same(weights_of(model), before)
        train(data(0, 5, 4))
        assert not same(weights_of(model), before)
        assert session.step == 2
        assert kinds_of(session) == ["trap", "skipped-step"]
    state = optimizer.state[model.weight]
    assert not any(value.isnan().any() for value in state.values())


def test_one_whole_graph_is_refused_by_torch() -> None:
    # Without rules it is as well: torch breaks the graph of a step of its own accord.
    torch._dynamo.reset()
    model = nn.Linear(4, 2)
    optimizer = sgd(model)
    rule = {"id": "clip", "action": "clip-norm", "params": "*", "max_norm": 1.0, "per": "rule"}
    with attach(model, rule) as session:
        model(data(0, 5, 4)).sum().backward()
        step: Any = torch.compile(optimizer.step, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="gradsurgeon acts here"):
            step()
        optimizer.step()
        session.pause()
