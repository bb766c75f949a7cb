"""What checks say of trainings: each fault once, with its place and cause, and nothing of a healthy one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from actions_of_users import forgotten_afterwards
from laws import faulty_loops, healthy_loops, trainings
from laws.faulty_loops import FAULTY, STEPS, row
from laws.healthy_loops import HEALTHY
from laws.trainings import Training, fit, fitted, perceptron
from pairs import slow
from ranks import Json
from small import equal, events_of, rule_file, sgd, take_step, weights_of
from torch import nn
from torch.optim import SGD

import gradsurgeon
from gradsurgeon import CheckError, Event
from gradsurgeon.actions.checks.base import Pass, Update

GUIDE = Path(__file__).parents[2] / "rules" / "guide" / "checks.md"
CHECKS: Json = rule_file(  # With a trap, as in the pack: it also sees evaluations.
    {
        "id": "nans",
        "action": "nan-trap",
        "params": "*",
        "then": "warn",
        "give_up_after": "never",
    },
    *(
        {"id": action.removeprefix("check-"), "action": action, "params": "*"}
        for action in ("check-update", "check-loop", "check-structure", "check-ranks")
    ),
)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*rule nans:gradsurgeon.GradSurgeonWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]


def told(training: Training, rules: Json = CHECKS) -> list[Event]:
    """Train under the checks; return their events."""
    with gradsurgeon.apply(training.model, rules, optimizer=training.optimizers or None) as session:
        training.loop()
    return events_of(session, "check")


def only(training: Training, rules: Json = CHECKS) -> Event:
    (event,) = told(training, rules)
    return event


# `deep_sigmoids` has a fault that a check names rightly: its gradients are too small to move a weight.
SOUND = [
    of
    for name, of in vars(trainings).items()
    if inspect.isfunction(of)
    and of.__module__ == trainings.__name__
    and not inspect.signature(of).parameters
    and name not in ("deep_sigmoids", "perceptron")
]


@pytest.mark.parametrize(
    "make",
    [*HEALTHY[7::8], *slow(*(make for place, make in enumerate(HEALTHY) if place % 8 != 7))],
    ids=lambda make: make.__name__,
)
def test_healthy_loop_gets_no_finding(make: Callable[[], Training]) -> None:
    assert told(make()) == []


@pytest.mark.slow
@pytest.mark.parametrize("make", SOUND, ids=lambda make: make.__name__)
def test_training_without_a_fault_of_its_loop_gets_no_finding(make: Callable[[], Training]) -> None:
    assert told(make()) == []


@pytest.mark.slow
def test_vanishing_gradients_are_told_as_updates_that_are_rounded_away() -> None:
    events = told(trainings.deep_sigmoids())
    assert events
    assert all("float32 rounds each update away" in event.message for event in events)


# What the finding names, and words of its message.
EXPECTED: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "unowned": (
        "0.weight, 0.bias, 2.weight and 1 more",
        11,
        ("did not move in 10 updates", "no optimizer that has stepped owns them"),
    ),
    "learning_rate_zero": ("0.weight, 0.bias", 101, ("in 100 updates", "the learning rate is 0")),
    "rounded_away": ("2.weight", 11, ("bfloat16 rounds each update away", "rate 1.0e-05")),
    "not_written": (
        "2.weight",
        11,
        ("the learning rate is 1.0e-02", "its step leaves it unchanged"),
    ),
    "outside_of_the_model": ("a tensor of shape [3]", 29, ("no module and no optimizer",)),
    "weights_made_nan": (
        "0.weight",
        0,
        ("non-finite although its gradients were finite", "eps of the optimizer"),
    ),
    "checkpoint_behind_frozen_layers": (
        "1.weight, 1.bias",
        19,
        (
            "2 of 4 trained parameters",
            "in 20 updates",
            "a reentrant checkpoint",
            "use_reentrant=False",
        ),
    ),
    "pair_of_zeros": ("lora_a, lora_b", 19, ("gradients of exactly 0", "random numbers")),
    "cut_off_by_detach": (
        "0.weight, 0.bias",
        199,
        ("2 of 4 trained parameters", "in 200 updates", "`detach()`"),
    ),
    "without_autograd": ("0.weight, 0.bias", 199, ("they run, and the loss", "`torch.no_grad()`")),
    "loss_without_effect": (
        "0.weight, 0.bias, 2.weight and 1 more",
        199,
        (
            "4 of 4 trained parameters",
            "in 200 updates",
            "a loss without effect",
        ),
    ),
    "module_without_optimizer": (
        "weight, bias",
        29,
        ("no optimizer owns them", "2 of 2 parameters of a Linear"),
    ),
    "optimizers_that_share": (
        "0.weight, 0.bias, 2.weight and 3 more",
        7,
        ("belong to 2 optimizers (Adam and Adam)", "the parameters of its own model"),
    ),
    "never_cleared": (
        "0.weight",
        3,
        ("before the update of step 2", "that of 0.weight for one", "optimizer.zero_grad()"),
    ),
    "cleared_too_early": (
        "0.weight",
        3,
        ("0.weight for one", "all of them were gone", "not between `backward()` and"),
    ),
    "clipped_while_scaled": ("", 3, ("to a norm of 0.5", "the loss scale of 4096", "unscale_")),
    "loss_over_nothing": (
        "",
        7,
        ("the loss of step 7 (made by `nll_loss`) was NaN", "A mean over nothing"),
    ),
    "left_in_evaluation_mode": ("", 12, ("since step 10", "evaluation mode", "model.train()")),
    "untied": ("0.weight, 1.weight", 0, ("equal in every element but two tensors",)),
    "copied_units": ("0.weight, 2.weight", 1, ("all 16 units", "random numbers")),
}


@pytest.mark.parametrize(
    "make",
    [make for some in FAULTY.values() for make in (*some[:3], *slow(*some[3:]))],
    ids=lambda make: make.__name__,
)
def test_fault_is_told_once_with_its_place_and_cause(make: Callable[[], Training]) -> None:
    event = only(make())
    place, step, words = EXPECTED[make.__name__]
    action = next(action for action, some in FAULTY.items() if make in some)
    assert f"check-{event.rule}" == action
    assert event.step == step
    assert event.name == place.partition(",")[0]
    assert [word for word in (place, *words) if word not in event.message] == []
    # The guide has the message of every fault: run `python -m laws.faulty_loops` in `tests` to write it anew.
    assert row(make, action, event.message) in GUIDE.read_text(encoding="utf-8")


def test_change_of_mode_is_told_if_evaluations_cannot_be_seen() -> None:
    training = healthy_loops.last_stage_in_evaluation_mode()
    event = only(training, rule_file(*CHECKS["rules"][1:]))
    assert "has run in evaluation mode" in event.message


def test_rule_that_freezes_is_named() -> None:
    model = perceptron()
    frozen = {"id": "cold", "action": "freeze", "params": "0.*"}
    rules = rule_file(*CHECKS["rules"], frozen)
    training = fitted(model, sgd(model, 0.01), fit(model), STEPS)
    event = only(training, rules)
    assert "0.weight, 0.bias did not move" in event.message
    assert "rule cold freezes them" in event.message


def test_a_late_sample_does_not_call_the_gradients_since_the_last_sample_finite() -> None:
    first = nn.Linear(4, 8)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 1))
    optimizer = sgd(model, 0.01)

    def spoil(step: int) -> None:
        if step == 15:
            first.weight.grad = torch.full_like(first.weight, torch.inf)

    # The output stays finite, because `tanh` saturates.
    training = fitted(
        model, optimizer, lambda _: model(torch.ones(2, 4)).square().sum(), 25, before=spoil
    )
    event = next(event for event in told(training) if event.rule == CHECKS["rules"][1]["id"])
    assert event.step == 20
    assert "0.weight became non-finite within the last 10 updates, and" in event.message


def test_updates_that_a_trap_skips_are_named() -> None:
    model = perceptron()
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    rules = rule_file(*CHECKS["rules"][1:], {**trap, "give_up_after": 1000})
    loss_at = fit(model)
    stray = nn.Parameter(torch.zeros(1))
    model.register_parameter("stray", stray)
    optimizer = sgd(model, 0.01)
    training = fitted(model, optimizer, lambda step: loss_at(step) + stray.sqrt().sum(), STEPS)
    event = only(training, rules)
    assert "0.weight, 0.bias" in event.message
    assert "all these updates were skipped" in event.message


def test_trained_tensor_with_an_optimizer_of_its_own_is_not_reported() -> None:
    model = perceptron()
    loss_at, stray = fit(model), nn.Parameter(torch.ones(3))
    mine = SGD([stray], lr=0.0)
    optimizer = sgd(model, 0.01)
    assert told(fitted(model, optimizer, lambda s: loss_at(s) + stray.sum(), STEPS)) == []
    assert mine.param_groups


def test_weights_that_should_stay() -> None:
    rule = {"id": "stays", "action": "check-update", "params": "0.*", "moved": {"max": 0}}
    rules = rule_file(rule)
    model = perceptron()
    event = only(fitted(model, sgd(model, 0.01), fit(model), 5), rules)
    assert "0.weight, 0.bias should stay as at step 0" in event.message
    assert "changed by the update of step 0" in event.message
    assert told(fitted(model, sgd(model[4], 0.01), fit(model), 5), rules) == []


def test_adapters_that_should_move() -> None:
    rule = {
        "id": "learns",
        "action": "check-update",
        "params": "lora_*",
        "moved": {"min": 0.05, "within": 10},
        "then": "raise",
    }
    rules = rule_file(rule)
    assert told(healthy_loops.lora_pair(), rules) == []
    training = healthy_loops.lora_pair()
    training.optimizers[0].param_groups[0]["lr"] = 0.0
    with pytest.raises(CheckError) as caught:
        told(training, rules)
    assert (caught.value.rule, caught.value.step) == ("learns", 9)
    assert "lora_a.weight, lora_b.weight should move" in str(caught.value)


def test_steps_limit_a_check() -> None:
    model = perceptron()
    rules = rule_file({**CHECKS["rules"][1], "steps": {"to": 5}})
    training = fitted(model, sgd(model[4], 0.01), fit(model), STEPS)
    assert told(training, rules) == []


def test_checks_change_nothing() -> None:
    weights = []
    for rules in (None, CHECKS):
        torch.manual_seed(0)
        training = healthy_loops.copied_layers()
        if rules is None:
            training.loop()
        else:
            told(training, rules)
        weights.append(weights_of(training.model))
    assert equal(*weights)


class Flat(gradsurgeon.Check):
    """Finds losses that stay as they are."""

    def __init__(self) -> None:
        self._seen: list[float] = []

    def after_pass(self, done: Pass) -> Iterable[gradsurgeon.Finding]:
        if done.loss is not None:
            self._seen.append(float(done.loss))
            if len(self._seen) == 5 and len(set(self._seen)) == 1:
                yield gradsurgeon.Finding("flat", f"the loss has been {self._seen[0]:g} five times")


class Measured(gradsurgeon.Check):
    """Asks for the norms of all gradients, and counts the calls that measure them."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def before_edits(self, update: Update) -> Iterable[gradsurgeon.Finding]:
        seen: list[str] = []
        sys.setprofile(lambda frame, _event, _arg: seen.append(frame.f_code.co_name))
        try:
            norms = update.norms([*update.grads])
        finally:
            sys.setprofile(None)
        self.calls.append(seen.count("by_segments"))
        assert norms.tolist() == pytest.approx([float(g.norm()) for g in update.grads.values()])
        return ()


