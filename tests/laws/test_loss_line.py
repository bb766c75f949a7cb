"""A NaN from a loss outside of the model gets its operation from the graph of the loss, and its line from the next pass."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from ranks import Json
from small import rule_file, sgd, take_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon.forensics import kept_step

Loss = Callable[[Tensor], Tensor]
WARNS: Json = {"id": "trap", "action": "nan-trap", "params": "*", "then": "warn"}
LOOP: Json = {"id": "loop", "action": "check-loop", "params": "*"}
SKIPS: Json = {**WARNS, "then": "skip-step"}
BAD = torch.full((3,), math.nan)
BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

# Each is finite, and its gradient is not: row 2 of what the model returns is where the derivative has no value.
FINITE: dict[str, Loss] = {
    "SqrtBackward0": lambda x: x.sqrt().mean(),
    "PowBackward0": lambda x: (x**0.5).mean(),
    "AcosBackward0": lambda x: (1 - x).acos().mean(),
    "AsinBackward0": lambda x: (1 - x).asin().mean(),
    "AcoshBackward0": lambda x: (1 + x).acosh().mean(),
    "LogBackward0": lambda x: torch.where(x > 0, x.log(), 0).mean(),
    "Log2Backward0": lambda x: torch.where(x > 0, x.log2(), 0).mean(),
    "Log10Backward0": lambda x: torch.where(x > 0, x.log10(), 0).mean(),
    "DivBackward0": lambda x: torch.where(x > 0, x / x, 0).mean(),
    "AtanhBackward0": lambda x: torch.where(x > 0, (1 - x).atanh(), 0).mean(),
    "Log1PBackward0": lambda x: torch.where(x > 0, (x - 1).log1p(), 0).mean(),
}


class Positive(nn.Module):
    """Returns numbers between 0 and 1; row 2 is exactly 0 if the flag is set, with a gradient that passes."""

    has_zero = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).sigmoid()
        kept = torch.ones(len(x), 1)
        kept[2] = 1.0 - self.has_zero
        return torch.as_tensor(out * kept)


def steps(
    loss: Loss,
    *rules: Json,
    after: Loss | None = None,
    number: int = 3,
    record: Path | None = None,
) -> list[gradsurgeon.Event]:
    """Train a few steps, the first with a zero in the output, and return all events."""
    model = Positive()
    optimizer = sgd(model, 0.0)
    with gradsurgeon.apply(model, rule_file(*rules), optimizer=optimizer, record=record) as session:
        for step in range(number):
            model.has_zero = step == 0
            chosen = loss if after is None or step == 0 else after
            take_step(optimizer, chosen(model(BATCH)))
        return session.events


def line_of(loss: Callable[..., Any]) -> int:
    return loss.__code__.co_firstlineno


def line_events(events: list[gradsurgeon.Event]) -> list[gradsurgeon.Event]:
    return [event for event in events if "the line of" in event.message]


def node_by_anomaly_mode(loss: Loss) -> str:
    """Return the node that PyTorch's own mode names for the same step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.autograd.set_detect_anomaly(True)
        value = loss(Positive()(BATCH))
        with pytest.raises(RuntimeError, match="returned nan values") as caught:
            value.backward()
        torch.autograd.set_detect_anomaly(False)
    named = re.search("'(.*)'", str(caught.value))
    assert named is not None
    return named[1]


@pytest.mark.parametrize("node", FINITE)
def test_the_operation_without_a_derivative_is_named_with_its_line(node: str) -> None:
    loss = FINITE[node]
    assert math.isfinite(loss(Positive()(BATCH)).detach())
    events = steps(loss, SKIPS)
    trap = events[0]
    assert trap.diagnosis is not None
    assert trap.diagnosis["headline"].endswith(
        f"in the backward pass outside of the model: {named(node)}"
    )
    assert trap.diagnosis["rows"]["rows"] == [2]
    assert trap.diagnosis["cause"] == "mathematics"
    (event,) = line_events(events)
    assert (event.kind, event.rule, event.step) == ("notice", "trap", 0)
    assert event.diagnosis is not None
    assert event.diagnosis["file"] == __file__
    assert event.diagnosis["line"] == line_of(loss)
    assert event.message.startswith(
        f"step 0, rule trap: the line of {node}: {__file__}:{line_of(loss)}"
    )
    assert not torch.is_anomaly_enabled()


