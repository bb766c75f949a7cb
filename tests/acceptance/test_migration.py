"""What people write today, and the rule that the guide names for it: both run as the guide has them.

The tools that people use are in `test_migration_of_tools.py`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from migration import TABLE, Loop, Net, agree, row
from models import data, same
from small import fields_of, sgd
from torch import nn

import gradsurgeon

pytestmark = pytest.mark.slow

# What a rule at `backward` says where several passes feed one update, as it should.
BOUNDS = pytest.mark.filterwarnings(
    "ignore:rule bounded. bounds the contribution:gradsurgeon.GradSurgeonWarning"
)
# A piece of the code of each line whose ends are compared, and where a script has that code.
EDITS = {
    "g.clamp(-1, 1)": "each parameter",
    "g * 0.1": "each parameter",
    "g * 0)": "each parameter",
    "g[:1] * 0": "each parameter",
    "g - g.flatten": "each parameter",
    "nan_to_num": "each parameter",
    "p.register_post_accumulate_grad_hook": "each parameter",
    "p.requires_grad_(False)": "before forward",
    "p.requires_grad_(step": "before forward",
    "clip_grad_norm_(model.parameters()": "after backward",
    "clip_grad_norm_(model.body": "after backward",
    "clip_grad_value_(model.parameters()": "after backward",
    "clip_grad_norm_(p, 0.5)": "after backward",
    "for m in (model.body": "after backward",
    "norm = lambda": "after backward",
    "min(step / 3": "after backward",
    "get_total_norm": "after backward",
}
# The tests of these are in the other files.
TRAINERS = ("Trainer(gradient_clip_val=1", 'algorithm="value"')
LOSSES = ("torchjd.autojac", "seg @ depth")
TOOLS = (
    "print(",
    "wandb.watch",
    "detect_anomaly",
    "DebugUnderflow",
    "grad_norm(self",
    "unfrozen",
    "ZClip(",
    "AdaGC(",
)


def test_every_line_has_a_test() -> None:
    assert sorted(row(piece).code for piece in (*EDITS, *TRAINERS, *LOSSES, *TOOLS)) == sorted(
        one.code for one in TABLE
    )
    assert {one.same for one in TABLE} == {"bits", "rounding", "place"}
    assert {row(piece).same for piece in (*EDITS, *TRAINERS)} == {"bits", "rounding"}


@pytest.mark.parametrize("piece", EDITS)
def test_an_edit_ends_with_the_same_weights(piece: str) -> None:
    one, fault = row(piece), float("nan") if "nan_to_num" in piece else None
    wanted = Loop(one.code, EDITS[piece], fault=fault).run()
    assert all(weight.isfinite().all() for weight in wanted)
    assert agree(one.same, Loop(fault=fault).run(one.rules), wanted)
    assert not agree("rounding", Loop(fault=fault).run(), wanted)


@BOUNDS
def test_a_hook_on_a_parameter_bounds_each_pass() -> None:
    one = row("g.clamp(-1, 1)")
    assert "with `at: step` it cannot" in one.remark
    hook = Loop(one.code, "each parameter", passes=2)
    wanted, rule = hook.run(), Loop(passes=2)
    assert same(rule.run(one.rules), wanted)
    assert hook.largest() == 2.0
    final = Loop(passes=2)
    final.run(one.rules.replace("at: backward", "at: step"))
    assert final.largest() == 1.0


def test_a_hook_on_a_parameter_bounds_the_scaled_gradient() -> None:
    one = row("g.clamp(-1, 1)")
    assert "the hook bounds the scaled gradient" in one.remark
    hook, rule = (Loop(scaler=scaler()) for _ in range(2))
    hook.code, hook.place = one.code, "each parameter"
    hook.run()
    rule.run(one.rules)
    assert (hook.largest(), rule.largest()) == (1 / 1024, 1.0)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def test_zero_takes_nan_away_too() -> None:
    one = row("g * 0)")
    hook = Loop(one.code, "each parameter", fault=float("nan")).run()
    assert any(weight.isnan().any() for weight in hook)
    assert same(Loop(fault=float("nan")).run(one.rules), Loop().run(one.rules))


def test_infinities_become_zero() -> None:
    one, inf = row("nan_to_num"), float("inf")
    assert same(Loop(fault=inf).run(one.rules), Loop(one.code, "each parameter", fault=inf).run())
    hook = Loop("p.register_hook(torch.nan_to_num)", "each parameter", fault=inf)
    assert not agree("rounding", hook.run(), Loop(fault=inf).run(one.rules))


def test_a_hook_after_accumulation_bounds_the_sum_so_far() -> None:
    one = row("post_accumulate")
    hook, rule, whole = (Loop(passes=2) for _ in range(3))
    hook.code, hook.place = one.code, "each parameter"
    whole.code, whole.place = (
        row("clip_grad_value_(model").code.replace("0.5", "1.0"),
        "after backward",
    )
    by_hook, by_rule = hook.run(), rule.run(one.rules)
    assert same(by_rule, whole.run())
    assert not agree("rounding", by_rule, by_hook)
    assert (hook.largest(), rule.largest()) == (1.0, 1.0)


def test_freeze_leaves_the_gradient_to_be_recorded() -> None:
    one = row("p.requires_grad_(False)")
    log = '  - {id: norms, action: norm-log, params: "body.*"}\n'
    model = Net()
    optimizer = sgd(model)
    with gradsurgeon.apply(model, one.rules + log) as session:
        model(data(0, 5, 4)).sum().backward()
        optimizer.step()
        assert session.latest("body.weight") > 0


def test_a_clip_needs_no_unscaling() -> None:
    one = row("clip_grad_norm_(model.parameters()")
    code = f"scaler.unscale_(optimizer)\n{one.code}"
    wanted = Loop(code, "after backward", scaler=scaler()).run()
    assert agree("rounding", Loop(scaler=scaler()).run(one.rules), wanted)
    scaled = Loop(one.code, "after backward", scaler=scaler())
    scaled.run()
    assert scaled.largest() <= 1 / 1024


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_spreads_by_the_function_only(fault: float) -> None:
    one = row("clip_grad_norm_(model.parameters()")
    ends = []
    for by_rule in (False, True):
        model = nn.Linear(2, 1, bias=False)
        optimizer = sgd(model)
        attached: Any = gradsurgeon.apply(model, one.rules) if by_rule else contextlib.nullcontext()
        with warnings.catch_warnings(), attached as session:
            warnings.simplefilter("ignore", gradsurgeon.GradSurgeonWarning)
            model.weight.grad = torch.tensor([[2.0, fault]])
            if not by_rule:
                exec(one.code, {"torch": torch, "model": model})
            optimizer.step()
            ends.append(model.weight.grad.nan_to_num(nan=7e7).tolist())
            if by_rule:
                assert fields_of(session, "rule", rule="clipped")
    spread = 7e7 if fault != fault else 0.0  # noqa: PLR0124 # NaN
    assert ends[0] == [[spread, 7e7]]
    assert ends[1][0][0] == 2.0


def test_a_norm_is_what_a_hook_prints() -> None:
    one = row("print(")
    said: list[float] = []
    names = {"print": said.append}
    Loop(one.code, "each parameter", passes=2, names=names).run()
    model = Net()
    with observed(model, one.rules, passes=2) as session:
        found = {name: session.history(name) for name, _ in model.named_parameters()}
    # Backward goes through the layers from the last to the first.
    assert sorted(said) == pytest.approx(
        sorted(v for log in found.values() for _, v in log), rel=1e-6
    )
    assert len(said) == 4 * 4 * 2


@contextlib.contextmanager
def observed(model: Net, rules: str, *, passes: int = 1) -> Iterator[Any]:
    """Train a model as `Loop` does under rules that only look, and yield their session."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    with gradsurgeon.apply(model, rules) as session:
        for step in range(4):
            Loop(passes=passes)._step(model, optimizer, step)
        yield session
