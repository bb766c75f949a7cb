"""A training with three losses, seen by all that shows records: the numbers are those that a hand takes."""

from __future__ import annotations

import json
import math
import pathlib
import warnings
from statistics import fmean
from typing import Any

import pytest
import torch
from commands import call_here
from kept_sink import Kept
from several_losses import Heads, jacobian, rules, trunk_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon.report import summary

STEPS = 40
LOSSES = ["seg", "depth", "edges"]
PAIRS = [("seg", "depth"), ("seg", "edges"), ("depth", "edges")]


def three(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    seg, depth = model(x)
    conflict = seg.square().mean()
    return {
        "seg": conflict,
        "depth": 0.5 * (depth - 1).abs().mean() - 2.0 * conflict,
        "edges": 0.01 * (depth[:, :1] - seg[:, :1]).square().mean(),
    }


def train(
    path: pathlib.Path | None, *sinks: Any, per: str = "rule"
) -> tuple[gradsurgeon.Session, list[Tensor]]:
    """Train with the rules on losses; return the session, and the Jacobian of each step on the trunk."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    given = rules(
        {"action": "conflict", "id": "tasks", "losses": LOSSES, "per": per},
        {"action": "combine", "id": "surgery", "losses": LOSSES, "method": "mean"},
    )
    jacobians = []
    with gradsurgeon.apply(model, given, record=path, sinks=sinks) as session:
        for step in range(STEPS):
            losses = three(model, torch.randn(16, 6))
            if step == 5:
                losses["edges"] = torch.zeros(()).requires_grad_() * 1.0
            jacobians.append(jacobian(losses, trunk_of(model)).double())
            gradsurgeon.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
    return session, jacobians


def cosines(jacobians: list[Tensor], first: str, second: str) -> list[float]:
    one, other = LOSSES.index(first), LOSSES.index(second)
    rows = [(matrix[one], matrix[other]) for matrix in jacobians]
    found = [float(a @ b / (a.norm() * b.norm())) for a, b in rows]
    return [value for value in found if not math.isnan(value)]


def test_a_report_has_the_numbers_of_the_training(tmp_path: pathlib.Path) -> None:
    session, jacobians = train(tmp_path / "run")
    done = call_here("report", "run", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (conflicts,), (combined,) = found["conflicts"], found["combined"]
    assert (conflicts["rule"], conflicts["losses"]) == ("tasks", LOSSES)
    assert [(one["first"], one["second"]) for one in conflicts["pairs"]] == PAIRS
    for pair in conflicts["pairs"]:
        wanted = cosines(jacobians, pair["first"], pair["second"])
        assert (pair["calls"], pair["missing"]) == (len(wanted), STEPS - len(wanted))
        assert pair["missing"] == int("edges" in (pair["first"], pair["second"]))
        assert pair["cosine"] == pytest.approx(fmean(wanted), abs=1e-6)
        assert pair["least"] == pytest.approx(min(wanted), abs=1e-6)
        assert pair["below"] == pytest.approx(fmean(value < 0 for value in wanted), abs=1e-6)
    assert [one["name"] for one in combined["weights"]] == LOSSES
    # In one step a loss did not reach, and the others have half of it each.
    weights = [(39 / 3 + one) / STEPS for one in (0.5, 0.5, 1.0)]
    assert [one["mean"] for one in combined["weights"]] == pytest.approx(weights, abs=1e-6)
    assert combined["distance"] == pytest.approx((39 * 2 / 3 + 0.5) / STEPS, abs=1e-6)
    # What a session says of itself and what its directory says are the same.
    live = summary(session)
    with gradsurgeon.open_run(tmp_path / "run") as run:
        stored = summary(run)
        assert run.history("seg/depth", "cosine") == session.history("seg/depth", "cosine")
        assert live.of_losses() == stored.of_losses()
    assert [info.losses for info in live.rules.values()] == [tuple(LOSSES)] * 2


def test_parts_are_the_parameters(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "run", per="parameter")
    with gradsurgeon.open_run(tmp_path / "run") as run:
        (found,) = summary(run).of_losses().compared
        assert len(run.history("trunk.0.weight:seg/depth", "cosine")) == STEPS
    assert list(found.parts) == ["trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias"]
    assert {(one.first, one.second) for one in found.pairs} == set(PAIRS)
    done = call_here("report", "run", cwd=tmp_path)
    assert "conflicts of 3 losses in each of 4 parts, recorded by tasks" in done.stdout


def test_trackers_get_a_curve_of_each_pair() -> None:
    sink = Kept()
    session, _ = train(None, sink)
    name = "gradsurgeon/tasks"
    assert sink.curves[f"{name}/seg/depth/cosine"] == session.history("seg/depth", "cosine")
    # One that did not reach has no value, instead of one that is not finite.
    assert len(sink.curves[f"{name}/seg/edges/cosine"]) == STEPS - 1
    least = dict(sink.curves[f"{name}/cosine/least"])
    pairs = ["/".join(pair) for pair in PAIRS]
    last = STEPS - 1
    assert least[last] == min(session.latest(pair, "cosine") for pair in pairs)
    assert dict(sink.curves["gradsurgeon/surgery/seg/weight"])[last] == pytest.approx(1 / 3)
    assert "gradsurgeon/surgery/combined/distance" in sink.curves


def test_a_rule_whose_losses_never_came_says_so() -> None:
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradsurgeon.GradSurgeonWarning)
        with gradsurgeon.apply(model, rules({"action": "conflict", "id": "tasks"})) as session:
            for _ in range(12):
                sum(three(model, torch.randn(16, 6)).values()).backward()  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
    said = [event.message for event in session.events if event.kind == "never-fired"]
    assert said[0].endswith(
        "never fired: no gradsurgeon.backward gave the losses it names (seg, depth), or they reach no "
        "parameter it matched"
    )