def named(node: str) -> str:
    operation = node.partition("Backward0")[0].lower()
    return f"aten.{operation} ({node})"


@pytest.mark.parametrize("node", ["AcosBackward0", "AsinBackward0", "AcoshBackward0"])
def test_the_operation_is_that_of_anomaly_mode(node: str) -> None:
    # Where the gradient that comes to it is 0, the mode sees NaN; else an infinity, which it lets pass one further.
    loss = FINITE[node]
    assert node_by_anomaly_mode(lambda x: loss(x) * 0) == node


@pytest.mark.parametrize(
    "loss",
    [lambda x: 10 * x.sqrt().mean(), lambda x: (10 * (x.sqrt() - 1)).square().mean() / 2],
)
def test_a_loss_that_is_multiplied_by_a_whole_number_keeps_its_operation(loss: Loss) -> None:
    (trap, *_) = steps(loss, SKIPS)
    assert trap.diagnosis is not None
    assert trap.diagnosis["headline"].endswith("aten.sqrt (SqrtBackward0)")


def test_a_derivative_whose_gradient_was_kept_away_is_not_blamed() -> None:
    def loss(x: Tensor) -> Tensor:
        return x.sqrt().mean() + (x + 2).clamp(-1, 1).acos().sum()

    (trap, *_) = steps(loss, SKIPS)
    assert trap.diagnosis is not None
    assert trap.diagnosis["headline"].endswith("aten.sqrt (SqrtBackward0)")


def test_a_long_loss_keeps_its_last_operations() -> None:
    def loss(x: Tensor) -> Tensor:
        for _ in range(100):
            x = x * 1.0
        return x.sqrt().mean()

    events = steps(loss, SKIPS)
    assert events[0].diagnosis is not None
    assert events[0].diagnosis["headline"].endswith("aten.sqrt (SqrtBackward0)")
    assert "last 20 operations of the loss: MulBackward0, " in events[0].message
    (event,) = line_events(events)
    assert event.diagnosis is not None
    assert event.diagnosis["line"] == line_of(loss) + 3


def far(x: Tensor) -> Tensor:
    """Return a mean that is made by so many operations that what made the tensor is far from the end of the loss."""
    for _ in range(100):
        x = x * 1.0
    return x.mean()


def loop(x: Tensor) -> Tensor:
    """Return a sum in which only the first root is of 0."""
    total = x.sqrt().mean()
    for _ in range(40):
        total = total + (x + 1).sqrt().mean()
    return total


FAR: dict[str, Loss] = {
    "SqrtBackward0": lambda x: far(x.sqrt()),
    "PowBackward0": lambda x: far(x**0.5),
    "AcosBackward0": lambda x: far((1 - x).acos()),
    "LogBackward0": lambda x: far(torch.where(x > 0, x.log(), 0)),
    "DivBackward0": lambda x: far(torch.where(x > 0, x / x, 0)),
    "SqrtBackward0, number 1 of 41": loop,
}


@pytest.mark.parametrize("node", FAR)
def test_an_operation_far_from_the_end_of_the_loss_is_named_with_its_line(node: str) -> None:
    loss = FAR[node]
    events = steps(loss, SKIPS)
    trap = events[0]
    assert trap.diagnosis is not None
    assert trap.diagnosis["headline"].endswith(f"outside of the model: {named(node)}")
    (line,) = line_events(events)
    assert trap.diagnosis["rows"]["rows"] == [2]
    assert line.diagnosis is not None
    assert line.diagnosis["line"] == line_of(loss) + 2 * (loss is loop)
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("after", [lambda x: far(x.exp()), lambda x: far((x * 1.0).sqrt() * 1.0)])
def test_another_operation_as_far_from_the_end_has_no_line(after: Loss) -> None:
    events = steps(FAR["SqrtBackward0"], SKIPS, after=after)
    assert events[0].diagnosis is not None
    assert events[0].diagnosis["op"] == "aten.sqrt"
    assert line_events(events) == []


