"""Which optimizer updates what, told by identity; what no optimizer updates is said by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from small import attach, equal, fields_of, linears, sgd, steps_of, take_step, weights_of
from torch import Tensor, nn

from gradsurgeon import GradSurgeonWarning

NAN = float("nan")
SKIP: Json = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
NORMS: Json = {"id": "norms", "action": "norm-log", "params": "*"}


def halves() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("a", "b")})


def loss(layer: nn.Module, factor: float = 1.0) -> Tensor:
    out: Tensor = (layer(torch.ones(1, 2)) * factor).sum()
    return out


def exchange(optimizer: torch.optim.Optimizer, layer: nn.Module) -> None:
    """Give an optimizer other parameters in place of those it has."""
    optimizer.param_groups[0]["params"] = list(layer.parameters())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("keep", [True, False], ids=["old layer kept", "old layer let go"])
def test_a_trap_follows_the_parameters_that_an_optimizer_is_given_instead(
    named: bool, keep: bool
) -> None:
    model: Any = halves()
    optimizer = sgd(model["a"])
    with attach(model, SKIP, optimizer=optimizer if named else None) as session:
        take_step(optimizer, loss(model["a"]))
        exchange(optimizer, model["b"])
        if not keep:
            model["a"].weight.grad = None
        before = weights_of(model["b"])
        for _ in range(2):
            take_step(optimizer, loss(model["b"], NAN))
        assert equal(before, model["b"].parameters())
        assert session.step == 3
    told = fields_of(session, "step", "name", kind="trap")
    assert told == [(1, "b.weight"), (2, "b.weight")]


def test_what_an_optimizer_has_let_go_of_stops_no_step_of_it() -> None:
    model: Any = halves()
    optimizer = sgd(model["a"])
    with attach(model, SKIP) as session:
        loss(model["a"], NAN).backward()  # stays on the layer that is let go
        exchange(optimizer, model["b"])
        before = weights_of(model["b"])
        take_step(optimizer, loss(model["b"]))
        assert not equal(before, model["b"].parameters())
        assert session.events == []


def test_what_no_optimizer_updates_is_named_once_for_each_rule_and_in_the_status() -> None:
    model: Any = linears(4, 4, 2)
    optimizer = sgd(model[0])
    bound = {"id": "bound", "action": "clamp", "params": "*", "at": "step", "min": -0.1, "max": 0.1}
    with (
        attach(model, SKIP, bound, NORMS, optimizer=optimizer) as session,
        pytest.warns(
            GradSurgeonWarning, match=r"gradients come to 1\.weight, 1\.bias, but no"
        ) as said,
    ):
        for number in range(5):
            model.zero_grad()
            (squares(model, number) + model[1].bias[0] * NAN).backward()
            optimizer.step()
    assert [str(one.message).split(":")[0] for one in said] == ["rule trap", "rule bound"]
    status = session.status()
    assert "1.bias" in status["trap"].warnings[0]
    assert "1.bias" in status["bound"].warnings[0]
    assert status["norms"].warnings == ()


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@pytest.mark.parametrize(
    ("params", "layer", "step"),
    [("*", 1, 8), ("0.*", 0, 13)],
    ids=["fires elsewhere", "has never fired"],
)
def test_what_is_unfrozen_later_and_no_optimizer_owns_is_named_once(
    params: str, layer: int, step: int
) -> None:
    model: Any = linears(4, 4, 4, 2)
    model[:2].requires_grad_(False)
    optimizer = sgd(model[2])
    norms = {**NORMS, "at": "step", "params": params}
    with attach(model, norms, optimizer=optimizer) as session:
        for number in range(20):
            if number in (5, 10):
                model[number == 5].requires_grad_(True)  # the second layer first
            model.zero_grad()
            squares(model, number).backward()
            optimizer.step()
    said = [(one.step, one.message) for one in session.events if "gradients come to" in one.message]
    text = (
        f"gradients come to {layer}.weight, {layer}.bias, but no optimizer that has stepped owns them: give them to one, or "
        "exclude them"
    )
    # One notice per rule is enough.
    assert said == [(step, text)]
    assert text in session.status()["norms"].warnings


@pytest.mark.parametrize("later", [0, 2])
def test_what_an_optimizer_takes_over_soon_is_no_news(later: int) -> None:
    model = linears(4, 4, 2)
    model[0].requires_grad_(False)
    optimizer = sgd(model[1])
    with attach(model, SKIP) as session:
        for number in range(12):
            if number == 5:
                model[0].requires_grad_(True)
            if number == 5 + later:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            model.zero_grad()
            squares(model, number).backward()
            optimizer.step()
    assert session.events == []


def test_optimizers_that_are_made_right_before_their_first_step_miss_no_gradient() -> None:
    # As Pyro makes them: one per parameter, after the first backward pass, after which rules come as well.
    model = linears(4, 3, 2)
    squares(model, 0).backward()
    early = {**NORMS, "id": "early", "at": "backward"}
    held: dict[Tensor, torch.optim.Optimizer] = {}
    for param in model.parameters():
        held[param] = torch.optim.SGD([param], lr=0.1)
        if len(held) == 1:
            session = attach(model, NORMS, early)
        held[param].step()
    for number in range(1, 4):
        model.zero_grad()
        squares(model, number).backward()
        for optimizer in held.values():
            optimizer.step()
    session.remove()
    assert session.events == []
    for name, _ in model.named_parameters():
        assert steps_of(session, name, rule="norms") == [0, 1, 2, 3]
        assert steps_of(session, name, rule="early") == [1, 2, 3]


@pytest.mark.parametrize("made", [0, 1], ids=["before training", "after the first update"])
def test_an_optimizer_that_steps_now_and_then_is_no_news(made: int) -> None:
    model = linears(4, 4, 2)
    often = sgd(model[0])
    with attach(model, SKIP) as session:
        for number in range(10):
            if number == made:
                seldom = sgd(model[1])
            squares(model, number).backward()
            often.step()
            if number % 5 == 4:
                seldom.step()
                model.zero_grad()
    assert session.events == []


def squares(model: nn.Module, number: int) -> Tensor:
    out: Tensor = model(data(number, 3, 4)).square().sum()
    return out


@pytest.mark.parametrize("who", ["another session", "a hook of the script"])
def test_a_step_that_raised_hides_no_later_one(who: str) -> None:
    """The frame of the next call is likely to get the address of the last one."""

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("once")
            return super().step(closure)

    parts = [nn.Linear(4, 2), nn.Linear(4, 2)]
    optimizer = Failing([param for part in parts for param in part.parameters()], lr=0.05)
    ruled = parts if who == "another session" else parts[:1]
    sessions = [attach(part, SKIP, optimizer=optimizer) for part in ruled]
    if who == "a hook of the script":
        optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, dict(kwargs)))
    for number in range(12):
        optimizer.fails = number % 4 == 1
        loss = sum(squares(part, number) for part in parts)
        with pytest.raises(RuntimeError, match="once") if optimizer.fails else nullcontext():
            take_step(optimizer, loss * (NAN if number % 4 == 2 else 1.0))
    assert parts[0].weight.isfinite().all()
    # The one that trips hides all gradients of the step, so that another one finds none.
    assert fields_of(sessions[0], "step", kind="trap") == [2, 6, 10]
    for session in sessions:
        assert session.step == 12
        session.remove()


@pytest.mark.parametrize(
    "edit",
    [{"action": "zero"}, {"action": "clamp", "min": 0}, {"action": "scale", "factor": 0.5}],
)
def test_a_row_of_zeros_is_no_gradient_that_was_updated_from_twice(edit: Json) -> None:
    model = nn.Embedding(4, 3)
    optimizer = sgd(model)
    with attach(model, {**edit, "params": "*", "at": "step"}) as session:
        for index in (0, 1, 2, 3):
            take_step(optimizer, model(torch.tensor([index])).sum())
        assert session.events == []
