"""What becomes of graphs under `torch.compile`: breaks, one whole graph, code from before and after."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo
from models import data
from pairs import slow
from ranks import Json
from small import attach, kinds_of, rule_file
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning

# As in the tests of rules on modules: torch warns about its own doing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.no_cover,  # which would trace the compiler as well
]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.lin(x.tanh()).sigmoid()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x + self.inner(x))


class Net(nn.Module):
    """Every module is called once, and none in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.outer = Outer()
        self.parts = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 2)])

    def forward(self, x: Tensor) -> Tensor:
        h = gradsurgeon.tag(self.outer(self.first(x).relu()) * 2, "hidden") + 1
        out: Tensor = self.parts[1](self.parts[0](h).relu())
        return out * 3


def on(modules: Any, **options: Any) -> Json:
    return {
        "id": "it", "action": "scale", "factor": 0.5, "modules": modules, "tensor": "output", **options
    }  # fmt: skip


TAGGED = {"id": "tagged", "action": "scale", "factor": 0.0, "tensors": "hidden", "tensor": "value"}
PARAMS = {"id": "params", "action": "clamp", "params": "*", "at": "backward", "max": 0.01}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def broken() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "left"),
    [
        ("first", (1, 0)),
        ("outer", (1, 0)),
        ("outer.inner", (1, 1)),
        ("outer.inner.lin", (1, 2)),
        (["outer.inner.lin", "outer.norm"], (2, 2)),
        (["outer", "outer.inner.lin"], (2, 1)),
        (["parts.0", "parts.1"], (2, 0)),
        (["*"], (8, 0)),
        (".", (0, 0)),
    ],
)
def test_modules_with_rules_and_around_them_leave_the_graph(
    modules: Any, left: tuple[int, int]
) -> None:
    model = Net()
    plan = gradsurgeon.plan(model, rule_file(on(modules)))
    assert "numerics may differ" in plan.warnings[0]
    compiled: Any = torch.compile(model, backend="eager")
    with gradsurgeon.apply(model, plan.rules):
        compiled(data(0, 5, 4))
    # A list of modules matches `*` like any other, but nobody calls it.
    never_called = modules == ["*"]
    assert broken() == sum(left) - never_called


@pytest.mark.slow
def test_a_tag_is_a_graph_break_where_a_rule_is_on_tags() -> None:
    model = Net()
    compiled: Any = torch.compile(model, backend="eager")
    assert (
        "no call of gradsurgeon.tag(), of a module with rules"
        in gradsurgeon.plan(model, rule_file(TAGGED)).warnings[0]
    )
    with attach(model, TAGGED):
        compiled(data(0, 5, 4))
    assert broken() == 1


def test_rules_on_parameters_break_no_graph() -> None:
    model = Net()
    assert gradsurgeon.plan(model, rule_file(PARAMS)).warnings == ()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with attach(model, PARAMS) as session:
        compiled(data(0, 5, 4)).sum().backward()
        assert session.status()["params"].fired == len(list(model.parameters()))
    assert (broken(), graphs()) == (0, 1)


def compile_whole(model: Net, where: str) -> Any:
    if where == "the model":
        return torch.compile(model, backend="eager", fullgraph=True)
    if where == "a submodule":
        model.outer = torch.compile(model.outer, backend="eager", fullgraph=True)  # type: ignore[assignment]
    elif where == "in place":
        model.compile(backend="eager", fullgraph=True)
    elif where == "a submodule in place":
        model.outer.compile(backend="eager", fullgraph=True)
    return model


WHOLE = ["the model", "a submodule", "in place", "a submodule in place"]


@pytest.mark.cell(
    "`torch.compile`, rules first",
    "modules",
    refused="inside `fullgraph=True`: a rule on a module is a graph break",
)
@pytest.mark.parametrize("where", [*WHOLE[1::2], *slow(*WHOLE[::2])])
def test_a_rule_inside_one_whole_graph_is_refused(where: str) -> None:
    model = compile_whole(Net(), where)
    with (
        attach(model, on("outer.inner")) as session,
        pytest.raises(torch._dynamo.exc.Unsupported, match="gradsurgeon acts here"),
    ):
        model(data(0, 5, 4))
    assert session.status()["it"].fired == 0
    # Nothing stays behind: the model can still be called.
    model(data(0, 5, 4)).sum().backward()