def test_what_was_before_a_far_operation_may_be_to_blame() -> None:
    trap, *_ = steps(lambda x: far((x - 1).sqrt()), SKIPS)
    assert trap.diagnosis is not None
    assert trap.diagnosis["op"] == "aten.sqrt"
    assert "that may be to blame instead" in trap.diagnosis["evidence"][0]


def test_a_far_operation_that_keeps_nothing_leaves_the_last_ones_unblamed() -> None:
    check, *_ = steps(lambda x: far(Own.apply(x - 1)), WARNS, LOOP)
    assert check.message.endswith("look at what it is made of")


def test_of_a_loss_that_is_too_large_the_last_operations_keep_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Beside the states of the random numbers it has room for one of two.
    monkeypatch.setattr(kept_step, "MAX_BYTES", 70_000)

    def loss(x: Tensor) -> Tensor:
        many = x.repeat(160, 1)
        return many.exp().mean() + many.sqrt().mean()

    trap, *_ = steps(loss, SKIPS)
    assert trap.diagnosis is not None
    assert trap.diagnosis["op"] == "aten.sqrt"


def test_other_operations_in_the_next_pass_have_no_line() -> None:
    def after(x: Tensor) -> Tensor:
        modes.append(torch.is_anomaly_enabled())
        return x.cos().exp().mean()

    modes: list[bool] = []
    events = steps(lambda x: x.sqrt().exp().mean(), SKIPS, after=after)
    assert line_events(events) == []
    assert modes == [True, False]


def test_an_operation_of_its_kind_that_the_next_pass_lacks_gives_it_no_other_line() -> None:
    events = steps(lambda x: x.sqrt().sqrt().mean(), SKIPS, after=lambda x: x.sqrt().mean())
    assert events[0].diagnosis is not None
    assert events[0].diagnosis["headline"].endswith("(SqrtBackward0, number 2 of 2)")
    assert line_events(events) == []


def test_passes_from_another_root_come_between() -> None:
    model = Positive()
    other = nn.Linear(4, 1)
    first = sgd(model, 0.0)
    second = sgd(other, 0.0)
    loss = FINITE["SqrtBackward0"]
    with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=first) as session:
        take_step(first, loss(model(BATCH)))
        take_step(
            second, other(model(BATCH).detach().mean(1, keepdim=True).expand(6, 4)).square().sum()
        )
        assert torch.is_anomaly_enabled()
        model.has_zero = False
        take_step(first, loss(model(BATCH)))
        (event,) = line_events(session.events)
    assert event.diagnosis is not None
    assert event.diagnosis["line"] == line_of(loss)
    assert not torch.is_anomaly_enabled()


def test_another_loss_with_the_same_operations_is_told_apart() -> None:
    model = Positive()
    optimizer = sgd(model, 0.0)
    bad: Loss = lambda x: x.sqrt().mean()  # noqa: E731 # of a line of its own
    with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=optimizer) as session:
        for step in range(2):
            model.has_zero = False
            FINITE["SqrtBackward0"](model(BATCH)).backward()
            model.has_zero = step == 0
            take_step(optimizer, bad(model(BATCH)))
        (event,) = line_events(session.events)
    assert event.diagnosis is not None
    assert event.diagnosis["line"] == line_of(bad)


