"""`torch.compile` and rules on modules and tags: as without it, and nothing is compiled twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from shutil import which
from typing import Any

import pytest
import torch
import torch._dynamo
from models import data, same
from ranks import Json
from small import attach, hold_rows, rule_file, sgd, take_step, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning, NonFiniteGradientError, RuleStatus

# Tracing what follows a graph break, torch looks at the gradient of its input, and warns about its own
# doing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.no_cover,  # which would trace the compiler as well
]

STEPS = 4
SIDES = ["output.grad", "input.grad", "output", "input"]
TAGS = ["tag.value", "tag.grad"]
SITES = [*SIDES, *TAGS]
ACTIONS = ["clamp", "norm-log", "capture", "nan-trap"]
# In the order in which tensors and gradients come along each is tighter than the one before it.
BOUNDS = {"input": 0.8, "output": 0.7, "tag.value": 0.6}
BOUNDS |= {"tag.grad": 1e-3, "output.grad": 4e-4, "input.grad": 1e-4}
WHERE = ["the model", "a submodule", "in place", "a submodule in place", "the step function"]
WHEN = ["before", "after", "after the first call"]
SETUPS = [
    pytest.param(
        f"{where}, {when}",
        marks=() if when == "before" and where in WHERE[:2] else pytest.mark.slow,
    )
    for where in WHERE
    for when in WHEN
]


class Gate(nn.Module):
    """A module of the user's own around one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return x + self.lin(x.tanh()).sigmoid()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.gate = Gate()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        h = gradsurgeon.tag(self.gate(self.first(x)), "hidden")
        return self.last(h.relu())


def site(where: str) -> Json:
    if where in TAGS:
        return {"tensors": "hidden", "tensor": where.removeprefix("tag.")}
    return {"modules": ["gate", "gate.lin"], "tensor": where}


def rule(where: str, action: str, **options: Any) -> Json:
    bounds = {"min": -BOUNDS[where], "max": BOUNDS[where]} if action == "clamp" else {}
    return {"id": name(where, action), "action": action, **site(where), **bounds, **options}


def name(where: str, action: str) -> str:
    return f"{action}-{where.replace('.', '-')}"


EVERY = rule_file(*(rule(where, action) for where in SITES for action in ACTIONS))


@dataclass
class Outcome:
    params: list[Tensor]
    status: dict[str, RuleStatus]
    norms: dict[str, dict[str, list[tuple[int, float]]]]
    captured: dict[str, dict[tuple[str, int, int], Tensor]]
    compiled: list[int]
    limits: int


def wrapped(model: Net, where: str, backend: Any) -> Callable[[Tensor], Tensor]:
    """Return what computes the loss."""

    def loss(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out.square().mean()

    if where == "the model":
        compiled: Any = torch.compile(model, backend=backend)
        return lambda x: compiled(x).square().mean()
    if where == "a submodule":
        model.gate = torch.compile(model.gate, backend=backend)  # type: ignore[assignment]
    elif where == "in place":
        model.compile(backend=backend)
    elif where == "a submodule in place":
        model.gate.compile(backend=backend)
    elif where == "the step function":
        return torch.compile(loss, backend=backend)
    return loss


def count(what: str) -> int:
    return int(torch._dynamo.utils.counters["stats"][what])


def first_call(loss: Callable[[Tensor], Tensor], params: list[nn.Parameter]) -> None:
    loss(data(99, 5, 4)).backward()
    for param in params:
        param.grad = None


@cache
def run(setup: str, backend: str = "eager", *, acting: bool = True) -> Outcome:
    where, _, when = setup.partition(", ")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Net()
    params = list(model.parameters())
    mode: Any = "act" if acting else "observe"
    session = gradsurgeon.apply(model, EVERY, mode=mode) if when == "before" else None
    loss = wrapped(model, where, backend)
    if when == "after the first call":
        first_call(loss, params)
    if session is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradSurgeonWarning)
            session = gradsurgeon.apply(model, EVERY, mode=mode)
    optimizer = torch.optim.SGD(params, lr=0.3)
    frames = []
    for step in range(STEPS):
        take_step(optimizer, loss(data(step, 5, 4)))
        frames.append(count("unique_graphs"))
    with session:
        names = {where: ["hidden"] if where in TAGS else ["gate", "gate.lin"] for where in SITES}
        return Outcome(
            [param.detach().clone() for param in params],
            session.status(),
            {w: {n: session.history(n, rule=name(w, "norm-log")) for n in names[w]} for w in SITES},
            {w: session.captured(name(w, "capture")) for w in SITES},
            frames,
            sum("limit" in text for text in torch._dynamo.utils.counters["unimplemented"]),
        )


