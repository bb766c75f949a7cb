"""`torch.compile` and rules on modules and tags: as without it, and nothing is compiled twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from shutil import which
from typing import Any

import pytest
import torch
import torch._dynamo
from models import data
from ranks import Json
from small import hold_rows, rule_file, take_step
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning, RuleStatus

# Tracing what follows a graph break, torch looks at the gradient of its input, and warns about its own
# doing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Importing inductor, torch warns of a function of its own that it calls.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
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
        "eager",
        marks=() if when == "before" and where in WHERE[:2] else pytest.mark.slow,
    )
    for where in WHERE
    for when in WHEN
]
SETUPS.append(pytest.param("the model, before", "aot_eager", marks=pytest.mark.slow))
NO_COMPILER = pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
SETUPS.append(pytest.param("the model, before", "inductor", marks=[pytest.mark.slow, NO_COMPILER]))


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
    """What a training has come to, what its session has seen, and how many graphs there were after each step."""

    params: list[Tensor]
    status: dict[str, RuleStatus]
    norms: dict[tuple[str, str], list[tuple[int, float]]]
    captured: dict[str, dict[tuple[str, int, int], Tensor]]
    compiled: list[Any]


def outcome(
    params: Iterable[Tensor],
    session: gradsurgeon.Session,
    recorded: Mapping[str, Iterable[str]],
    compiled: list[Any],
) -> Outcome:
    """Read a session; ``recorded`` has the names of the tensors that each rule records."""
    norms = {}
    for rule, names in recorded.items():
        for name in names:
            norms[rule, name] = session.history(name, rule=rule)
    status = session.status()
    captured = {rule: session.captured(rule) for rule in status if rule.startswith("capture")}
    return Outcome([one.detach().clone() for one in params], status, norms, captured, compiled)


def hold(found: Outcome, wanted: Outcome) -> None:
    """Compare two trainings; all rules must have acted in them."""
    torch.testing.assert_close(found.params, wanted.params, rtol=1e-5, atol=1e-5)
    assert found.status == wanted.status
    assert all(status.fired for status in wanted.status.values())
    assert found.norms.keys() == wanted.norms.keys()
    for key, rows in wanted.norms.items():
        hold_rows(found.norms[key], rows)
    torch.testing.assert_close(found.captured, wanted.captured, rtol=1e-5, atol=1e-5)


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
        with warnings.catch_warnings(action="ignore", category=GradSurgeonWarning):
            session = gradsurgeon.apply(model, EVERY, mode=mode)
    optimizer = torch.optim.SGD(params, lr=0.3)
    frames = []
    for step in range(STEPS):
        take_step(optimizer, loss(data(step, 5, 4)))
        frames.append(count("unique_graphs"))
    with session:
        recorded = {name(where, "norm-log"): ["gate", "gate.lin"] for where in SIDES}
        recorded |= {name(where, "norm-log"): ["hidden"] for where in TAGS}
        return outcome(params, session, recorded, frames)


@pytest.mark.cell(
    "`torch.compile`, rules first",
    "modules",
    differs="calls of a module with rules leave the graph, and a loop around them, as in `nn.Sequential`, runs uncompiled",
)
@pytest.mark.parametrize(("setup", "backend"), SETUPS)
def test_a_rule_acts_as_without_compilation(setup: str, backend: str) -> None:
    wanted, found = run("not compiled"), run(setup, backend)
    hold(found, wanted)
    assert found.compiled[0] == found.compiled[-1] > 0
    assert not any("limit" in text for text in torch._dynamo.utils.counters["unimplemented"])


def test_the_rules_bite() -> None:
    watched, edited = run("not compiled", acting=False), run("not compiled")
    pairs = zip(watched.params, edited.params, strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-3
