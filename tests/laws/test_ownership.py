"""Which optimizer updates what, told by identity; what no optimizer updates is said by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import data
from torch import nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning

NAN = float("nan")
SKIP: dict[str, Any] = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}


def rules(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "rules": [{"params": "*", **entry} for entry in entries]}


def halves() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("a", "b")})


def loss(layer: nn.Module, factor: float = 1.0) -> torch.Tensor:
    out: torch.Tensor = (layer(torch.ones(1, 2)) * factor).sum()
    return out


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("keep", [True, False], ids=["old layer kept", "old layer let go"])
def test_a_trap_follows_the_parameters_that_an_optimizer_is_given_instead(
    named: bool, keep: bool
) -> None:
    model: Any = halves()
    optimizer = torch.optim.SGD(model["a"].parameters(), 0.1)
    options: dict[str, Any] = {"optimizer": optimizer} if named else {}
    with gradsurgeon.apply(model, rules(SKIP), **options) as session:
        loss(model["a"]).backward()
        optimizer.step()
        optimizer.param_groups[0]["params"] = list(model["b"].parameters())
        if not keep:
            model["a"].weight.grad = None
        before = model["b"].weight.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            loss(model["b"], NAN).backward()
            optimizer.step()
        assert torch.equal(before, model["b"].weight)
        assert session.step == 3
    told = [(e.kind, e.step, e.name) for e in session.events if e.kind == "trap"]
    assert told == [("trap", 1, "b.weight"), ("trap", 2, "b.weight")]


def test_what_an_optimizer_has_let_go_of_stops_no_step_of_it() -> None:
    model: Any = halves()
    optimizer = torch.optim.SGD(model["a"].parameters(), 0.1)
    with gradsurgeon.apply(model, rules(SKIP)) as session:
        loss(model["a"], NAN).backward()  # stays on the layer that is let go
        optimizer.param_groups[0]["params"] = list(model["b"].parameters())
        loss(model["b"]).backward()
        before = model["b"].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, model["b"].weight)
        assert session.events == []


def test_freeze_and_schedule_go_with_the_exchange() -> None:
    model: Any = halves()
    optimizer = torch.optim.SGD(model["a"].parameters(), 0.1)
    freeze = {"id": "frozen", "action": "freeze", "params": "b.*", "steps": {"to": 2}}
    moved = []
    with gradsurgeon.apply(model, rules(freeze)):
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
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    bound = {"id": "bound", "action": "clamp", "at": "step", "min": -0.1, "max": 0.1}
    norms = {"id": "norms", "action": "norm-log"}
    with (
        gradsurgeon.apply(model, rules(SKIP, bound, norms), optimizer=optimizer) as session,
        pytest.warns(
            GradSurgeonWarning, match=r"gradients come to 1\.weight, 1\.bias, which"
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


def test_an_optimizer_that_steps_now_and_then_is_no_news() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    often, seldom = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    with gradsurgeon.apply(model, rules(SKIP)) as session:
        for number in range(10):
            model(data(number, 3, 4)).square().sum().backward()
            often.step()
            if number % 5 == 4:
                seldom.step()
                model.zero_grad()
    assert session.events == []


def test_a_skip_leaves_what_the_optimizer_counts_for_itself() -> None:
    class Averaging(torch.optim.Optimizer):
        """Counts per group, on itself and under a name in the state, as schedule-free ones do."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"k": 0, "weight": torch.zeros(()), "best": None})
            self.calls = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.calls += 1
            state: Any = self.state
            state["total"]["n"] = state["total"].get("n", 0) + 1
            state["seen"] = state.get("seen", 0) + 1
            for group in self.param_groups:
                group["k"] += 1
                group["weight"] += 0.5
                group["best"] = group["k"]
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(param.grad / group["k"])

    def train(*, planted: bool) -> tuple[torch.Tensor, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = Averaging(model.parameters())
        weight = optimizer.param_groups[0]["weight"]
        with gradsurgeon.apply(model, rules(SKIP)):
            for number in range(5):
                if number == 2 and not planted:
                    continue
                optimizer.zero_grad()
                scale = NAN if number == 2 else 1.0
                (model(data(number, 8, 4)).square().mean() * scale).backward()
                optimizer.step()
        assert optimizer.param_groups[0]["weight"] is weight
        group = {key: optimizer.param_groups[0][key] for key in ("k", "best")}
        state: Any = optimizer.state
        counts = (optimizer.calls, state["seen"], float(weight), group)
        return model.weight.detach().clone(), counts

    (weight, counts), (skipped, counted) = train(planted=False), train(planted=True)
    assert counted == counts == (4, 4, 2.0, {"k": 4, "best": 4})
    assert torch.equal(weight, skipped)


@pytest.mark.parametrize("where", ["update", "later hook"])
@pytest.mark.parametrize("held", [True, False], ids=["traceback held", "let go"])
def test_hidden_gradients_come_back_whatever_happens_in_the_step(where: str, held: bool) -> None:
    fail = False

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if fail and where == "update":
                raise RuntimeError("out of memory")
            return super().step(closure)

    def hook(*_: object) -> None:
        if fail and where == "later hook":
            raise RuntimeError("a hook of the script")

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = Failing(model.parameters(), lr=0.1)
    freeze = {"id": "frozen", "action": "freeze", "params": "bias"}
    with gradsurgeon.apply(model, rules(freeze), optimizer=optimizer) as session:
        optimizer.register_step_pre_hook(hook)
        model(data(0, 3, 4)).sum().backward()
        assert model.bias.grad is not None
        before, bias = model.bias.grad.clone(), model.bias.detach().clone()
        fail, kept = True, None
        try:
            optimizer.step()
        except RuntimeError as error:
            kept = error if held else None
        fail = False
        if not held:
            assert torch.equal(model.bias.grad, before)
            assert session.step == 1  # an attempt
        # The next step is one of its own, also while the error is still at hand.
        optimizer.step()
        assert torch.equal(model.bias.grad, before)
        assert torch.equal(model.bias, bias)
        assert session.step == 2
        del kept


def test_a_later_hook_that_exchanges_the_arguments_ends_no_step() -> None:
    model: Any = halves()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    freeze = {"id": "frozen", "action": "freeze", "params": "a.*"}
    with gradsurgeon.apply(model, rules(freeze), optimizer=optimizer) as session:
        optimizer.register_step_pre_hook(lambda _, args, kwargs: ((*args,), {**kwargs}))
        before = model["a"].weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            (loss(model["a"]) + loss(model["b"])).backward()
            optimizer.step()
            assert model["a"].weight.grad is not None
        assert torch.equal(before, model["a"].weight)
        assert session.step == 3
        assert session.status()["frozen"].fired == 3
