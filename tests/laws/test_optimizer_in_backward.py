"""One optimizer per parameter, stepped as soon as backward has its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import data, same
from ranks import Json
from small import attach, fields_of, fired, net, sgd, weights_of
from torch import Tensor, nn

from gradsurgeon import BindError, Session

STEPS = 10
RULES: list[Json] = [
    {"id": "early", "action": "scale", "params": "0.*", "at": "backward", "factor": 3.0},
    {"id": "half", "action": "scale", "modules": "0", "tensor": "output.grad", "factor": 0.5},
    {"id": "sigmas", "action": "spike-trap", "params": "*", "per": "parameter", "above": {"sigmas": 1.1, "warmup": 4}},
    {"id": "times", "action": "spike-trap", "params": "*", "per": "parameter", "above": {"times": 1.05, "warmup": 4}},
    {"id": "bound", "action": "clamp", "params": "*", "at": "step", "min": -0.01, "max": 0.01},
    {"id": "short", "action": "clip-norm", "per": "parameter", "params": "*", "max_norm": 0.02},
]  # fmt: skip
LOG = {"id": "norms", "action": "norm-log", "params": "*"}
OWN_SPIKES: Json = {
    "action": "spike-trap",
    "params": "*",
    "above": {"times": 2},
    "per": "parameter",
}


def step_inside(model: nn.Module) -> None:
    """Let every parameter step its own optimizer from inside backward."""
    optimizers: dict[Tensor, torch.optim.Optimizer] = {}

    def hook(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        optimizers[param] = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(hook)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    for step in range(STEPS):
        model(data(step, 5, 4)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def inside(order: str, rules: list[Json]) -> tuple[nn.Module, Session]:
    """Return a model whose parameters step inside backward, and its session."""
    model = net()
    if order == "apply last":
        step_inside(model)
    session = attach(model, *rules)
    if order == "apply first":
        step_inside(model)
    return model, session


@pytest.mark.cell(
    "an optimizer per parameter, stepped inside backward",
    "backward",
    "accumulated",
    "step",
    "modules",
)
@pytest.mark.parametrize("order", ["apply first", "apply last"])
def test_what_concerns_one_parameter_acts_as_with_one_optimizer(order: str) -> None:
    wanted = net()
    optimizer = sgd(wanted)
    logs = [LOG, {**LOG, "id": "updates", "tensor": "update"}]
    with attach(wanted, *RULES, *logs) as other:
        trained(wanted, optimizer)
    found, session = inside(order, [*RULES, *logs])
    with session:
        trained(found)
    assert same(weights_of(found), weights_of(wanted))
    # One event tells of the spikes of an update, which here has one parameter.
    assert set(fields_of(session, "kind", "rule")) == {("spike", "sigmas"), ("spike", "times")}
    for rule, status in other.status().items():
        assert session.status()[rule].changed == status.changed
    assert session.step == STEPS
    assert fired(session) == fired(other)
    for name in ("0.weight", "2.bias"):
        for rule in ("norms", "updates"):
            assert session.history(name, rule=rule) == other.history(name, rule=rule)


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
        {**OWN_SPIKES, "then": "skip-step"},
        {**OWN_SPIKES, "then": "warn"},
        {**OWN_SPIKES, "then": "raise"},
    ],
    ids=lambda rule: "-".join(map(str, rule.values())),
)
def test_what_needs_all_gradients_is_refused(order: str, rule: Json) -> None:
    model, session = inside(order, [{"id": "all", **rule}])
    with pytest.raises(BindError, match="rule all: an optimizer steps inside backward") as caught:
        model(data(0, 5, 4)).square().mean().backward()
    assert "at no moment are all gradients there" in str(caught.value)
    assert same(weights_of(model), weights_of(net()))
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
        trained(model)
        assert not any(map(torch.equal, weights_of(net()), model.parameters()))
    told = fields_of(session, "kind", "rule")
    assert told == [("never-fired", rule) for rule in ("norms", "trap")]
    texts = fields_of(session, "message")
    assert all("stepped while their gradients were there" in text for text in texts)


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
