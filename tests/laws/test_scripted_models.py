"""Models that `torch.jit` runs, whole or in part: rules act on their parameters, and say where no hook is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws.traces import trace
from models import data
from ranks import Json
from small import attach, equal
from torch import Tensor, nn

from gradsurgeon import BindError, Diagnosis, NonFiniteGradientError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:FutureWarning"),  # since torch 2.14
]

HALF = 0.5


class Inner(nn.Module):
    """Takes the root of what a norm makes; PyTorch cannot replay a traced BatchNorm."""

    def __init__(self, norm: nn.Module, shift: float = 9.0) -> None:
        super().__init__()
        self.shift = shift
        self.lin = nn.Linear(4, 4)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.sqrt(self.norm(self.lin(x)) + self.shift)
        return out


class Whole(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(self.first(x)))
        return out


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    module.eval()  # the batch that it is traced on moves no statistics
    made = torch.jit.trace(module, torch.zeros(3, 4))
    made.train()
    return made


def inner(**options: Any) -> Inner:
    return Inner(nn.BatchNorm1d(4), **options)


MODELS: dict[str, Callable[[], Any]] = {
    "eager": lambda: Whole(inner()),
    "part scripted": lambda: Whole(scripted(inner())),
    "part traced": lambda: Whole(traced(inner())),
    "all scripted": lambda: scripted(Whole(inner())),
    "all traced": lambda: traced(Whole(inner())),
    "traced in scripted": lambda: scripted(Whole(traced(inner()))),
    # Those whose root is not finite for some inputs.
    "scripted root": lambda: Whole(scripted(inner(shift=1.2))),
    "traced root": lambda: Whole(traced(Inner(nn.Identity()))),
    "all traced root": lambda: traced(Whole(Inner(nn.Identity()))),
    "all scripted root": lambda: scripted(Whole(Inner(nn.Identity()))),
}
every_model = pytest.mark.parametrize("name", [*MODELS][1:6])


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


ON_PARAMS: list[Json] = [
    {"action": "scale", "params": "inner.*", "factor": HALF},
    {"action": "zero", "params": "first.bias"},
    {"action": "norm-log", "params": "*"},
    {"action": "nan-trap", "params": "*", "then": "skip-step"},
]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    edit: Callable[[], None] = lambda: None,
) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, 5, 4)).square().mean().backward()
        edit()
        optimizer.step()


@every_model
def test_training_equals_a_loop_by_hand_and_leaves_nothing(name: str) -> None:
    by_hand = make(name)
    model = make(name)
    params = dict(by_hand.named_parameters())

    def edit() -> None:
        for key, param in params.items():
            if key.startswith("inner."):
                param.grad.mul_(HALF)
        params["first.bias"].grad.zero_()

    train(by_hand, sgd(by_hand), edit)
    optimizer = sgd(model)
    _ = model.forward  # a scripted module keeps it once it was asked for
    before = trace(model)
    with attach(model, *ON_PARAMS, optimizer=optimizer) as session:
        assert trace(model) != before
        train(model, optimizer)
        assert [one.fired for one in session.status().values()] == [12, 3, 24, 3]
    assert equal(model.state_dict().values(), by_hand.state_dict().values())
    assert trace(model) == before


# --- rules on modules ----------------------------------------------------------------------------------

UNSEEN: list[tuple[str, str | list[str], str]] = [
    ("part scripted", "inner", "1 of the matched modules (inner)"),
    ("part scripted", "*", "3 of the matched modules (inner, inner.lin, inner.norm)"),
    ("part traced", ["inner", "inner.lin"], "2 of the matched modules (inner, inner.lin)"),
    ("all scripted", ".", "1 of the matched modules (.)"),
    ("all traced", "last", "1 of the matched modules (last)"),
    ("traced in scripted", "inner", "1 of the matched modules (inner)"),
]


@pytest.mark.parametrize("tensor", ["input", "output", "output.grad"])
@pytest.mark.parametrize(("name", "modules", "named"), UNSEEN)
def test_a_rule_is_refused_where_no_hook_is_called(
    name: str, modules: str | list[str], named: str, tensor: str
) -> None:
    model = make(name)
    before = trace(model)
    with pytest.raises(BindError) as caught:
        attach(model, {"action": "scale", "modules": modules, "tensor": tensor, "factor": HALF})
    text = str(caught.value)
    assert f"torch.jit runs {named}, and calls no hook there: name the module around them" in text
    assert "rules on parameters (`params`) do act there" in text
    assert trace(model) == before


# --- where a NaN was born ------------------------------------------------------------------------------


def diagnosed(name: str) -> Any:
    """Return the diagnosis of a step whose input makes the root of something negative."""
    model = make(name)
    optimizer = sgd(model)
    with attach(model, {"action": "nan-trap", "params": "*"}, optimizer=optimizer):
        x = data(0, 5, 4)
        x[4] *= 1e3
        model(x).square().mean().backward()
        before = [buffer.clone() for buffer in model.buffers()]
        with pytest.raises(NonFiniteGradientError) as caught:
            optimizer.step()
        assert equal(model.buffers(), before)
    assert isinstance(caught.value.diagnosis, Diagnosis)
    return caught.value.diagnosis


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("scripted root", "inner", "RecursiveScriptModule"),
        ("traced root", "inner", "TopLevelTracedModule"),
        ("all traced root", ".", "TopLevelTracedModule"),
    ],
)
def test_a_birth_is_found_in_what_torch_jit_runs(name: str, module: str, kind: str) -> None:
    found = diagnosed(name)
    told = (found.certainty, found.module, found.module_type, found.operation)
    assert told == ("reproduced", module, kind, "aten.sqrt")


def test_nobody_is_blamed_where_torch_jit_runs_the_model() -> None:
    found = diagnosed("all scripted root")
    assert found.certainty == "not reproduced"
    (reason,) = found.reasons
    assert "torch.jit.script runs it" in reason
