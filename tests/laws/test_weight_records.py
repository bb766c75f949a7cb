"""Records of weights and updates: what copies taken by hand around `step()` say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from ranks import Json
from small import attach, fields_of, relu_net, sgd, take_step
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, SparseAdam

import gradsurgeon
from gradsurgeon import Session
from gradsurgeon.report import summary
from gradsurgeon.runtime.weight_effects import SAMPLE

STATS = ["l1", "l2", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"]
OF_UPDATE = [*STATS, "ratio", "moved"]
LOG = {"action": "norm-log", "params": "*"}
WEIGHTS: Json = {**LOG, "id": "weights", "tensor": "value", "stats": STATS}
UPDATES: Json = {**LOG, "id": "updates", "tensor": "update", "stats": OF_UPDATE}
GRADS: Json = {**LOG, "id": "grads"}


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


def net() -> Any:
    torch.manual_seed(0)
    return relu_net(6, 5, 1)


def by_hand(before: Tensor, after: Tensor) -> dict[str, float]:
    old = before.double()
    new = after.double()
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
    *more: Json,
    steps: int = 4,
    bad: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> tuple[Session, Seen]:
    """Train, also where a trap raises; return the session, and the weights before and after each update.

    Args:
        model: what is trained.
        optimizer: updates it.
        more: rules beside those that record.
        steps: how many.
        bad: the step whose loss is NaN, or infinite under a scaler.
        scaler: scales the losses.
        options: are those of `apply`.
    """
    seen: Seen = {}
    fault = torch.nan if scaler is None else torch.inf
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    with attach(model, WEIGHTS, UPDATES, *more, optimizer=optimizer, **options) as session:
        for step in range(steps):
            inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))

            def closure(inputs: Tensor = inputs, step: int = step) -> Any:
                optimizer.zero_grad()
                loss = model(inputs).square().mean() * (fault if step == bad else 1.0)
                scaler.scale(loss).backward()
                return loss

            old = {name: param.detach().clone() for name, param in model.named_parameters()}
            if not isinstance(optimizer, LBFGS):
                closure()
            # The script goes on after the error of a trap.
            with suppress(gradsurgeon.NonFiniteGradientError):
                if isinstance(optimizer, LBFGS | Sharpness):
                    optimizer.step(closure)
                else:
                    scaler.step(optimizer)
            scaler.update()
            seen[step] = {
                name: (old[name], param.detach().clone())
                for name, param in model.named_parameters()
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


@pytest.mark.parametrize("then", ["skip-step", "warn", "raise", "scaler"])
def test_a_skipped_update_has_no_record(then: str) -> None:
    model = net()
    options: Json = {}
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": then}
    if then == "scaler":
        trap["then"] = "warn"
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    with warnings.catch_warnings(action="ignore"):
        session, seen = trained(model, sgd(model), trap, bad=2, **options)
    if then != "warn":
        del seen[2]
    check(session, seen)


def test_frozen_weights_have_updates_of_zero() -> None:
    model = net()
    freeze = {"id": "still", "action": "freeze", "params": "0.*"}
    session, seen = trained(model, AdamW(model.parameters(), lr=0.1), freeze)
    check(session, seen)
    assert session.latest("0.weight", "moved") == 0.0
    assert session.latest("2.weight", "moved") == 1.0


def test_a_weight_that_leaves_zero_has_a_ratio_of_one() -> None:
    model = net()
    nn.init.zeros_(model[2].weight)
    session, _ = trained(model, sgd(model), steps=1)
    assert session.latest("2.weight", "ratio") == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves_as_far_as_rounding_lets_it(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    optimizer = sgd(model, 0.02)
    old = model[0].weight.detach().clone()
    with attach(model, UPDATES, optimizer=optimizer) as session:
        take_step(optimizer, model(torch.randn(16, 6, dtype=dtype)).float().square().mean())
    expected = by_hand(old, model[0].weight.detach())
    # Rounding has swallowed the update of some elements, and the others are those of the weight itself.
    assert 0.0 < expected["moved"] < 1.0
    for stat in ("moved", "l2", "ratio", "zeros"):
        assert session.latest("0.weight", stat) == pytest.approx(expected[stat], rel=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_large_parameter_is_sampled(sparse: bool) -> None:
    table = nn.Embedding(5000, 64, sparse=sparse)
    kind: type[Optimizer] = SparseAdam if sparse else Adam
    optimizer = kind(table.parameters(), lr=0.1)  # type: ignore[call-arg]
    assert table.weight.numel() > 10 * SAMPLE
    with attach(table, WEIGHTS, UPDATES, optimizer=optimizer) as session:
        for _ in range(2):
            old = table.weight.detach().clone()
            take_step(optimizer, table(torch.arange(0, 5000, 4)).square().sum())
    expected = by_hand(old, table.weight.detach())
    assert expected["moved"] == 0.25
    for stat in ("l1", "l2", "zeros", "ratio", "moved", "std"):
        found = session.latest("weight", stat, rule="updates")
        assert found == pytest.approx(expected[stat], rel=0.05)
    # The weight itself is measured whole.
    exact = table.weight.detach().double().norm().item()
    assert session.latest("weight", "l2", rule="weights") == pytest.approx(exact, rel=1e-5)


def test_updates_by_hand_have_no_record_and_the_session_says_why() -> None:
    model = net()
    with warnings.catch_warnings(action="ignore"), attach(model, UPDATES, optimizer=[]) as session:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 6)).square().mean().backward()
            session.tick()
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(0.1 * param.grad)
    texts = fields_of(session, "message", rule="updates")
    assert any("no torch optimizer updated a parameter the rule matched" in text for text in texts)


def test_the_report_shows_weights_and_updates_and_does_not_cry_wolf() -> None:
    model = net()
    nn.init.zeros_(model[2].weight)  # grows by any factor
    session, _ = trained(model, sgd(model), GRADS, steps=30)
    report = summary(session)
    titles = [table.title for table in report.tables]
    assert titles[2:7] == [
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
    session, _ = trained(model, sgd(model), GRADS)
    assert "never got a gradient: 0.spare.weight, 0.spare.bias" in summary(session).remarks


def test_a_gradient_between_the_steps_of_a_rule_is_no_silence() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = sgd(model)
    session = attach(model, {**GRADS, "steps": {"every": 2}}, optimizer=optimizer)
    for step in range(6):
        take_step(optimizer, model[step % 2](torch.ones(1, 2)).sum())
    assert not [remark for remark in summary(session).remarks if "never got" in remark]