@pytest.mark.cell(
    "`torch.compile`, rules first",
    "modules",
    differs="calls of a module with rules leave the graph, and a loop around them, as in `nn.Sequential`, runs uncompiled",
)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("where", SITES)
@pytest.mark.parametrize("setup", SETUPS)
def test_a_rule_acts_as_without_compilation(setup: str, where: str, action: str) -> None:
    wanted, found = run("not compiled"), run(setup)
    wanted_status = wanted.status[name(where, action)]
    status = found.status[name(where, action)]
    assert status.fired == wanted_status.fired > 0
    assert status.last_step == STEPS - 1
    if action == "norm-log":
        for key, rows in wanted.norms[where].items():
            hold_rows(found.norms[where][key], rows)
    if action == "capture":
        assert found.captured[where].keys() == wanted.captured[where].keys()
        for place, tensor in wanted.captured[where].items():
            assert torch.allclose(found.captured[where][place], tensor, atol=1e-5)


@pytest.mark.parametrize("setup", SETUPS)
def test_training_ends_where_it_does_without_compilation(setup: str) -> None:
    torch.testing.assert_close(run(setup).params, run("not compiled").params, rtol=1e-5, atol=1e-06)


def test_the_rules_bite() -> None:
    watched, edited = run("not compiled", acting=False), run("not compiled")
    pairs = zip(watched.params, edited.params, strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-3


@pytest.mark.parametrize("setup", SETUPS)
def test_nothing_is_compiled_from_step_to_step(setup: str) -> None:
    found = run(setup)
    assert found.compiled[0] == found.compiled[-1] > 0
    assert found.limits == 0


# The first tensor that is not finite, in the order in which they come.
FIRST = {"input": "gate", "output": "gate.lin", "tag.value": "hidden"}
FIRST |= {"tag.grad": "hidden", "output.grad": "gate", "input.grad": "gate.lin"}


@pytest.mark.slow
@pytest.mark.parametrize("where", SITES)
@pytest.mark.parametrize("place", WHERE)
def test_a_trap_stops_the_update(place: str, where: str) -> None:
    torch._dynamo.reset()
    model = Net()
    before = weights_of(model)
    optimizer = sgd(model, 0.3)
    with attach(model, rule(where, "nan-trap")):
        wrapped(model, place, "eager")(data(0, 5, 4) * float("nan")).backward()
        with pytest.raises(NonFiniteGradientError) as caught:
            optimizer.step()
    assert (caught.value.rule, caught.value.name) == (name(where, "nan-trap"), FIRST[where])
    assert same(weights_of(model), before)


@pytest.mark.slow
def test_another_backend() -> None:
    wanted, found = run("not compiled"), run("the model, before", "aot_eager")
    torch.testing.assert_close(found.params, wanted.params, rtol=1e-5, atol=1e-05)
    fired = {rule: status.fired for rule, status in wanted.status.items()}
    assert {rule: status.fired for rule, status in found.status.items()} == fired
    assert found.compiled[0] == found.compiled[-1] > 0
    assert found.limits == 0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).relu())


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
# Importing inductor, torch warns of a function of its own that it calls.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_inductor() -> None:
    def train(*, compiled: bool) -> tuple[list[Tensor], RuleStatus]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Two()
        rules = rule_file(
            {"id": "it", "action": "scale", "factor": 0.5, "modules": "a", "tensor": "output.grad"}
        )
        called: Any = torch.compile(model) if compiled else model
        with gradsurgeon.apply(model, rules) as session:
            for step in range(3):
                called(data(step, 5, 4)).sum().backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            return grads, session.status()["it"]

    wanted, found = train(compiled=False), train(compiled=True)
    assert found[1] == wanted[1]
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-05)
