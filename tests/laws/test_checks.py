"""What checks say of trainings: each fault once, with its place and cause, and nothing of a healthy one."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from actions_of_users import forgotten_afterwards
from laws import healthy_loops, trainings
from laws.faulty_loops import FAULTY, NOT_IN_GUIDE, STEPS, norm_that_overflows, row
from laws.healthy_uses import HEALTHY as OTHERS
from laws.trainings import Training, fit, fitted, perceptron
from pairs import slow
from ranks import Json
from small import equal, events_of, fields_of, rule_file, sgd, weights_of
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy
from torch.optim import SGD

import gradsurgeon
from gradsurgeon import CheckError, Event
from gradsurgeon.actions.checks.base import Update

GUIDE = Path(__file__).parents[2] / "rules" / "guide" / "faults.md"
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


HEALTHY = (*healthy_loops.HEALTHY, *OTHERS)
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


# The tensor that the finding names, and its step. The guide has the message.
EXPECTED: dict[str, tuple[str, int]] = {
    "unowned": ("0.weight", 11),
    "learning_rate_zero": ("0.weight", 101),
    "rounded_away": ("2.weight", 11),
    "not_written": ("2.weight", 11),
    "outside_of_the_model": ("a tensor of shape [3]", 29),
    "weights_made_nan": ("0.weight", 0),
    "checkpoint_behind_frozen_layers": ("1.weight", 19),
    "pair_of_zeros": ("lora_a", 10),
    "outside_of_a_clamp": ("0.weight", 10),
    "norm_that_overflows": ("0.weight", 10),
    "rounded_activations": ("0.weight", 10),
    "units_that_are_off": ("0.weight", 10),
    "cut_off_by_detach": ("0.weight", 199),
    "without_autograd": ("0.weight", 199),
    "loss_without_effect": ("0.weight", 199),
    "module_without_optimizer": ("weight", 29),
    "optimizers_that_share": ("0.weight", 7),
    "gradients_that_two_optimizers_use": ("0.weight", 5),
    "never_cleared": ("0.weight", 3),
    "cleared_too_early": ("0.weight", 3),
    "cleared_for_each_micro_batch": ("", 11),
    "frozen_and_still_moving": ("0.weight", 12),
    "clipped_after_the_update": ("", 10),
    "clipped_before_the_pass": ("", 10),
    "clipped_while_scaled": ("", 3),
    "stepped_without_the_scaler": ("", 4),
    "loss_over_nothing": ("", 7),
    "left_in_evaluation_mode": ("", 12),
    "untied": ("0.weight", 0),
    "copied_units": ("0.weight", 1),
    "autocast_around_the_loop": ("0.weight", 3),
    "frozen_by_attribute": ("0", 0),
    "softmax_before_cross_entropy": ("", 0),
}


@pytest.mark.parametrize(
    "make",
    [make for some in FAULTY.values() for make in (*some[:3], *slow(*some[3:]))],
    ids=lambda make: make.__name__,
)
def test_fault_is_told_once_with_its_place_and_cause(make: Callable[[], Training]) -> None:
    event = only(make())
    action = next(action for action, some in FAULTY.items() if make in some)
    assert f"check-{event.rule}" == action
    assert (event.name, event.step) == EXPECTED[make.__name__]
    # The guide has the messages: run `python -m laws.faulty_loops` in `tests` to write it anew.
    is_shown = row(make, action, event.message) in GUIDE.read_text(encoding="utf-8")
    assert is_shown == (make not in NOT_IN_GUIDE)


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


# With the second one, passes of another loss begin in between.
@pytest.mark.parametrize(
    ("make", "names", "source"),
    [
        (healthy_loops.annealed_divergence, "1.weight, 1.bias", "0.0 * "),
        (healthy_loops.reward_that_has_not_come, "actor.weight, actor.bias", "* advantages"),
    ],
    ids=["one loss", "two losses"],
)
def test_a_factor_of_0_is_a_fact(make: Callable[[], Training], names: str, source: str) -> None:
    training = make()
    with gradsurgeon.apply(training.model, CHECKS, optimizer=training.optimizers) as session:
        training.loop()
    (event,) = session.events
    name = names.partition(",")[0]
    assert (event.kind, event.rule, event.step, event.name) == ("fact", "update", 10, name)
    before, _, after = event.message.partition(f" at {healthy_loops.__file__}:")
    assert before == f"{names} get gradients of exactly 0: they become 0 in MulBackward0"
    line, _, reason = after.partition(", ")
    assert source in linecache.getline(healthy_loops.__file__, int(line))
    assert reason == "by a factor of 0, a mask, an empty batch or a term at its minimum"


@pytest.mark.parametrize("at", ["backward", "step"])
def test_a_rule_that_makes_gradients_0_is_no_fault(at: str) -> None:
    model = perceptron()
    rule = {"id": "off", "action": "zero", "params": "0.*", "at": at}
    training = fitted(model, sgd(model, 0.01), fit(model), healthy_loops.VERY_LONG)
    assert told(training, rule_file(*CHECKS["rules"], rule)) == []


def test_one_pass_is_followed_and_stays_as_it_is() -> None:
    noted: list[bool] = []

    def trained(rules: Json) -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(0)
        training = norm_that_overflows()
        with gradsurgeon.apply(training.model, rules, optimizer=training.optimizers) as session:
            layer = training.model.get_submodule("0")
            layer.register_forward_hook(lambda *_: noted.append(torch.is_anomaly_enabled()))
            training.loop()
            told = fields_of(session, "kind", "step", "message", rule="update")
        return weights_of(training.model), told

    plain, _ = trained(rule_file({"id": "update", "action": "norm-log", "params": "*"}))
    weights, (finding, line) = trained(CHECKS)
    assert equal(weights, plain)
    assert [step for step, is_on in enumerate(noted) if is_on] == [STEPS + 11]
    assert finding[:2] == ("check", 10)
    assert line[:2] == ("notice", 10)
    assert ", in forward: return large * large.square()" in line[2]


def test_a_weight_that_may_have_been_nan_before_its_first_update_is_no_fault_of_the_update() -> (
    None
):
    words = nn.Embedding(4, 3)
    model = nn.Sequential(words, nn.Linear(3, 1))
    with torch.no_grad():
        words.weight[3] = torch.nan
    training = fitted(model, sgd(model, 0.01), lambda _: model(torch.arange(3)).sum(), 3)
    (event,) = told(training)
    assert event.message.endswith("or checkpoint, in case NaN was there before")


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


class Measured(gradsurgeon.Check):
    """Asks for the norms of all gradients, counts the calls that measure them, and reports the third time."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def before_edits(self, update: Update) -> Iterable[gradsurgeon.Finding]:
        seen: list[str] = []
        sys.setprofile(lambda frame, _event, _arg: seen.append(frame.f_code.co_name))
        try:
            norms = update.norms([*update.grads])
        finally:
            sys.setprofile(None)
        self.calls.append(seen.count("_joined"))
        assert norms.tolist() == pytest.approx([float(g.norm()) for g in update.grads.values()])
        if len(self.calls) == 3:
            yield gradsurgeon.Finding("often", "norms were asked for three times")


