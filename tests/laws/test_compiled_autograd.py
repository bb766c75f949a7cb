"""Compiled autograd: backward as a graph of its own, which calls hooks but not what ends a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from laws.test_compiled_modules import Outcome, hold, outcome
from models import data, same
from ranks import Json
from small import attach, fields_of, kinds_of, rule_file, sgd, steps_of, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import NonFiniteGradientError

# As in the tests of rules on modules: torch warns about its own doing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.no_cover,  # which would trace the compiler as well
]

WAYS = ["around backward", pytest.param("by configuration", marks=pytest.mark.slow)]
STEPS = 3
POINTS = ["backward", "accumulated", "step"]
BOUNDS = {"output.grad": (-0.03, 0.03), "input.grad": (-0.01, 0.01)}
BOUNDS |= {"input": (-0.7, 0.7), "output": (-0.4, 0.4)}
SIDES = ["output.grad", "input.grad", "output", "input"]


def rules() -> Iterator[Json]:
    yield {"id": "clamp-backward", "action": "clamp", "at": "backward", "params": "*", "max": 0.02}
    yield {"id": "clip-step", "action": "clip-norm", "params": "*", "max_norm": 0.05, "per": "rule"}
    for point in POINTS:
        yield {"id": f"norm-log-{point}", "action": "norm-log", "params": "*", "at": point}
        yield {"id": f"capture-{point}", "action": "capture", "params": "*", "at": point}
    yield {"id": "nan-trap-params", "action": "nan-trap", "params": "*"}
    above = {"times": 1.01, "warmup": 2}
    yield {"id": "spike-trap", "action": "spike-trap", "params": "*", "above": above}
    for side in SIDES:
        label, site = side.replace(".", "-"), {"modules": "1", "tensor": side}
        low, high = BOUNDS[side]
        yield {"id": f"clamp-{label}", "action": "clamp", **site, "min": low, "max": high}
        yield {"id": f"norm-log-{label}", "action": "norm-log", **site}
        yield {"id": f"nan-trap-{label}", "action": "nan-trap", **site}


IDS = [one["id"] for one in rules()]


def made() -> nn.Sequential:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False))


def small() -> nn.Module:
    return nn.Sequential(*list(made())[:2])


def enabled(**options: Any) -> Any:
    compiler = torch.compile(backend="eager", **options)
    return torch._dynamo.compiled_autograd._enable(compiler)


def backward(way: str) -> Callable[[Tensor], None]:
    if way == "around backward":

        def run_backward(loss: Tensor) -> None:
            with enabled():
                loss.backward()

        return run_backward
    if way == "by configuration":

        @torch.compile(backend="eager")
        def compiled_backward(loss: Tensor) -> None:
            loss.backward()

        return compiled_backward
    return lambda loss: loss.backward()


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    torch._dynamo.config.compiled_autograd = True
    yield
    torch._dynamo.config.compiled_autograd = False


def captures() -> int:
    return int(torch._dynamo.utils.counters["compiled_autograd"]["captures"])


def run(way: str, micro: int = 1, kept: str = "") -> tuple[Outcome, list[str]]:
    """Train; return also what was said of spikes."""
    own = rule_file(*[one for one in rules() if one["id"].endswith(kept)])
    model = made()
    optimizer = sgd(model, 0.3)
    go = backward(way)
    compiled = []
    with gradsurgeon.apply(model, own) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            for batch in range(micro):
                go(model(data(10 * step + batch, 5, 4)).square().mean())
            # What is recorded after backward must not have been clipped.
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            compiled.append((captures(), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        named = dict(model.named_parameters())
        recorded = {}
        for one in session.status():
            if one.startswith("norm-log"):
                recorded[one] = list(named) if one.split("-")[-1] in POINTS else ["1"]
        found = outcome(named.values(), session, recorded, compiled)
    return found, fields_of(session, "message", kind="spike")


@pytest.mark.cell("compiled autograd", "backward", "accumulated", "step", "modules")
@pytest.mark.parametrize("way", WAYS)
def test_a_rule_acts_as_without_it(way: str) -> None:
    wanted, said_there = run("eager")
    found, said = run(way)
    hold(found, wanted)
    assert said == said_there
    (spike,) = said
    assert "is above" in spike
    assert found.compiled[0] == found.compiled[-1]
    # It was compiled autograd that ran, and once.
    assert found.compiled[0][0] == 1
    assert wanted.compiled[-1] == (0, 0)


TRAPS = [one for one in IDS if one.startswith("nan-trap")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trap", "then"), [*((trap, "raise") for trap in TRAPS), ("nan-trap-params", "skip-step")]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_trap_keeps_the_weights(way: str, trap: str, then: str) -> None:
    model, go = small(), backward(way)
    before = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    own = [{**one, "then": then} for one in rules() if one["id"] == trap]
    with attach(model, *own) as session:
        go(model(data(0, 5, 4) * float("nan")).square().sum())
        if then == "raise":
            with pytest.raises(NonFiniteGradientError) as caught:
                optimizer.step()
            assert caught.value.rule == trap
        else:
            optimizer.step()
            assert kinds_of(session) == ["trap", "skipped-step"]
    assert same(weights_of(model), before)


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.slow
def test_a_gradient_that_is_none_does_not_keep_the_others() -> None:
    torch._dynamo.reset()
    model = Spare()
    optimizer = sgd(model, 0.3)
    rule = {"id": "norms", "action": "norm-log", "params": "*"}
    with attach(model, rule) as session:
        for step in range(2):
            optimizer.zero_grad()
            loss = Nothing.apply(model(data(step, 5, 4)), model.spare.weight).sum()
            with enabled():
                loss.backward()
            optimizer.step()
        assert steps_of(session, "used.weight") == [0, 1]


@pytest.mark.slow
def test_a_pass_that_was_cut_short_is_none() -> None:
    def stop(_grad: Tensor) -> None:
        raise ValueError("stop")

    steps = []
    for way in ["eager", "around backward"]:
        model, go = made(), backward(way)
        rule = {"id": "norms", "action": "norm-log", "params": "*"}
        with attach(model, rule) as session:
            # Backward reaches it last.
            handle = next(model.parameters()).register_hook(stop)
            with pytest.raises(ValueError, match="stop"):
                go(model(data(0, 5, 4)).square().mean())
            handle.remove()
            model.zero_grad()
            go(model(data(1, 5, 4)).square().mean())
            steps.append((session.step, steps_of(session, "2.weight")))
    assert steps == [(1, [0]), (1, [0])]
