"""What `gradsurgeon.backward` cannot do is refused by name, before a weight moves; nothing of it is silent."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from commands import call_here
from kept_sink import Kept
from several_losses import (
    AVERAGE,
    Checkpointed,
    Embedding,
    Heads,
    applied,
    flat_grads,
    grads_of,
    heads,
    jacobian,
    rules,
    trunk_of,
    two,
)
from small import messages, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon import BindError, GradSurgeonError, GradSurgeonWarning
from gradsurgeon.report import summary
from gradsurgeon.report.json_form import to_dict

pytestmark = pytest.mark.slow

COMBINE = {"action": "combine", "method": "mgda"}


class WritesItsSaved(torch.autograd.Function):
    """Works once: its backward pass leaves something else in what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.factor = [1.0]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.factor[0] *= 10.0
        return grad * ctx.factor[0]


class Unrepeatable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Any:
        return WritesItsSaved.apply(self.up(x))


@pytest.mark.parametrize("action", ["combine", "conflict"])
def test_a_graph_that_cannot_be_gone_through_twice(action: str) -> None:
    model, x = Heads(Unrepeatable()), torch.randn(5, 6)
    rule = COMBINE if action == "combine" else {"action": "conflict"}
    applied(model, rule)
    with pytest.raises(
        GradSurgeonError, match=rf"rule {action}: .*trunk.up.weight do not add up .* twice"
    ):
        gradsurgeon.backward(two(model, x))


@pytest.mark.parametrize("action", ["combine", "conflict"])
def test_a_reentrant_checkpoint(action: str) -> None:
    model, x = Heads(Checkpointed(reentrant=True)), torch.randn(5, 6)
    rule = COMBINE if action == "combine" else {"action": "conflict"}
    applied(model, rule)
    with pytest.raises(GradSurgeonError, match="use_reentrant=False"):
        gradsurgeon.backward(two(model, x))


@pytest.mark.parametrize("action", ["combine", "conflict"])
def test_a_reentrant_checkpoint_around_a_head(action: str) -> None:
    class Reentrant(Heads):
        def forward(self, x: Tensor) -> Any:
            features = self.trunk(x)
            return checkpoint(self.seg, features, use_reentrant=True), self.depth(features)

    model, x = Reentrant(), torch.randn(5, 6)
    applied(model, COMBINE if action == "combine" else {"action": "conflict"})
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        gradsurgeon.backward(two(model, x))


def test_a_first_gradient_that_is_not_finite_does_not_vouch_for_the_graph() -> None:
    model, x = Heads(Unrepeatable()), torch.randn(5, 6)
    applied(model, COMBINE)
    losses = two(model, x)
    gradsurgeon.backward({**losses, "seg": losses["seg"] * torch.nan})
    model.zero_grad()
    with pytest.raises(GradSurgeonError, match="do not add up"):
        gradsurgeon.backward(two(model, x))


def test_a_sparse_gradient_before_anything_has_accumulated() -> None:
    model, x = Heads(Embedding(sparse=True)), torch.randn(5, 6)
    with pytest.raises((GradSurgeonError, BindError), match=r"sparse.*exclude"):
        applied(model, COMBINE)
        gradsurgeon.backward(two(model, x))
    assert all(param.grad is None for param in model.parameters())


def test_losses_of_a_graph_that_is_gone_say_what_torch_says() -> None:
    model, x = heads()
    applied(model, COMBINE)
    losses = two(model, x)
    gradsurgeon.backward(losses)
    with pytest.raises(RuntimeError, match="second time"):
        gradsurgeon.backward(losses)


def test_weights_that_cannot_be_had_leave_the_sum_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = heads()
    expected = copy.deepcopy(model)
    sum(two(expected, x).values()).backward()  # type: ignore[union-attr]
    applied(model, {"action": "combine", "method": "upgrad"})

    def fail(*_: object) -> None:
        raise ValueError("Failed to solve the quadratic programming problem.")

    import torchjd.linalg

    monkeypatch.setattr(torchjd.linalg.QuadprogProjector, "_project_weight_vector", fail)
    with pytest.warns(GradSurgeonWarning, match=r"Failed to solve .* plain sum"):
        gradsurgeon.backward(two(model, x))
    torch.testing.assert_close(flat_grads(trunk_of(model)), flat_grads(trunk_of(expected)))


