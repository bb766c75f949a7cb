"""Gradients that a script asks for without training on them, and hooks of the script's own.

Rules on parameters act on training alone. Rules on modules act wherever a module runs and torch lets
anybody look; where it does not, the script must work as if they were not there, and it is said.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import data
from pairs import singly
from ranks import Json
from small import attach, equal, fields_of, net, rule_file, sgd
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

import gradsurgeon
from gradsurgeon import GradSurgeonWarning

# torch's own: `torch.autograd.functional` and `torch.func` compile scripts when they are first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Use = Callable[[nn.Module], Tensor]


def energy(model: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    out: Tensor = functional_call(model, params, (x,))
    return out.square().sum()


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


X = data(0, 5, 4)


def asked(model: nn.Module) -> Tensor:
    return torch.autograd.grad(model(X).square().sum(), model.get_parameter("0.weight"))[0]


def asked_with_graph(model: nn.Module) -> Tensor:
    weight = model.get_parameter("0.weight")
    (first,) = torch.autograd.grad(model(X).square().sum(), weight, create_graph=True)
    return torch.autograd.grad(first.square().sum(), weight)[0]


def in_batches(model: nn.Module) -> Tensor:
    weight = model.get_parameter("0.weight")
    ways = torch.eye(10).view(10, 5, 2)
    return torch.autograd.grad(model(X), weight, ways, is_grads_batched=True)[0]


def other_tensors(model: nn.Module) -> Tensor:
    params = {name: param.detach().clone().requires_grad_() for name, param in named(model).items()}
    energy(model, params, X).backward()
    assert params["0.weight"].grad is not None
    return params["0.weight"].grad


def func_grad(model: nn.Module) -> Tensor:
    found: Tensor = grad(lambda params: energy(model, params, X))(named(model))["0.weight"]
    return found.clone()


def per_sample(model: nn.Module) -> Tensor:
    each = vmap(grad(lambda params, x: energy(model, params, x)), in_dims=(None, 0))
    found: Tensor = each(named(model), X)["0.weight"]
    return found.clone()


def jacobian(model: nn.Module) -> Tensor:
    found: Tensor = jacrev(lambda params: functional_call(model, params, (X,)))(named(model))[
        "0.weight"
    ]
    return found.clone()


def hessian(model: nn.Module) -> Tensor:
    def loss(weight: Tensor) -> Tensor:
        return energy(model, {"0.weight": weight}, X)

    found: Tensor = torch.autograd.functional.hessian(
        loss, model.get_parameter("0.weight").detach()
    )
    return found


USES: dict[str, Use] = {
    "autograd.grad": asked,
    "autograd.grad create_graph": asked_with_graph,
    "autograd.grad is_grads_batched": in_batches,
    "functional_call with other tensors": other_tensors,
    "func.grad": func_grad,
    "vmap of func.grad": per_sample,
    "func.jacrev": jacobian,
    "autograd.functional.hessian": hessian,
}
POINTS: dict[str, Json] = {
    "scale, backward": {"action": "scale", "factor": 0.5},
    "clamp, backward": {"action": "clamp", "at": "backward", "min": -0.01, "max": 0.01},
    "clip-norm, step": {"action": "clip-norm", "max_norm": 0.1, "per": "rule"},
    "norm-log, backward": {"action": "norm-log", "at": "backward"},
    "norm-log, accumulated": {"action": "norm-log"},
    "nan-trap": {"action": "nan-trap"},
    "spike-trap": {"action": "spike-trap", "above": {"times": 2}},
}


@pytest.mark.cell(
    "`torch.autograd.grad`, `torch.func`",
    "backward",
    "accumulated",
    "step",
    differs="not training: its results stay untouched, with one notice",
)
@singly(point=POINTS, use=USES)
def test_rules_on_parameters_leave_alone_what_is_not_training(use: str, point: str) -> None:
    wanted = USES[use](net())
    model = net()
    optimizer = sgd(model)
    first = {**POINTS[point], "params": "*", "steps": {"to": 1}}
    with attach(model, first) as session:
        for _ in range(3):
            assert torch.equal(USES[use](model), wanted)
        assert session.status()["r0"].fired == 0
        notices = fields_of(session, "message")
        model.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
        # Nothing of that was an update: the schedule has just begun.
        assert session.step == 1
        assert session.status()["r0"].fired > 0
    if use.startswith("autograd.grad") and point.endswith("backward"):
        assert notices == ["torch.autograd.grad() is not training: its results are left alone"]
    else:
        assert notices == []


MODULES: dict[str, Json] = {
    "scale output.grad": {"action": "scale", "factor": 0.5, "tensor": "output.grad"},
    "clamp output.grad": {"action": "clamp", "min": -0.3, "max": 0.2, "tensor": "output.grad"},
    "scale output": {"action": "scale", "factor": 0.5, "tensor": "output"},
    "norm-log output.grad": {"action": "norm-log", "tensor": "output.grad"},
    "norm-log output": {"action": "norm-log", "tensor": "output"},
    "capture output.grad": {"action": "capture", "tensor": "output.grad"},
    "nan-trap output": {"action": "nan-trap", "tensor": "output"},
    "nan-trap output.grad": {"action": "nan-trap", "tensor": "output.grad"},
}


def by_hand(model: Any, name: str) -> None:
    """The same as a hook of the script's own would be."""
    edits: dict[str, Callable[[Tensor], Tensor]] = {
        "scale output.grad": lambda g: g * 0.5,
        "clamp output.grad": lambda g: g.clamp(-0.3, 0.2),
    }
    if name == "scale output":
        model[0].register_forward_hook(lambda _m, _a, out: out * 0.5)
    elif name in edits:

        def hook(_module: Any, _args: Any, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(edits[name])

        model[0].register_forward_hook(hook)


ACTING = ["autograd.grad", "autograd.grad create_graph", "functional_call with other tensors"]
ACTING += ["autograd.functional.hessian"]


@pytest.mark.cell("`torch.autograd.grad`, `torch.func`", "modules")
@singly(name=MODULES, use=ACTING)
def test_rules_on_modules_act_as_hooks_by_hand(use: str, name: str) -> None:
    plain = net()
    by_hand(plain, name)
    wanted = USES[use](plain)
    model = net()
    with attach(model, {**MODULES[name], "modules": "0"}) as session:
        for _ in range(2):  # what the first call leaves behind must not be in the way of the second
            assert torch.equal(USES[use](model), wanted)
        check_that_training_goes_on(model, session, name)
    assert [event for event in session.events if event.kind != "notice"] == []


def looks_back(use: str, name: str) -> bool:
    """Tell whether the forward pass is one of single tensors, and only the way back is batched."""
    return use == "autograd.grad is_grads_batched" and name.split()[1] == "output"


@pytest.mark.cell(
    "`torch.autograd.grad`, `torch.func`",
    "modules",
    differs="transforms of `torch.func` and their batches stay untouched, with one notice",
)
@singly(
    name=MODULES,
    use=["autograd.grad is_grads_batched", "func.grad", "vmap of func.grad", "func.jacrev"],
)
def test_rules_on_modules_leave_transforms_alone_and_say_so(use: str, name: str) -> None:
    plain = net()
    acts = looks_back(use, name)
    if acts:
        by_hand(plain, name)
    wanted = USES[use](plain)
    model = net()
    with attach(model, {**MODULES[name], "modules": "0"}) as session:
        with nullcontext() if acts else pytest.warns(GradSurgeonWarning, match="r0: left a tensor"):
            assert torch.allclose(USES[use](model), wanted, atol=1e-6)
        assert torch.allclose(USES[use](model), wanted, atol=1e-6)
        said = [event.message for event in session.events if "no numbers" in event.message]
        assert len(said) == (0 if acts else 1)
        check_that_training_goes_on(model, session, name)


def check_that_training_goes_on(model: nn.Module, session: Any, name: str) -> None:
    """Nothing of a transform may outlive it: counters, records and captures are read."""
    fired = session.status()["r0"].fired
    optimizer = sgd(model)
    model.zero_grad()
    model(X).square().sum().backward()
    optimizer.step()
    assert session.step == 1
    assert session.status()["r0"].fired == fired + 1
    if "norm-log" in name:
        assert [value > 0 for _, value in session.history("0")] == [True] * (fired + 1)
    if "capture" in name:
        kept = list(session.captured("r0").values())
        assert [one.abs().sum().item() > 0 for one in kept] == [True] * (fired + 1)


def test_a_module_that_runs_in_transforms_alone_is_said_to() -> None:
    model = net()
    optimizer = sgd(model)
    with (
        attach(model, {**MODULES["scale output"], "modules": "0"}) as session,
        pytest.warns(GradSurgeonWarning) as warned,
    ):
        for _ in range(3):
            optimizer.zero_grad()
            for name, value in grad(lambda p: vmap(lambda x: energy(model, p, x))(X).sum())(
                named(model)
            ).items():
                model.get_parameter(name).grad = value.detach()
            optimizer.step()
    texts = [str(one.message) for one in warned]
    assert any(
        "has not fired yet: no gradient reached" in text or "none with numbers to read" in text
        for text in texts
    )
    assert sum("left a tensor alone" in text for text in texts) == 1
    assert session.step == 3


def test_a_script_that_updates_other_tensors_marks_its_steps() -> None:
    model = net()
    early = {**MODULES["scale output.grad"], "modules": "0", "steps": {"to": 2}}
    with attach(model, early) as session:
        for number in range(4):
            other_tensors(model)
            assert session.step == number
            assert session.tick()
    assert session.status()["r0"].fired == 2
    assert session.events == []


def test_rules_on_parameters_of_a_script_that_never_trains_them() -> None:
    model = net()
    with attach(model, {**POINTS["scale, backward"], "params": "*"}) as session:
        other_tensors(model)
        func_grad(model)
    (event,) = session.events
    assert (event.kind, event.rule) == ("never-fired", "r0")
    assert "no optimizer that owns its parameters stepped" in event.message


# --- second derivatives in training ---------------------------------------------------------------


def penalised(model: nn.Module, number: int) -> Tensor:
    """A critic with a gradient penalty: the gradient of a gradient."""
    x = data(number, 5, 4).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss: Tensor = out.mean() + (slope.norm(dim=1) - 1.0).square().mean()
    return loss


@pytest.mark.parametrize("at", ["backward", "step"])
def test_a_gradient_penalty_with_rules_on_parameters(at: str) -> None:
    plain, model = net(), net()
    penalised(plain, 0).backward()
    wanted = [param.grad.clamp(-0.01, 0.01) for param in plain.parameters()]
    clamp = {"action": "clamp", "at": at, "min": -0.01, "max": 0.01, "params": "*"}
    optimizer = sgd(model, 0.2)
    with attach(model, clamp) as session:
        penalised(model, 0).backward()
        optimizer.step()
        # The inner gradients are those of the input: no parameter is concerned.
        assert session.status()["r0"].fired == 4
    assert equal([param.grad for param in model.parameters()], wanted)


def test_backward_to_some_parameters_runs_the_rules_of_these() -> None:
    model = net()
    optimizer = sgd(model)
    entries = [{**POINTS[name], "params": "*"} for name in POINTS if "norm" not in name]
    log = {"action": "norm-log", "params": "*"}
    with attach(model, log, *entries) as session:
        weight = model[2].weight
        model(X).square().sum().backward(inputs=[weight])
        optimizer.step()
        assert [one.fired for one in session.status().values()] == [1, 1, 1, 1, 1]
        assert session.latest("2.weight") == pytest.approx(weight.grad.norm().item())
        with pytest.raises(gradsurgeon.RecordError, match=r"0\.weight has not been recorded"):
            session.latest("0.weight")
        assert session.step == 1
    assert session.events == []


# --- hooks of the script's own --------------------------------------------------------------------


def test_hooks_on_a_module_run_in_the_order_of_their_coming() -> None:
    model = nn.Sequential(nn.Identity())
    ten = {"action": "scale", "factor": 10.0, "modules": "0"}
    model[0].register_forward_pre_hook(lambda _m, args: (args[0] + 1.0,))
    model[0].register_forward_hook(lambda _m, _a, out: out + 1.0)
    with attach(model, {**ten, "tensor": "input"}, {**ten, "tensor": "output"}):
        model[0].register_forward_pre_hook(lambda _m, args: (args[0] + 2.0,))
        model[0].register_forward_hook(lambda _m, _a, out: out + 2.0)
        assert model(torch.ones(1)).item() == (((1 + 1) * 10 + 2) + 1) * 10 + 2


# --- validation between steps ---------------------------------------------------------------------


@singly(
    mode=[torch.no_grad, torch.inference_mode], name=[*MODULES, "scale input.grad", "scale input"]
)
def test_validation_between_steps_changes_nothing(name: str, mode: Callable[[], Any]) -> None:
    rule = MODULES.get(name) or {"action": "scale", "factor": 0.5, "tensor": name.split()[1]}
    ends = []
    for validates in (False, True):
        model = net()
        optimizer = sgd(model, 0.2)
        wanted = rule_file({**rule, "modules": "2"})
        with gradsurgeon.apply(model, wanted, optimizer=optimizer) as session:
            for number in range(3):
                optimizer.zero_grad()
                model(data(number, 5, 4)).square().mean().backward()
                if validates:
                    with mode():
                        model(data(99, 5, 4))
                optimizer.step()
                if validates:
                    with mode():
                        model(data(99, 5, 4))
            assert session.step == 3
        assert session.events == []
        ends.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(*ends)