@pytest.mark.parametrize("trapped", [True, False])
def test_check_gets_the_norms_that_a_trap_has_measured(*, trapped: bool) -> None:
    check = Measured()

    with forgotten_afterwards():

        class MeasuredRule(gradsurgeon.CheckRule):
            """Ask for norms."""

            action: Literal["check-measured"] = "check-measured"

            def compile(self) -> gradsurgeon.Examination:
                return gradsurgeon.Examination(check, self.then)

        rule = {"id": "own", "action": f"{MeasuredRule.__module__}:check-measured", "params": "*"}
        model = nn.Linear(4, 1)
        rules = [*(CHECKS["rules"][:1] if trapped else ()), rule]
        training = fitted(
            model,
            sgd(model),
            lambda _step: model(torch.ones(2, 4)).sum(),
            3,
        )
        assert told(training, rule_file(*rules)) == []
    assert [bool(calls) for calls in check.calls] == [not trapped] * 3


@pytest.fixture
def flat_rule() -> Iterator[str]:
    """Define an action for one test."""
    with forgotten_afterwards():

        class FlatRule(gradsurgeon.CheckRule):
            """Find losses that stay as they are."""

            action: Literal["check-flat"] = "check-flat"

            def compile(self) -> gradsurgeon.Examination:
                return gradsurgeon.Examination(Flat(), self.then)

        yield f"{FlatRule.__module__}:check-flat"