@pytest.mark.slow
def test_a_missing_library_names_the_extra() -> None:
    script = (
        "import sys\n"
        "sys.modules['torchjd'] = None\n"
        "sys.modules['torchjd.aggregation'] = None\n"
        "import gradsurgeon\n"
        "from several_losses import Heads, rules\n"
        "gradsurgeon.apply(Heads(), rules({'action': 'conflict'})).remove()\n"
        "gradsurgeon.apply(Heads(), rules({'action': 'combine', 'method': 'mgda'}))\n"
    )
    done = subprocess.run(  # our own script
        [sys.executable, "-c", script], capture_output=True, text=True, cwd="tests", check=False
    )
    assert done.returncode == 1
    assert "rule combine: `method: mgda` needs the library torchjd.aggregation" in done.stderr
    assert "pip install 'gradsurgeon[surgery]'" in done.stderr


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("what", ["the model", "the trunk"])
def test_a_compiled_model_works_or_is_refused_by_name(what: str, kept: bool) -> None:  # a case
    from torch._functorch import config

    torch._dynamo.reset()
    model, x = heads()
    matrix = jacobian(two(model, x), trunk_of(model))
    aggregation = pytest.importorskip("torchjd.aggregation")
    wanted = aggregation.MGDA()(matrix)
    called: Any = model
    with config.patch(donated_buffer=not kept):
        if what == "the model":
            called = torch.compile(model, backend="aot_eager")
        else:
            model.trunk.compile(backend="aot_eager")
        applied(model, COMBINE)
        losses = two(called, x)
        if kept:
            gradsurgeon.backward(losses)
            torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-4, atol=1e-6)
            return
        try:
            gradsurgeon.backward(losses)
            said = ""
        except RuntimeError as error:
            said = str(error)
        # What saves nothing that it could free goes through.
        assert "donated_buffer=False" in said or not said
        if said:
            assert all(param.grad is None for param in model.parameters())
        else:
            torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-4, atol=1e-6)


def test_create_graph_in_the_script_goes_on_working() -> None:
    """The pass itself makes no graph: what needs one is a loss of its own."""
    model, x = heads()
    applied(model, COMBINE)
    gradsurgeon.backward(two(model, x))
    assert all(param.grad is None or not param.grad.requires_grad for param in model.parameters())


def test_an_exception_in_a_hook_leaves_the_hooks_as_they_were() -> None:
    model, x = heads()
    weight = model.trunk[0].weight
    weight.register_hook(lambda grad: grad)
    hooks = dict(weight._backward_hooks)  # nobody else tells
    applied(model, COMBINE)
    features = model.trunk(x)

    def fail(_grad: Tensor) -> None:
        raise ZeroDivisionError("in a hook")

    features.register_hook(fail)
    losses = {"seg": model.seg(features).mean(), "depth": model.depth(features).square().mean()}
    with pytest.raises(ZeroDivisionError):
        gradsurgeon.backward(losses)
    assert dict(weight._backward_hooks) == hooks  # as above
    model.zero_grad()
    gradsurgeon.backward(two(model, x))
    assert grads_of(model)["trunk.0.weight"] is not None


