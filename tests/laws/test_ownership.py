"""Which optimizer updates what, told by identity; what no optimizer updates is said by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from small import attach, fields_of, linears, rule_file, sgd, steps_of, take_step, tanh_net
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning

NAN = float("nan")
SKIP: Json = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}


def halves() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("a", "b")})


def loss(layer: nn.Module, factor: float = 1.0) -> Tensor:
    out: Tensor = (layer(torch.ones(1, 2)) * factor).sum()
    return out


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("keep", [True, False], ids=["old layer kept", "old layer let go"])
def test_a_trap_follows_the_parameters_that_an_optimizer_is_given_instead(
    named: bool, keep: bool
) -> None:
    model: Any = halves()
    optimizer = sgd(model["a"])
    options: Json = {"optimizer": optimizer} if named else {}
    with attach(model, SKIP, **options) as session:
        loss(model["a"]).backward()
        optimizer.step()
        optimizer.param_groups[0]["params"] = list(model["b"].parameters())
        if not keep:
            model["a"].weight.grad = None
        before = model["b"].weight.detach().clone()
        for _ in range(2):
            take_step(optimizer, loss(model["b"], NAN))
        assert torch.equal(before, model["b"].weight)
        assert session.step == 3
    told = fields_of(session, "kind", "step", "name", kind="trap")
    assert told == [("trap", 1, "b.weight"), ("trap", 2, "b.weight")]


def test_what_an_optimizer_has_let_go_of_stops_no_step_of_it() -> None:
    model: Any = halves()
    optimizer = sgd(model["a"])
    with attach(model, SKIP) as session:
        loss(model["a"], NAN).backward()  # stays on the layer that is let go
        optimizer.param_groups[0]["params"] = list(model["b"].parameters())
        loss(model["b"]).backward()
        before = model["b"].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, model["b"].weight)
        assert session.events == []


def test_freeze_and_schedule_go_with_the_exchange() -> None:
    model: Any = halves()
    optimizer = sgd(model["a"])
    freeze = {"id": "frozen", "action": "freeze", "params": "b.*", "steps": {"to": 2}}
    moved = []
    with gradsurgeon.apply(model, rule_file(freeze, params="*")):
        loss(model["a"]).backward()
        optimizer.step()
        optimizer.param_groups[0]["params"] = list(model["b"].parameters())
        for _ in range(2):
            optimizer.zero_grad()
            before = model["b"].weight.detach().clone()
            loss(model["b"]).backward()
            optimizer.step()
            moved.append(not torch.equal(before, model["b"].weight))
    # The clock of the optimizer goes on: its steps 1 and 2.
    assert moved == [False, True]


def test_what_no_optimizer_updates_is_named_once_for_each_rule_and_in_the_status() -> None:
    model: Any = linears(4, 4, 2)
    optimizer = sgd(model[0])
    bound = {"id": "bound", "action": "clamp", "at": "step", "min": -0.1, "max": 0.1}
    norms = {"id": "norms", "action": "norm-log"}
    with (
        gradsurgeon.apply(
            model, rule_file(SKIP, bound, norms, params="*"), optimizer=optimizer
        ) as session,
        pytest.warns(
            GradSurgeonWarning, match=r"gradients come to 1\.weight, 1\.bias, but no"
        ) as said,
    ):
        for number in range(5):
            model.zero_grad()
            (model(data(number, 3, 4)).square().sum() + model[1].bias[0] * NAN).backward()
            optimizer.step()
    assert [str(one.message).split(":")[0] for one in said] == ["rule trap", "rule bound"]
    status = session.status()
    assert "1.bias" in status["trap"].warnings[0]
    assert "1.bias" in status["bound"].warnings[0]
    assert status["norms"].warnings == ()


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
@pytest.mark.parametrize("params", ["*", "0.*"], ids=["fires elsewhere", "has never fired"])
def test_what_is_unfrozen_later_and_no_optimizer_owns_is_named_once(params: str) -> None:
    model: Any = linears(4, 4, 4, 2)
    model[:2].requires_grad_(False)
    optimizer = sgd(model[2])
    norms = {"id": "norms", "action": "norm-log", "at": "step", "params": params}
    with gradsurgeon.apply(model, rule_file(norms, params="*"), optimizer=optimizer) as session:
        for number in range(20):
            if number in (5, 10):
                model[number == 5].requires_grad_(True)  # the second layer first
            model.zero_grad()
            model(data(number, 3, 4)).square().sum().backward()
            optimizer.step()
    said = [(one.step, one.message) for one in session.events if "gradients come to" in one.message]
    text = (
        "gradients come to {}.weight, {}.bias, but no optimizer that has stepped owns them: give them to one, or "
        "exclude them"
    )
    # One notice per rule is enough.
    assert said == [(8, text.format(1, 1)) if params == "*" else (13, text.format(0, 0))]
    assert said[0][1] in session.status()["norms"].warnings


@pytest.mark.parametrize("when", ["at once", "two steps later"])
def test_what_an_optimizer_takes_over_soon_is_no_news(when: str) -> None:
    model = linears(4, 4, 2)
    model[0].requires_grad_(False)
    optimizer = sgd(model[1])
    with attach(model, SKIP) as session:
        for number in range(12):
            if number == 5:
                model[0].requires_grad_(True)
            if number == (5 if when == "at once" else 7):
                optimizer.add_param_group({"params": list(model[0].parameters())})
            model.zero_grad()
            model(data(number, 3, 4)).square().sum().backward()
            optimizer.step()
    assert session.events == []


def test_optimizers_that_are_made_right_before_their_first_step_miss_no_gradient() -> None:
    # As Pyro makes them: one per parameter, after the first backward pass, after which rules come as well.
    model = linears(4, 3, 2)
    model(data(0, 3, 4)).square().sum().backward()
    norms = {"id": "norms", "action": "norm-log"}
    early = {"id": "early", "action": "norm-log", "at": "backward"}
    held: dict[Tensor, torch.optim.Optimizer] = {}
    for param in model.parameters():
        held[param] = torch.optim.SGD([param], lr=0.1)
        if len(held) == 1:
            session = gradsurgeon.apply(model, rule_file(norms, early, params="*"))
        held[param].step()
    for number in range(1, 4):
        model.zero_grad()
        model(data(number, 3, 4)).square().sum().backward()
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
            model(data(number, 3, 4)).square().sum().backward()
            often.step()
            if number % 5 == 4:
                seldom.step()
                model.zero_grad()
    assert session.events == []


def test_a_later_hook_that_exchanges_the_arguments_ends_no_step() -> None:
    model: Any = halves()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    freeze = {"id": "frozen", "action": "freeze", "params": "a.*"}
    with gradsurgeon.apply(model, rule_file(freeze, params="*"), optimizer=optimizer) as session:
        optimizer.register_step_pre_hook(lambda _, args, kwargs: ((*args,), {**kwargs}))
        before = model["a"].weight.detach().clone()
        for _ in range(3):
            take_step(optimizer, loss(model["a"]) + loss(model["b"]))
            assert model["a"].weight.grad is not None
        assert torch.equal(before, model["a"].weight)
        assert session.step == 3
        assert session.status()["frozen"].fired == 3


def small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = tanh_net(4, 8, 2)
    return model, sgd(model, 0.05)


@pytest.mark.parametrize("who", ["another session", "a hook of the script"])
def test_a_step_that_raised_hides_no_later_one(who: str) -> None:
    """The frame of the next call is likely to get the address of the last one."""
    fail = False

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if fail:
                raise RuntimeError("once")
            return super().step(closure)

    torch.manual_seed(0)
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = Failing([*first.parameters(), *second.parameters()], lr=0.05)
    parts = [first, second] if who == "another session" else [first]
    sessions = [attach(part, SKIP, optimizer=optimizer) for part in parts]
    if who == "a hook of the script":
        optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, dict(kwargs)))
    for number in range(12):
        fail = number % 4 == 1
        optimizer.zero_grad()
        x = data(number, 5, 4)
        scale = NAN if number % 4 == 2 else 1.0
        ((first(x) + second(x)).square().mean() * scale).backward()
        try:
            optimizer.step()
        except RuntimeError:
            assert fail
    assert first.weight.isfinite().all()
    # The one that trips hides all gradients of the step, so that another one finds none.
    assert fields_of(sessions[0], "step", kind="trap") == [2, 6, 10]
    for session in sessions:
        assert session.step == 12
        session.remove()


def test_an_optimizer_around_another_one_edits_once() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model: Any = nn.Linear(2, 1, bias=False)
    optimizer = Lookahead(sgd(model, 1.0))
    half = {"id": "half", "action": "scale", "factor": 0.5, "at": "step"}
    with gradsurgeon.apply(model, rule_file(half, params="*")) as session:
        for _ in range(3):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert torch.allclose(before - model.weight.detach(), torch.tensor(0.5))
        assert session.step == session.status()["half"].fired == 3


def test_a_row_of_zeros_is_no_gradient_that_was_updated_from_twice() -> None:
    model = nn.Embedding(4, 3)
    optimizer = sgd(model)
    edits: list[Json] = [
        {"id": "zero", "action": "zero", "at": "step"},
        {"id": "bound", "action": "clamp", "at": "step", "min": 0},
        {"id": "half", "action": "scale", "at": "step", "factor": 0.5},
    ]
    for edit in edits:
        with gradsurgeon.apply(model, rule_file(edit, params="*")) as session:
            for index in (0, 1, 2, 3):
                take_step(optimizer, model(torch.tensor([index])).sum())
            assert session.events == []
