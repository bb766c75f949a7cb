"""What the plan says of modules that are called in a loop, beside what torch then compiles."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo
from laws.test_compiled_graphs import Inner, broken, graphs, on
from models import data
from small import rule_file
from torch import Tensor, nn

import gradsurgeon

# As in the tests of rules on modules: torch warns about its own doing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Importing inductor, torch warns of its own function.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


def forget() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Loop(nn.Module):
    """Calls its layers in a loop, with something to compile before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        for layer in self.layers:
            x = layer(x)
        return x.cos()


class Body(nn.Module):
    """Calls something that loops."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(x.relu()).exp()


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), Inner())


def operations_in_graphs(model: nn.Module) -> set[str]:
    found: set[str] = set()

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                found.add(getattr(node.target, "__name__", str(node.target)))
        return module.forward

    compiled: Any = torch.compile(model, backend=backend)
    compiled(data(0, 5, 6))
    return found


slow_case = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("make", "modules", "left", "counted", "lost"),
    [
        (Loop, "layers.1", (1, 0), 0, {"sin", "cos"}),
        slow_case(Loop, "layers.*", (4, 0), 2, {"sin", "cos"}),
        slow_case(lambda: Body(Loop()), "body.layers.1", (1, 1), 1, {"sin", "cos"}),
        (sequence, "0", (1, 0), 1, {"gelu"}),
        slow_case(lambda: Body(sequence()), "body.0", (1, 1), 1, {"gelu"}),
        slow_case(lambda: Body(sequence()), "body.2.lin", (1, 2), 2, {"gelu", "linear"}),
    ],
    ids=["loop", "all in a loop", "inner loop", "Sequential", "inner Sequential", "deeper"],
)
def test_what_the_plan_says_of_loops(
    make: Any, modules: str, left: tuple[int, int], counted: int, lost: set[str]
) -> None:
    forget()
    model = make()
    whole = operations_in_graphs(model)
    assert lost < whole
    assert (broken(), graphs()) == (0, 1)
    forget()
    compiled: Any = torch.compile(model)
    plan = gradsurgeon.plan(compiled, rule_file(on(modules)))
    (said,) = plan.warnings
    assert "numerics may differ" in said
    assert "break" not in said
    with gradsurgeon.apply(model, plan.rules) as session:
        found = operations_in_graphs(model)
        assert session.status()["it"].fired > 0
    # The breaks that torch counts can be fewer, where it gives up a loop.
    assert broken() == counted <= sum(left)
    # What stands beyond the loop and the code around it is compiled as before.
    assert found == whole - lost