class Own(torch.autograd.Function):
    """An operation of the script, of which a graph keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize(
    ("loss", "headline"),
    [
        (lambda x: Own.apply(x - 1).exp().mean(), "came back to the output"),
        (lambda x: (x.abs() + BAD).sigmoid().mean(), "came back to the output"),
        (lambda x: (x.abs() + BAD).exp().mean(), "came back to the output"),
        (lambda x: Own.apply(x - 1).expand(2, 6, 3).square().mean(), "came back to the output"),
        (
            lambda x: (torch.where(x > 2, (x - 2).log(), 0).square() + (x - 1).sqrt()).mean(),
            "aten.sqrt (SqrtBackward0)",
        ),
    ],
)
def test_what_cannot_be_known_is_blamed_on_no_operation(loss: Loss, headline: str) -> None:
    trap, *_ = steps(loss, SKIPS, number=1)
    assert trap.diagnosis is not None
    assert headline in trap.diagnosis["headline"]


def test_the_line_at_which_a_loss_ends_is_told_as_that(tmp_path: Path) -> None:
    def loss(x: Tensor) -> Tensor:
        root = Own.apply(x - 1)
        return torch.as_tensor(root.exp().mean())

    events = steps(loss, SKIPS, record=tmp_path / "run")
    (line,) = line_events(events)
    with gradsurgeon.open_run(tmp_path / "run") as run:
        report: Any = gradsurgeon.report.summary(run)
    place = f"{__file__}:{line_of(loss) + 2}"
    assert f"MeanBackward0, with which the loss ends (it is not blamed): {place}" in line.message
    assert f"in the loss, which ends at {place}" in str(report)


def test_a_divisor_of_0_is_named_although_the_dividend_is_not_kept() -> None:
    trap, *others = steps(lambda x: (x / torch.zeros(3)).mean(), SKIPS)
    (line,) = line_events(others)
    assert trap.diagnosis is not None
    assert (trap.diagnosis["op"], trap.diagnosis["cause"]) == ("aten.div", "mathematics")
    assert line.message.startswith(f"step 0, rule trap: the line of DivBackward0: {__file__}:")
    trap, *_ = steps(lambda x: torch.where(x > 2, x / (x * 0).detach(), x + BAD).sum(), SKIPS)
    assert trap.diagnosis is not None
    assert trap.diagnosis["op"] != "aten.div"


def offloaded(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x * BAD + 1).sum()


def checkpointed(x: Tensor) -> Tensor:
    loss = checkpoint(lambda x: (x * BAD + 1).sum(), x, use_reentrant=False)
    return torch.as_tensor(loss)


@pytest.mark.parametrize("loss", [offloaded, checkpointed])
def test_what_a_hook_keeps_is_not_read_and_no_later_operation_is_blamed(loss: Loss) -> None:
    trap, *_ = steps(loss, SKIPS, number=1)
    assert trap.diagnosis is not None
    assert "NaN came back to the output of the model" in trap.diagnosis["headline"]
    assert trap.diagnosis["cause"] == "unknown"
    assert "a checkpoint or a hook of the script keeps it" in trap.message


def test_a_mode_of_the_script_around_backward_passes_does_not_keep_ours() -> None:
    model = Positive()
    optimizer = sgd(model, 0.0)
    with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=optimizer):
        take_step(optimizer, FINITE["SqrtBackward0"](model(BATCH)))
        model.has_zero = False
        loss = FINITE["SqrtBackward0"](model(BATCH))
        with torch.autograd.set_detect_anomaly(True):
            loss.backward()
        optimizer.step()
        assert not torch.is_anomaly_enabled()


def test_the_end_of_a_session_ends_the_mode() -> None:
    steps(FINITE["SqrtBackward0"], SKIPS, number=1)
    assert not torch.is_anomaly_enabled()


def test_a_mode_of_the_script_stays() -> None:
    model = Positive()
    optimizer = sgd(model, 0.0)
    loss = FINITE["SqrtBackward0"]
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=optimizer) as session:
            for step in range(2):
                model.has_zero = step == 0
                take_step(optimizer, loss(model(BATCH)))
            (event,) = line_events(session.events)
        assert torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)
    assert event.diagnosis is not None
    assert event.diagnosis["line"] == line_of(loss)


def test_a_mode_that_the_script_sets_meanwhile_is_its_own() -> None:
    model = Positive()
    optimizer = sgd(model, 0.0)
    loss = FINITE["SqrtBackward0"]
    with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=optimizer) as session:
        take_step(optimizer, loss(model(BATCH)))
        model.has_zero = False
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
            take_step(optimizer, loss(model(BATCH)))
            assert torch.is_anomaly_check_nan_enabled()
        take_step(optimizer, loss(model(BATCH)))
        assert not torch.is_anomaly_enabled()
        assert len(line_events(session.events)) == 1


def test_a_trap_that_stops_says_how_to_get_the_line() -> None:
    model = Positive()
    optimizer = sgd(model, 0.0)
    with (
        gradsurgeon.apply(model, rule_file({**WARNS, "then": "raise"}), optimizer=optimizer),
        pytest.raises(gradsurgeon.NonFiniteGradientError) as caught,
    ):
        take_step(optimizer, FINITE["SqrtBackward0"](model(BATCH)))
    hint = "compute it in the forward of the model, or train with `then: warn`, to get its line"
    assert hint in str(caught.value)
    assert not torch.is_anomaly_enabled()


def test_a_gradient_penalty_is_named() -> None:
    torch.manual_seed(0)
    first = nn.Linear(2, 8)
    critic = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        first.bias.sub_(5.0)  # No unit is on: the gradient of the input is 0.
    optimizer = sgd(critic, 0.0)

    def penalty(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        norm = grad.square().sum(1).sqrt()
        return (norm - 1).square().mean()

    with gradsurgeon.apply(critic, rule_file(SKIPS), optimizer=optimizer) as session:
        for _ in range(2):
            point = torch.rand(4, 2).requires_grad_()
            take_step(optimizer, critic(point.detach()).mean() + penalty(point))
        events = session.events
    assert events[0].diagnosis is not None
    assert (
        events[0]
        .diagnosis["headline"]
        .startswith("Inf born in the backward pass outside of the model: aten.sqrt")
    )
    (line, *_) = line_events(events)
    assert line.diagnosis is not None
    assert line.diagnosis["line"] == line_of(penalty) + 2


def test_a_derivative_in_a_penalty_has_the_line_of_its_operation() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model, 0.0)

    def loss(factor: float) -> Tensor:
        x = BATCH.clone().requires_grad_()
        root = (model(x) * factor).square().sqrt().sum()
        (grad,) = torch.autograd.grad(root, x, create_graph=True)
        return torch.as_tensor(root + grad.square().sum())

    with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=optimizer) as session:
        for factor in (0.0, 1.0):
            take_step(optimizer, loss(factor))
        trap, *others = session.events
    (line,) = line_events(others)
    assert trap.diagnosis is not None
    assert trap.diagnosis["headline"].endswith("aten.div (DivBackward0)")
    assert "the line of DivBackward0, in the derivative of SqrtBackward0: " in line.message
    assert line.diagnosis is not None
    assert line.diagnosis["line"] == line_of(loss) + 2
    assert line.diagnosis["headline"].endswith("(DivBackward0, in the derivative of SqrtBackward0)")


def test_a_penalty_before_another_call_is_named() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = sgd(critic, 0.0)

    def penalty(x: Tensor, factor: float) -> Tensor:
        (grad,) = torch.autograd.grad(factor * critic(x).sum(), x, create_graph=True)
        return (grad.square().sum(1).sqrt() - 1).square().mean()

    with gradsurgeon.apply(critic, rule_file(SKIPS), optimizer=optimizer) as session:
        for factor in (0.0, 1.0):
            point = torch.rand(4, 2).requires_grad_()
            first = penalty(point, factor)
            take_step(optimizer, critic(point.detach()).mean() + first)
        trap, *_ = session.events
        (line,) = line_events(session.events)
    assert trap.diagnosis is not None
    assert trap.diagnosis["op"] == "aten.sqrt"
    assert line.diagnosis is not None
    assert line.diagnosis["line"] == line_of(penalty) + 2


def test_an_infinite_factor_that_makes_nan_is_named() -> None:
    torch.manual_seed(0)
    model = Chooser()
    optimizer = sgd(model, 0.0)
    factors = torch.tensor([math.inf, -math.inf, 1.0, 1.0, 1.0, 1.0])
    with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=optimizer) as session:
        take_step(optimizer, (model(BATCH).log_prob(torch.zeros(6)) * factors).mean())
        trap, *_ = session.events
    assert trap.diagnosis is not None
    assert trap.diagnosis["headline"].startswith("the loss was given Inf: the second input of Mul")


ROW = "leave one element of each row unmasked, or leave such rows out before it, not after it"
NOT_FINITE: dict[str, tuple[Loss, str]] = {
    "no target counts": (
        lambda x: F.cross_entropy(x, torch.full((6,), -100)),
        "aten.nll_loss (NllLossBackward0): no target counts, so the mean is 0 / 0: skip the batch",
    ),
    "no element counts": (
        lambda x: x[:0].mean(),
        "aten.mean (MeanBackward0): the mean of nothing is 0 / 0: divide by `max(count, 1)`",
    ),
    "log of a negative far from the end": (
        lambda x: far((x - 100).log()),
        "aten.log (LogBackward0): 0 or less has no logarithm: use `log_softmax`, `xlogy` or `clamp(min=eps)`",
    ),
    "no target counts far from the end": (
        lambda x: far(F.cross_entropy(x, torch.full((6,), -100))),
        "aten.nll_loss (NllLossBackward0): no target counts, so the mean is 0 / 0: skip the batch",
    ),
    "log of a negative": (
        lambda x: (x - 100).log().mean(),
        "aten.log (LogBackward0): 0 or less has no logarithm: use `log_softmax`, `xlogy` or `clamp(min=eps)`",
    ),
    "-Inf of a row that is masked completely": (
        lambda x: x.masked_fill(x < 2, -math.inf).logsumexp(1).sum(),
        f"aten.logsumexp (LogsumexpBackward0): every summand is minus infinity: {ROW}",
    ),
    "Inf of a product": (
        lambda x: ((x + 1e25) @ (x + 1e25).T).mean(),
        "aten.mm (MmBackward0): look at the weights and the input (learning rate, initialization), or run it in float64",
    ),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_a_loss_with_finite_gradients_is_named_with_its_line(case: str) -> None:
    loss, text = NOT_FINITE[case]
    check, line = steps(loss, WARNS, LOOP)
    assert (check.kind, check.rule, check.step) == ("check", "loop", 0)
    what = case.partition("Inf")[1] or "NaN"
    assert check.message.endswith(f"{what} born in the forward pass outside of the model: {text}")
    assert line.diagnosis is not None
    assert line.diagnosis["line"] == line_of(loss)
    assert inspect.getsourcefile(loss) == line.diagnosis["file"]


def test_a_report_names_the_line(tmp_path: Path) -> None:
    model = Positive()
    optimizer = sgd(model, 0.0)
    loss = FINITE["SqrtBackward0"]
    with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=optimizer, record=tmp_path / "run"):
        for step in range(2):
            model.has_zero = step == 0
            take_step(optimizer, loss(model(BATCH)))
    with gradsurgeon.open_run(tmp_path / "run") as run:
        report: Any = gradsurgeon.report.summary(run)
    assert f"{__file__}:{line_of(loss)}" in str(report).splitlines()[0]


class Policy(nn.Module):
    """Returns a distribution, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.layer(x).log(), validate_args=False)


class Chooser(Policy):
    def forward(self, x: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.layer(x))


def test_a_model_that_returns_no_tensor_shows_its_operations_in_the_loss() -> None:
    torch.manual_seed(0)
    model = Policy()
    optimizer = sgd(model, 0.0)
    with gradsurgeon.apply(model, rule_file(SKIPS), optimizer=optimizer) as session:
        for _ in range(2):
            take_step(optimizer, model(BATCH).log_prob(torch.zeros(6)).mean())
        trap, *_ = session.events
        (line,) = line_events(session.events)
    assert trap.diagnosis is not None
    assert trap.diagnosis["op"] == "aten.log"
    assert "the model returned no tensor" in trap.diagnosis["reasons"][-1]
    assert line.diagnosis is not None
    assert line.diagnosis["line"] == line_of(Policy.forward) + 1
