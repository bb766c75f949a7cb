"""One optimizer per parameter, stepped as soon as backward has its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import data, same
from ranks import Json
from small import attach, fired, net, rule_file, sgd, take_step, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import BindError, Session

STEPS = 3
RULES: list[Json] = [
    {"id": "early", "action": "scale", "params": "0.*", "at": "backward", "factor": 3.0},
    {
        "id": "half",
        "action": "scale",
        "modules": "0",
        "tensor": "output.grad",
        "factor": 0.5,
    },
    {"id": "bound", "action": "clamp", "params": "*", "at": "step", "min": -0.01, "max": 0.01},
    {"id": "short", "action": "clip-norm", "params": "*", "max_norm": 0.02},
]
AGAINST_ITSELF = {"per": "parameter"}
LOG = {"id": "norms", "action": "norm-log", "params": "*"}


def step_inside(model: nn.Module) -> None:
    """Let every parameter step its own optimizer from inside backward."""
    optimizers: dict[Tensor, torch.optim.Optimizer] = {}

    def hook(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        optimizers[param] = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(hook)


def inside(order: str, rules: list[Json]) -> tuple[list[Tensor], Session]:
    model = net()
    given = rule_file(*rules)
    if order == "apply first":
        session = gradsurgeon.apply(model, given)
    step_inside(model)
    if order == "apply last":
        session = gradsurgeon.apply(model, given)
    with session:
        for step in range(STEPS):
            model(data(step, 5, 4)).square().mean().backward()
    return [param.detach() for param in model.parameters()], session


def outside(rules: list[Json]) -> tuple[list[Tensor], Session]:
    model = net()
    optimizer = sgd(model)
    with attach(model, *rules) as session:
        for step in range(STEPS):
            take_step(optimizer, model(data(step, 5, 4)).square().mean())
    return [param.detach() for param in model.parameters()], session


@pytest.mark.cell(
    "an optimizer per parameter, stepped inside backward",
    "backward",
    "accumulated",
    "step",
    "modules",
)
@pytest.mark.parametrize("order", ["apply first", "apply last"])
def test_what_concerns_one_parameter_acts_as_with_one_optimizer(order: str) -> None:
    wanted, other = outside([*RULES, LOG])
    found, session = inside(order, [*RULES, LOG])
    assert same(found, wanted)
    assert session.events == []
    assert session.step == STEPS
    assert fired(session) == fired(other)
    for name in ("0.weight", "2.bias"):
        assert session.history(name) == other.history(name)


@pytest.mark.cell(
    "an optimizer per parameter, stepped inside backward",
    "step",
    refused="`nan-trap`, `freeze`, `per: rule` and a `spike-trap` that does not clip need all gradients at once: "
    "step after backward",
)
@pytest.mark.parametrize("order", ["apply first", "apply last"])
@pytest.mark.parametrize(
    "rule",
    [
        {"action": "nan-trap", "params": "*"},
        {"action": "nan-trap", "modules": "0", "tensor": "output"},
        {"action": "freeze", "params": "*"},
        {"action": "clip-norm", "params": "*", "max_norm": 1.0, "per": "rule"},
        {"action": "spike-trap", "params": "*", "above": {"times": 2}},
        *(
            {
                "action": "spike-trap",
                "params": "*",
                "above": {"times": 2},
                **AGAINST_ITSELF,
                "then": then,
            }
            for then in ("skip-step", "warn", "raise")
        ),
    ],
    ids=[
        "nan-trap",
        "nan-trap on modules",
        "freeze",
        "clip-norm per rule",
        "spike-trap per rule",
        "spike-trap, skip-step",
        "spike-trap, warn",
        "spike-trap, raise",
    ],
)
def test_what_needs_all_gradients_is_refused(order: str, rule: Json) -> None:
    before = weights_of(net())
    model = net()
    given = rule_file({"id": "all", **rule})
    if order == "apply first":
        session = gradsurgeon.apply(model, given)
    step_inside(model)
    if order == "apply last":
        session = gradsurgeon.apply(model, given)
    with pytest.raises(BindError, match="rule all: an optimizer steps inside backward") as caught:
        model(data(0, 5, 4)).square().mean().backward()
    assert "at no moment are all gradients there" in str(caught.value)
    assert same(weights_of(model), before)
    session.remove()


class Fused(torch.optim.Optimizer):
    """Updates each parameter in a hook of its own and drops the gradient, as LOMO does; nobody calls `step`."""

    def __init__(self, params: Any, lr: float, *, early: bool) -> None:
        super().__init__(params, {"lr": lr})
        for param in self.param_groups[0]["params"]:
            if early:
                param.register_hook(lambda grad, param=param: self.update(param, grad))
            param.register_post_accumulate_grad_hook(self.late if not early else self.drop)

    def update(self, param: Tensor, grad: Tensor) -> None:
        param.data.add_(grad, alpha=-self.defaults["lr"])

    def late(self, param: Tensor) -> None:
        assert param.grad is not None
        self.update(param, param.grad)
        param.grad = None

    def drop(self, param: Tensor) -> None:
        param.grad = None

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("early", [False, True], ids=["after accumulation", "before"])
@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
def test_rules_say_that_they_never_saw_updates_inside_backward_without_step(early: bool) -> None:
    model = net()
    optimizer = Fused(model.parameters(), lr=0.1, early=early)
    rules = [LOG, {"id": "trap", "action": "nan-trap", "params": "2.*"}]
    with attach(model, *rules, optimizer=optimizer) as session:
        before = weights_of(model)
        for step in range(3):
            model(data(step, 5, 4)).square().mean().backward()
        assert not any(map(torch.equal, before, model.parameters()))
    told = {(one.kind, one.rule): one.message for one in session.events}
    assert list(told) == [("never-fired", rule) for rule in ("norms", "trap")]
    assert all("stepped while their gradients were there" in text for text in told.values())


def test_hooks_that_put_gradients_aside_until_the_update_are_not_blamed() -> None:
    model = net()
    kept: dict[Tensor, Tensor | None] = {}

    def aside(param: Tensor) -> None:
        kept[param] = param.grad
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(aside)
    optimizer = sgd(model)
    final = {"id": "final", "action": "norm-log", "params": "*", "at": "step"}
    with attach(model, final) as session:
        for step in range(8):
            model(data(step, 5, 4)).square().mean().backward()
            for held, grad in kept.items():
                held.grad = grad
            optimizer.step()
            optimizer.zero_grad()
    assert session.events == []
    assert session.status()["final"].fired == 4 * 8