def test_check_of_a_user(flat_rule: str) -> None:
    model = nn.Linear(4, 1)
    rule = {"id": "flat", "action": flat_rule, "params": "*", "then": "raise"}
    ones = torch.ones(8, 4)
    optimizer = sgd(model, 0.0)
    training = fitted(model, optimizer, lambda _step: model(ones).sum() * 0 + 3, 10)
    with pytest.raises(CheckError, match="the loss has been 3 five times") as caught:
        told(training, rule_file(rule))
    assert caught.value.step == 4
    assert told(healthy_loops.zero_head(), rule_file(rule)) == []


def test_report_tells_faults_and_traps_apart(tmp_path: Path) -> None:
    training = faulty_loops.never_cleared()
    path = tmp_path / "run"
    with gradsurgeon.apply(training.model, CHECKS, optimizer=training.optimizers, record=path):
        training.loop()
    with gradsurgeon.open_run(path) as run:
        report = gradsurgeon.report.summary(run)
    band, words = str(report).splitlines()[:2]
    assert band.startswith("look: step 3, rule loop: the update of step 3 used gradients")
    assert words == "ended, checks found 1 fault"


def test_a_loss_that_is_the_logarithm_of_a_negative_number_is_no_mean_over_nothing() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    rules = rule_file({"id": "loop", "action": "check-loop", "params": "*"})
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        for step in range(12):
            outputs = model(torch.ones(3, 2))
            loss = (outputs - 100).log().mean() if step == 8 else outputs.square().mean()
            take_step(optimizer, loss)
    (event,) = session.events
    assert event.step == 8
    assert event.message.endswith(
        "the loss of step 8 (made by `mean`) was NaN although all gradients are finite. Two things are NaN with finite "
        "gradients: a mean over nothing (an empty batch) and the logarithm of a negative number"
    )
