"""Records of weights and updates: what copies taken by hand around `step()` say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from models import same
from ranks import Json
from small import fields_of, relu_net, rule_file, sgd, steps_of, take_step
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, SparseAdam

import gradsurgeon
from gradsurgeon import Session
from gradsurgeon.report import summary
from gradsurgeon.runtime.weight_effects import SAMPLE

STATS = ["l1", "l2", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"]
OF_UPDATE = [*STATS, "ratio", "moved"]
RULES: Json = rule_file(
    {"id": "weights", "action": "norm-log", "params": "*", "tensor": "value", "stats": STATS},
    {
        "id": "updates",
        "action": "norm-log",
        "params": "*",
        "tensor": "update",
        "stats": OF_UPDATE,
    },
)


class Sharpness(torch.optim.Optimizer):
    """Climbs before it evaluates the closure, and returns before it descends (SAM, arXiv 2010.01412)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        climbs = [param.grad * 0.5 for param in params]
        torch._foreach_add_(params, climbs)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(params, climbs)
        for param in params:
            param.sub_(param.grad, alpha=0.1)


def with_rule(**rule: Any) -> Json:
    return {**RULES, "rules": [*RULES["rules"], rule]}


def net() -> Any:
    torch.manual_seed(0)
    return relu_net(6, 5, 1)


def by_hand(before: Tensor, after: Tensor) -> dict[str, float]:
    old, new = before.double(), after.double()
    change = new - old
    return {
        "l1": change.abs().sum().item(),
        "l2": change.norm().item(),
        "linf": change.abs().max().item(),
        "mean": change.mean().item(),
        "std": change.std(correction=0).item(),
        "min": change.min().item(),
        "max": change.max().item(),
        "zeros": (change == 0).sum().item(),
        "nonfinite": (~change.isfinite()).sum().item(),
        "ratio": (change.norm() / new.norm()).item(),
        # A weight that stays NaN does not move.
        "moved": ((change != 0) & ~(old.isnan() & new.isnan())).double().mean().item(),
    }


Seen = dict[int, dict[str, tuple[Tensor, Tensor]]]