@pytest.mark.parametrize("trapped", [True, False])
def test_check_of_a_user_gets_the_norms_that_a_trap_has_measured(*, trapped: bool) -> None:
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
        event = only(training, rule_file(*rules))
    assert (event.rule, event.step) == ("own", 2)
    assert "norms were asked for three times" in event.message
    assert [bool(calls) for calls in check.calls] == [not trapped] * 3


def test_a_loss_that_is_the_logarithm_of_a_negative_number_is_no_mean_over_nothing() -> None:
    model = nn.Linear(2, 1)

    def loss(step: int) -> Tensor:
        outputs: Tensor = model(torch.ones(3, 2))
        return (outputs - 100).log().mean() if step == 8 else outputs.square().mean()

    rules = rule_file({"id": "loop", "action": "check-loop", "params": "*"})
    event = only(fitted(model, sgd(model), loss, 12), rules)
    assert event.step == 8
    assert event.message.endswith(
        "the loss of step 8 (made by `mean`) was NaN although all gradients are finite. Its graph does not show which "
        "operation made it: look at what it is made of"
    )


def test_what_follows_from_gradients_that_were_not_finite_is_told_by_the_trap_alone() -> None:
    model = nn.Linear(2, 1)
    bad = torch.full((3, 1), float("nan"))

    def loss(step: int) -> Tensor:
        outputs: Tensor = model(torch.ones(3, 2))
        return (outputs * bad).sum() if step == 1 else outputs.sum()

    train = fitted(model, sgd(model), loss, 6)
    checks = [
        {"id": name, "action": name, "params": "*"} for name in ("check-loop", "check-update")
    ]
    assert told(train, rule_file(*checks)) == []


def test_probabilities_outside_of_a_clamp_are_found() -> None:
    model = nn.Linear(16, 1)
    targets = torch.arange(32.0).remainder(2)[:, None]

    def loss(_step: int) -> Tensor:
        outputs = (model(torch.randn(32, 16)) - 50).clamp(0.001, 0.999)
        return binary_cross_entropy(outputs, targets)

    event = only(fitted(model, sgd(model), loss, STEPS))
    assert "they become 0 in ClampBackward1, because every element is out of" in event.message


def _beside(other: nn.Module, *, clears: bool) -> Training:
    """Return a training with backward passes through another model, which no optimizer updates."""
    model = perceptron()
    loss = fit(model)
    side = fit(other)

    def both(step: int) -> Tensor:
        if clears:
            other.zero_grad()
        side(step).backward()
        return loss(step)

    return fitted(model, sgd(model, 0.01), both, STEPS)


def test_passes_through_a_model_that_nothing_updates_are_told() -> None:
    other = nn.Linear(16, 4)
    event = only(_beside(other, clears=True))
    assert event.message.endswith(
        "weight, bias, 2 of 2 parameters of a Linear, get gradients and did not move in 20 steps: no optimizer owns them. Give them to an "
        "optimizer, or set requires_grad to False"
    )


@pytest.mark.parametrize("clears", [False, True], ids=["gradients wait", "in evaluation mode"])
def test_gradients_that_may_be_wanted_are_no_finding(*, clears: bool) -> None:
    other = nn.Linear(16, 4).train(not clears)
    assert told(_beside(other, clears=clears)) == []


def test_a_model_of_two_sessions_is_told_once() -> None:
    first, second, decoder = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(4, 4)
    other = sgd(second, 0.01)

    def update(_step: int) -> None:
        other.step()
        other.zero_grad()

    loss = fit(lambda x: decoder(first(x) + second(x)))
    training = fitted(first, sgd(first, 0.01), loss, STEPS, after=update)
    with gradsurgeon.apply(second, CHECKS, optimizer=other) as session:
        events = told(training)
    assert len([*events, *events_of(session, "check")]) == 1


def test_a_late_clip_of_two_models_of_one_optimizer_is_found() -> None:
    model = perceptron()
    params = [*model.parameters(), *nn.Linear(2, 2).parameters()]

    def clip(_step: int) -> None:
        nn.utils.clip_grad_norm_(params, 0.01)

    training = fitted(model, SGD(params, 0.01), fit(model), STEPS, after=clip)
    assert "`clip_grad_norm_` at" in only(training).message