# -------------------------------------------------------------------------------------------------
# A training with three losses, seen by all that shows records: the numbers are those that a hand takes.
# -------------------------------------------------------------------------------------------------


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
    path: Path | None, *sinks: Any, per: str = "rule"
) -> tuple[gradsurgeon.Session, list[Tensor]]:
    """Train with the rules on losses; return the session, and the Jacobian of each step on the trunk."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = sgd(model, 0.02)
    given = rules(
        {"action": "conflict", "id": "tasks", "losses": LOSSES, "per": per},
        {"action": "combine", "id": "surgery", "losses": LOSSES, **AVERAGE},
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


def test_a_report_has_the_numbers_of_the_training(tmp_path: Path) -> None:
    session, jacobians = train(tmp_path / "run")
    done = call_here("report", "run", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    pairs, weights, distances = (
        {one["name"]: one for one in found["losses"] if one["stat"] == stat}
        for stat in ("cosine", "weight", "distance")
    )
    assert list(pairs) == ["/".join(pair) for pair in PAIRS]
    for (first, second), pair in zip(PAIRS, pairs.values(), strict=True):
        wanted = cosines(jacobians, first, second)
        assert (pair["rule"], pair["calls"]) == ("tasks", STEPS)
        assert pair["nonfinite"] == STEPS - len(wanted) == int("edges" in (first, second))
        assert pair["mean"] == pytest.approx(fmean(wanted), abs=1e-6)
        assert pair["least"] == pytest.approx(min(wanted), abs=1e-6)
        assert pair["negative"] == pytest.approx(fmean(value < 0 for value in wanted), abs=1e-6)
    assert list(weights) == LOSSES
    # In one step a loss did not reach, and the others have half of it each.
    means = [(39 / 3 + one) / STEPS for one in (0.5, 0.5, 1.0)]
    assert [one["mean"] for one in weights.values()] == pytest.approx(means, abs=1e-6)
    distance = (39 * 2 / 3 + 0.5) / STEPS
    assert distances["combined"]["mean"] == pytest.approx(distance, abs=1e-6)
    # What a session says of itself and what its directory says are the same.
    live = summary(session)
    with gradsurgeon.open_run(tmp_path / "run") as run:
        stored = summary(run)
        assert run.history("seg/depth", "cosine") == session.history("seg/depth", "cosine")
        one, other = to_dict(live), to_dict(stored)
        assert one["losses"] == other["losses"] != []


def test_parts_are_the_parameters(tmp_path: Path) -> None:
    train(tmp_path / "run", per="parameter")
    with gradsurgeon.open_run(tmp_path / "run") as run:
        found = [one.name for one in summary(run).losses if one.stat == "cosine"]
        assert len(run.history("trunk.0.weight:seg/depth", "cosine")) == STEPS
    names = ["trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias"]
    assert found == [f"{name}:{'/'.join(pair)}" for name in names for pair in PAIRS]
    done = call_here("report", "run", cwd=tmp_path)
    assert "cosine of pairs of losses, recorded by tasks" in done.stdout


def test_trackers_get_a_curve_of_each_pair() -> None:
    sink = Kept()
    session, _ = train(None, sink)
    name = "gradsurgeon/tasks"
    assert sink.curves[f"{name}/seg/depth/cosine"] == session.history("seg/depth", "cosine")
    # One that did not reach has no value, instead of one that is not finite.
    assert len(sink.curves[f"{name}/seg/edges/cosine"]) == STEPS - 1
    last = STEPS - 1
    for pair in map("/".join, PAIRS):
        assert dict(sink.curves[f"{name}/{pair}/cosine"])[last] == session.latest(pair, "cosine")
    assert dict(sink.curves["gradsurgeon/surgery/seg/weight"])[last] == pytest.approx(1 / 3)
    assert "gradsurgeon/surgery/combined/distance" in sink.curves


def test_a_rule_whose_losses_never_came_says_so() -> None:
    model = Heads()
    optimizer = sgd(model, 0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradSurgeonWarning)
        with applied(model, {"action": "conflict", "id": "tasks"}) as session:
            for _ in range(12):
                sum(three(model, torch.randn(16, 6)).values()).backward()  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
    said = messages(session, "never-fired")
    assert said[0].endswith(
        "never fired: no gradsurgeon.backward gave the losses the rule names (seg, depth), or they reach no "
        "parameter it matched"
    )