def trained(
    model: nn.Module,
    optimizer: Optimizer,
    rules: Json = RULES,
    *,
    steps: int = 4,
    bad: int | None = None,
    **options: Any,
) -> tuple[Session, Seen]:
    """Train; return the session, and the weights before and after each update."""
    seen: Seen = {}
    session = gradsurgeon.apply(model, rules, optimizer=optimizer, **options)
    for step in range(steps):
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))

        def closure(inputs: Tensor = inputs, step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(inputs).square().mean() * (torch.nan if step == bad else 1.0)
            loss.backward()
            return loss

        old = {name: param.detach().clone() for name, param in model.named_parameters()}
        if not isinstance(optimizer, LBFGS):
            closure()
        if isinstance(optimizer, LBFGS | Sharpness):
            optimizer.step(closure)
        else:
            optimizer.step()
        seen[step] = {
            name: (old[name], param.detach().clone()) for name, param in model.named_parameters()
        }
    return session, seen


def check(session: Session, seen: Seen) -> None:
    """Hold all records against copies by hand."""
    names = list(next(iter(seen.values())))
    for name in names:
        for stat in OF_UPDATE:
            expected = [(step, by_hand(*seen[step][name])[stat]) for step in sorted(seen)]
            found = session.history(name, stat, rule="updates")
            assert [step for step, _ in found] == [step for step, _ in expected]
            torch.testing.assert_close(
                torch.tensor([value for _, value in found], dtype=torch.float64),
                torch.tensor([value for _, value in expected], dtype=torch.float64),
                rtol=1e-5,
                atol=1e-7,
                equal_nan=True,
            )
        norms = [seen[step][name][1].double().norm().item() for step in sorted(seen)]
        recorded = [value for _, value in session.history(name, "l2", rule="weights")]
        assert recorded == pytest.approx(norms, rel=1e-5, nan_ok=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": sgd,
    "for-loop": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "fused": lambda model: AdamW(model.parameters(), lr=0.1, fused=True),
    "no-update": lambda model: sgd(model, 0.0),
    # Evaluates the closure many times in one update.
    "lbfgs": lambda model: LBFGS(model.parameters(), lr=0.1, max_iter=5),
    "moves weights before its closure": lambda model: Sharpness(model.parameters()),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_records_are_those_of_copies_by_hand(kind: str) -> None:
    model = net()
    session, seen = trained(model, OPTIMIZERS[kind](model))
    check(session, seen)
    session.remove()


@pytest.mark.parametrize("then", ["skip-step", "warn"])
def test_a_skipped_update_has_no_record(then: str) -> None:
    model, trap = net(), {"id": "trap", "action": "nan-trap", "params": "*", "then": then}
    with warnings.catch_warnings(action="ignore"):
        session, seen = trained(model, sgd(model), with_rule(**trap), bad=2)
        if then == "skip-step":
            del seen[2]
        check(session, seen)
        session.remove()


def test_an_update_that_a_trap_stops_leaves_no_record() -> None:
    model = net()
    optimizer = sgd(model)
    session = gradsurgeon.apply(model, with_rule(id="trap", action="nan-trap", params="*"))
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean() * (torch.nan if step == 1 else 1.0)
        loss.backward()
        # The script goes on.
        with suppress(gradsurgeon.NonFiniteGradientError):
            optimizer.step()
    assert [step for step, _ in session.history("0.weight", "moved")] == [0, 2, 3]
    session.remove()


def test_a_scaler_that_skips_leaves_no_record() -> None:
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    session = gradsurgeon.apply(model, RULES, optimizer=optimizer, scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean() * (torch.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert steps_of(session, "0.weight", "moved") == [0, 2, 3]
    session.remove()


def test_frozen_weights_have_updates_of_zero() -> None:
    model = net()
    rules = with_rule(id="still", action="freeze", params="0.*")
    session, seen = trained(model, AdamW(model.parameters(), lr=0.1), rules)
    check(session, seen)
    assert {value for _, value in session.history("0.weight", "moved")} == {0.0}
    assert {value for _, value in session.history("0.weight", "ratio")} == {0.0}
    assert session.latest("2.weight", "moved") == 1.0
    session.remove()


def test_a_weight_that_leaves_zero_has_a_ratio_of_one() -> None:
    model = net()
    nn.init.zeros_(model[2].weight)
    session, _ = trained(model, sgd(model), steps=1)
    assert session.latest("2.weight", "ratio") == pytest.approx(1.0)
    session.remove()


def test_rules_act_in_their_steps_only() -> None:
    model = net()
    rules = {**RULES, "rules": [rule | {"steps": {"every": 3}} for rule in RULES["rules"]]}
    session, seen = trained(model, sgd(model), rules, steps=7)
    check(session, {step: seen[step] for step in (0, 3, 6)})
    session.remove()


def test_nothing_changes_for_the_training() -> None:
    def weights(rules: Json) -> list[Tensor]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.1)
        session, _ = trained(model, optimizer, rules)
        session.remove()
        return [param.detach() for param in model.parameters()]

    one_norm = {"id": "norm", "action": "norm-log", "params": "0.bias"}
    plain_rules = rule_file(one_norm)
    assert same(weights(plain_rules), weights(RULES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves_as_far_as_rounding_lets_it(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    optimizer = sgd(model, 0.02)
    session = gradsurgeon.apply(model, RULES, optimizer=optimizer)
    old = model[0].weight.detach().clone()
    model(torch.randn(16, 6, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    expected = by_hand(old, model[0].weight.detach())
    # Rounding has swallowed the update of some elements, and the others are those of the weight itself.
    assert 0.0 < expected["moved"] < 1.0
    for stat in ("moved", "l2", "ratio", "zeros"):
        assert session.latest("0.weight", stat, rule="updates") == pytest.approx(
            expected[stat], rel=1e-5
        )
    session.remove()


class Rows(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, 64, sparse=sparse)

    def forward(self, places: Tensor) -> Any:
        return self.table(places)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_large_parameter_is_sampled(sparse: bool) -> None:
    model = Rows(sparse=sparse)
    optimizer: Optimizer = (
        SparseAdam(model.parameters(), lr=0.1) if sparse else Adam(model.parameters(), lr=0.1)
    )
    weight = model.table.weight
    assert weight.numel() > 10 * SAMPLE
    session = gradsurgeon.apply(model, RULES, optimizer=optimizer)
    for _ in range(2):
        old = weight.detach().clone()
        take_step(optimizer, model(torch.arange(0, 5000, 4)).square().sum())
    expected = by_hand(old, weight.detach())
    found = {stat: session.latest("table.weight", stat, rule="updates") for stat in OF_UPDATE}
    assert expected["moved"] == 0.25
    for stat in ("l1", "l2", "zeros", "ratio", "moved", "std"):
        assert found[stat] == pytest.approx(expected[stat], rel=0.05)
    # The weight itself is measured whole.
    exact = weight.detach().double().norm().item()
    assert session.latest("table.weight", "l2", rule="weights") == pytest.approx(exact, rel=1e-5)
    session.remove()


def test_each_optimizer_has_records_of_its_own_updates() -> None:
    model = net()
    first, second = sgd(model[0]), sgd(model[2])
    session = gradsurgeon.apply(model, RULES, optimizer=[first, second])
    for step in range(4):
        model.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        first.step()
        if step % 2:
            second.step()
    assert len(session.history("0.weight", "moved")) == 4
    assert len(session.history("2.weight", "moved")) == 2
    session.remove()


def test_updates_inside_backward_have_records() -> None:
    model = net()
    optimizers = {param: SGD([param], lr=0.1) for param in model.parameters()}
    session = gradsurgeon.apply(model, RULES, optimizer=[*optimizers.values()])

    def update(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    old = model[0].weight.detach().clone()
    model(torch.ones(2, 6)).square().mean().backward()
    moved = (model[0].weight.detach() - old).norm().item()
    assert session.latest("0.weight", "l2", rule="updates") == pytest.approx(moved, rel=1e-5)
    session.remove()


def test_updates_by_hand_have_no_record_and_the_session_says_why() -> None:
    model = net()
    with warnings.catch_warnings(action="ignore"):
        session = gradsurgeon.apply(model, RULES, optimizer=[])
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 6)).square().mean().backward()
            session.tick()
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(0.1 * param.grad)
        session.remove()
    texts = fields_of(session, "message", rule="updates")
    assert any("no torch optimizer updated a parameter the rule matched" in text for text in texts)


def test_the_report_shows_weights_and_updates_and_does_not_cry_wolf(tmp_path: Path) -> None:
    model = net()
    nn.init.zeros_(model[2].weight)  # grows by any factor
    rules = with_rule(id="grads", action="norm-log", params="*")
    session, _ = trained(model, sgd(model), rules, steps=30, record=tmp_path / "run")
    session.remove()
    report = summary(session)
    titles = [table.title for table in report.tables]
    assert titles[:5] == [
        "norms (l2) of 4 weights, recorded by weights (at updated)",
        "norms (l2) of 4 updates, recorded by updates (at updated)",
        "norms (l2) of 4 parameters, recorded by grads (at accumulated)",
        "update over weight, of 4 parameters, recorded by updates (at updated)",
        "share of elements moved, of 4 parameters, recorded by updates (at updated)",
    ]
    assert not [remark for remark in report.remarks if "weight)" in remark or "update)" in remark]


def test_a_parameter_without_gradients_is_named_although_its_weight_is_recorded() -> None:
    model = net()
    model[0].spare = nn.Linear(2, 2)
    rules = with_rule(id="grads", action="norm-log", params="*")
    session, _ = trained(model, sgd(model), rules)
    session.remove()
    assert "never got a gradient: 0.spare.weight, 0.spare.bias" in summary(session).remarks