@pytest.mark.parametrize("where", ["a submodule", "a submodule in place"])
def test_a_rule_outside_one_whole_graph_is_not(where: str) -> None:
    model = compile_whole(Net(), where)
    with attach(model, on("first")) as session:
        model(data(0, 5, 4)).sum().backward()
        assert session.status()["it"].fired == 1


@pytest.mark.parametrize("rule", [on("outer.norm"), TAGGED], ids=["module", "tag"])
@pytest.mark.parametrize("when", ["after apply", "around the model"])
def test_one_whole_graph_that_is_not_known_yet_is_refused_by_torch(when: str, rule: Json) -> None:
    model = Net()
    with attach(model, rule, PARAMS) as session:
        called = model if when == "after apply" else functools.partial(model)
        whole: Any = torch.compile(called, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="gradsurgeon acts here"):
            whole(data(0, 5, 4))
        session.pause()


def compiled_by(way: str, model: Net) -> Any:
    if way == "in place":
        model.compile(backend="eager")
        return model
    what = functools.partial(model) if way == "the step function" else model
    return torch.compile(what, backend="eager")


WAYS = ["the model", "in place", "the step function", "an earlier session"]


@pytest.mark.cell(
    "`torch.compile`, rules after the first call",
    "modules",
    differs="all compiled code of the process is recompiled, with one warning",
)
@pytest.mark.parametrize("way", slow(*WAYS))
def test_rules_that_come_after_the_first_call_act_and_say_what_it_costs(way: str) -> None:
    model = Net()
    called = compiled_by(way, model)
    earlier = attach(model, PARAMS) if way == "an earlier session" else None
    bare = called(data(0, 5, 4))
    rule = on("parts.1", factor=0.0)
    with pytest.warns(GradSurgeonWarning, match=r"rules on modules \(it\) came after the first"):
        session = attach(model, rule, replace=earlier is not None)
    assert kinds_of(session) == ["notice"]
    with session:
        assert not called(data(0, 5, 4)).any()
    assert torch.equal(called(data(0, 5, 4)), bare)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", [rule_file(PARAMS), rule_file(TAGGED)], ids=["parameters", "tags"]
)
def test_compiled_code_stays_where_guards_see_the_rules(rules: Json) -> None:
    model = Net()
    compiled: Any = torch.compile(model, backend="eager")
    bare = compiled(data(0, 5, 4))
    with gradsurgeon.apply(model, rules) as session:
        compiled(data(0, 5, 4)).sum().backward()
        assert session.status()[rules["rules"][0]["id"]].fired > 0
        # A warning on dropped code would have been an error.
        assert not any("torch.compile" in event.message for event in session.events)
    assert torch.equal(compiled(data(0, 5, 4)), bare)


def test_code_of_another_model_is_dropped_as_well() -> None:
    x, model = data(0, 5, 4), Net()
    other: Any = torch.compile(nn.Linear(4, 2), backend="eager")
    bare = other(x)
    with pytest.warns(GradSurgeonWarning, match="came after the first compiled call"):
        session = attach(model, on("first"))
    assert kinds_of(session) == ["notice"]
    # Dropped code is told of once.
    assert attach(Net(), on("first")).events == []
    assert torch.equal(other(x), bare)
    assert graphs() == 2


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["outer.norm", "*"])
def test_removed_rules_leave_no_graph_break_behind(modules: str) -> None:
    model = Net()
    compiled: Any = torch.compile(model, backend="eager")
    with attach(model, on(modules)) as session:
        compiled(data(0, 5, 4))
        assert broken() > 0
    assert kinds_of(session) == ["notice"]
    torch._dynamo.utils.counters.clear()
    compiled(data(0, 5, 4))
    assert (broken(), graphs()) == (0, 1)


@pytest.mark.slow
def test_who_compiles_nothing_does_not_pay_for_the_compiler() -> None:
    script = """
import sys, torch, gradsurgeon
before = "torch._dynamo" in sys.modules
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
rules = [{"id": "a", "action": "scale", "factor": 0.5, "modules": "0", "tensor": "output.grad"}]
with gradsurgeon.apply(model, {"version": 1, "rules": rules}) as session:
    model(gradsurgeon.tag(torch.ones(1, 2), "x")).sum().backward()
    assert session.status()["a"].fired == 1
print(before, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
