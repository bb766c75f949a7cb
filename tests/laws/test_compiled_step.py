"""A compiled `optimizer.step`, and a compiled train step: rules act, updates count, traps stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo
from models import data, same
from ranks import Json
from small import attach, hold_rows, kinds_of, net, rule_file, sgd, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError, RuleStatus

STEPS = 4
RULES: list[Json] = [
    {"id": "clamp-backward", "action": "clamp", "at": "backward", "params": "0.*", "max": 0.02},
    {"id": "norm-log-accumulated", "action": "norm-log", "params": "*"},
    {"id": "clip-step", "action": "clip-norm", "params": "*", "max_norm": 0.05, "per": "rule"},
    {"id": "freeze-step", "action": "freeze", "params": "2.bias"},
    {"id": "norm-log-step", "action": "norm-log", "params": "*", "at": "step"},
    {"id": "capture-step", "action": "capture", "params": "*", "at": "step"},
    {"id": "nan-trap", "action": "nan-trap", "params": "*"},
    {"id": "spike", "action": "spike-trap", "params": "*", "above": {"times": 1.01, "warmup": 2}},
    {
        "id": "scale-module",
        "action": "scale",
        "factor": 0.5,
        "modules": "1",
        "tensor": "output.grad",
    },
]
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


@dataclass
class Outcome:
    params: list[Tensor]
    status: dict[str, RuleStatus]
    norms: dict[str, list[tuple[int, float]]]
    clock: list[int]
    compiled: list[int]
    stopped: bool


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


@cache
def run(setup: str, kind: str) -> Outcome:
    what, _, when = setup.partition(", ")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = net()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **OPTIMIZERS[kind])
    rules = rule_file(*RULES)
    session = gradsurgeon.apply(model, rules) if when == "before" else None
    train = trainer(what, model, optimizer)
    if when == "after the first call":
        train(data(99, 5, 4))
        model.load_state_dict(state)
        optimizer.state.clear()
    if session is None:
        session = gradsurgeon.apply(model, rules)
    clock, compiled = [], []
    with session:
        for step in range(STEPS):
            train(data(step, 5, 4))
            clock.append(session.step)
            compiled.append(graphs())
        status = session.status()
        params = weights_of(model)
        stopped = False
        try:
            train(data(0, 5, 4) * float("nan"))
        except NonFiniteGradientError:
            stopped = same(weights_of(model), params)
        norms = {
            rule: session.history("0.weight", rule=rule)[:STEPS]
            for rule in ("norm-log-accumulated", "norm-log-step")
        }
        return Outcome(params, status, norms, clock, compiled, stopped)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [one["id"] for one in RULES])
@pytest.mark.parametrize("setup", SETUPS)
def test_a_rule_acts_as_without_compilation(setup: str, rule: str) -> None:
    wanted, found = run("nothing", "SGD"), run(setup, "SGD")
    assert found.status[rule].fired == wanted.status[rule].fired > 0
    assert found.status[rule].changed == wanted.status[rule].changed
    assert found.status[rule].last_step == STEPS - 1
    hold_rows(found.norms.get(rule, []), wanted.norms.get(rule, []))


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("setup", SETUPS)
def test_weights_updates_and_traps(setup: str, kind: str) -> None:
    wanted, found = run("nothing", kind), run(setup, kind)
    torch.testing.assert_close(found.params, wanted.params, rtol=1e-5, atol=1e-05)
    # An update is counted when it has happened, not when the next one begins.
    assert found.clock == [1, 2, 3, 4]
    assert found.compiled[0] > 0
    # Once its state is there, an optimizer is compiled no more.
    assert found.compiled[1] == found.compiled[-1]
    assert found.stopped


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
