"""What checks say of trainings: each fault once, with its place and cause, and nothing of a healthy one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import healthy_loops, trainings
from laws.healthy_loops import HEALTHY
from laws.trainings import Training, fitted, perceptron, regression
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW

import gradsurgeon
from gradsurgeon import CheckError, Event

CHECKS = {
    "version": 1,
    "rules": [
        {"id": name, "action": f"check-{name}", "params": "*"}
        for name in ("update", "loop", "structure", "ranks")
    ],
}
STEPS = 40


def told(training: Training, rules: dict[str, Any] = CHECKS) -> list[Event]:
    """Train under the checks; return their events."""
    with gradsurgeon.apply(training.model, rules, optimizer=training.optimizers or None) as session:
        training.loop()
    return [event for event in session.events if event.kind == "check"]


def only(training: Training, rules: dict[str, Any] = CHECKS) -> Event:
    (event,) = told(training, rules)
    return event


def names(event: Event, of: Training) -> set[str]:
    known = [name for name, _ in of.model.named_parameters()]
    return {
        name for name in known if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", event.message)
    }


# `deep_sigmoids` has a fault that a check names rightly: its gradients are too small to move a weight.
SOUND = [
    of
    for name, of in vars(trainings).items()
    if inspect.isfunction(of)
    and of.__module__ == trainings.__name__
    and not inspect.signature(of).parameters
    and name not in ("deep_sigmoids", "perceptron")
]


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_healthy_loop_gets_no_finding(make: Callable[[], Training]) -> None:
    torch.manual_seed(0)
    assert told(make()) == []


@pytest.mark.slow
@pytest.mark.parametrize("make", SOUND, ids=lambda make: make.__name__)
def test_training_without_a_fault_of_its_loop_gets_no_finding(make: Callable[[], Training]) -> None:
    torch.manual_seed(0)
    assert told(make()) == []


def test_vanishing_gradients_are_told_as_updates_that_are_rounded_away() -> None:
    torch.manual_seed(0)
    events = told(trainings.deep_sigmoids())
    assert events
    assert all("float32 rounds each update away" in event.message for event in events)


def _loss(model: nn.Module) -> Callable[[int], Tensor]:
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(model(inputs), targets)

    return loss_at


class TestUpdates:
    def test_parameter_without_an_optimizer(self) -> None:
        model = perceptron()
        training = fitted(model, SGD(model[4].parameters(), lr=1e-2), _loss(model), STEPS)
        event = only(training)
        assert names(event, training) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert "did not move in 10 updates" in event.message
        assert "no optimizer that has stepped owns it" in event.message

    def test_learning_rate_of_zero(self) -> None:
        model = perceptron()
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[4].parameters()}]
        optimizer = SGD([*groups, {"params": model[2].parameters()}], lr=1e-2)
        training = fitted(model, optimizer, _loss(model), STEPS)
        event = only(training)
        assert names(event, training) == {"0.weight", "0.bias"}
        assert "its learning rate is 0" in event.message

    def test_dtype_that_rounds_updates_away(self) -> None:
        model = perceptron().bfloat16()
        batch = regression()
        with torch.no_grad():
            model[2].weight.copy_(model[2].weight.sign() * (0.3 + torch.rand(32, 32)))

        def loss_at(_step: int) -> Tensor:
            inputs, targets = batch()
            return functional.mse_loss(model(inputs.bfloat16()).float(), targets)

        training = fitted(model, AdamW(model.parameters(), lr=1e-5), loss_at, STEPS)
        event = only(training)
        assert "2.weight" in names(event, training)
        assert "bfloat16 rounds each update away" in event.message
        assert "learning rate 1.0e-05" in event.message

    def test_step_that_does_not_write(self) -> None:
        model = perceptron()

        class Forgetful(SGD):
            def step(self) -> None:
                kept = model[2].weight.detach().clone()
                super().step()
                model[2].weight.data.copy_(kept)

        training = fitted(model, Forgetful(model.parameters(), lr=1e-2), _loss(model), STEPS)
        event = only(training)
        assert names(event, training) == {"2.weight"}
        assert "its step leaves it as it is" in event.message

    def test_rule_that_freezes(self) -> None:
        model = perceptron()
        frozen = {"id": "cold", "action": "freeze", "params": "0.*"}
        rules = {"version": 1, "rules": [*CHECKS["rules"], frozen]}
        training = fitted(model, SGD(model.parameters(), lr=1e-2), _loss(model), STEPS)
        event = only(training, rules)
        assert names(event, training) == {"0.weight", "0.bias"}
        assert "rule cold freezes it" in event.message

    def test_trained_tensor_outside_of_the_model(self) -> None:
        model = perceptron()
        loss_at, stray = _loss(model), nn.Parameter(torch.ones(3))
        training = fitted(
            model,
            SGD(model.parameters(), lr=1e-2),
            lambda step: loss_at(step) + (stray - 2).square().sum(),
            STEPS,
        )
        event = only(training)
        assert "a tensor of shape [3]" in event.message
        assert "belongs to no module and no optimizer" in event.message

    def test_trained_tensor_outside_of_the_model_with_an_optimizer(self) -> None:
        model = perceptron()
        loss_at, stray = _loss(model), nn.Parameter(torch.ones(3))
        mine = SGD([stray], lr=0.0)
        training = fitted(
            model,
            SGD(model.parameters(), lr=1e-2),
            lambda step: loss_at(step) + (stray - 2).square().sum(),
            STEPS,
        )
        assert told(training) == []
        assert mine.param_groups

    def test_weights_that_an_update_makes_nan(self) -> None:
        model = perceptron().half()
        batch = regression()

        def loss_at(_step: int) -> Tensor:
            inputs, targets = batch()
            out = model(inputs.half())
            return (out[:, 0] - targets[:, 0].half()).float().square().mean()

        training = fitted(model, Adam(model.parameters(), lr=1e-3), loss_at, 1)
        event = only(training)
        assert "4.weight" in names(event, training)
        assert "eps 1e-08 of the optimizer is 0 in float16" in event.message
        assert event.step == 0


class TestMoved:
    def test_base_that_should_stay(self) -> None:
        model = perceptron()
        rule = {"id": "stays", "action": "check-update", "params": "0.*", "moved": {"max": 0}}
        rules = {"version": 1, "rules": [rule]}
        training = fitted(model, SGD(model.parameters(), lr=1e-2), _loss(model), 5)
        event = only(training, rules)
        assert names(event, training) == {"0.weight", "0.bias"}
        assert "should stay as at step 0 and changed by the update of step 0" in event.message
        quiet = fitted(perceptron(), SGD(perceptron().parameters(), lr=1e-2), _loss(model), 5)
        assert told(quiet, rules) == []

    def test_adapters_that_should_move(self) -> None:
        training = healthy_loops.lora_pair()
        rule = {
            "id": "learns",
            "action": "check-update",
            "params": "lora_*",
            "moved": {"min": 0.05, "within": 10},
            "then": "raise",
        }
        rules = {"version": 1, "rules": [rule]}
        assert told(training, rules) == []
        training = healthy_loops.lora_pair()
        training.optimizers[0].param_groups[0]["lr"] = 0.0
        with pytest.raises(CheckError) as caught:
            told(training, rules)
        assert caught.value.rule == "learns"
        assert caught.value.step == 9
        assert "lora_a.weight, lora_b.weight should move" in str(caught.value)


class TestLoops:
    def test_gradients_that_are_never_cleared(self) -> None:
        model = perceptron()
        optimizer, loss_at = SGD(model.parameters(), lr=1e-5), _loss(model)

        def loop() -> None:
            for step in range(STEPS):
                loss_at(step).backward()
                optimizer.step()

        event = only(Training(model, [optimizer], loop))
        assert event.step == 3
        assert "used gradients from before the update of step 2" in event.message
        assert "optimizer.zero_grad()" in event.message

    def test_gradients_that_are_gone_at_the_update(self) -> None:
        model = perceptron()
        optimizer, loss_at = SGD(model.parameters(), lr=1e-2), _loss(model)

        def loop() -> None:
            for step in range(STEPS):
                loss_at(step).backward()
                optimizer.zero_grad()
                optimizer.step()

        event = only(Training(model, [optimizer], loop))
        assert "all gradients were gone" in event.message
        assert "not between `backward()` and `step()`" in event.message

    def test_clip_of_scaled_gradients(self) -> None:
        model = perceptron()
        optimizer, loss_at = SGD(model.parameters(), lr=1e-2), _loss(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

        def loop() -> None:
            for step in range(STEPS):
                optimizer.zero_grad()
                scaler.scale(loss_at(step)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()

        event = only(Training(model, [optimizer], loop))
        assert "to a norm of 0.5 while they still carry the loss scale of 4096" in event.message
        assert "scaler.unscale_(optimizer)" in event.message

    def test_loss_over_nothing(self) -> None:
        model = nn.Linear(16, 4)

        def loss_at(step: int) -> Tensor:
            labels = torch.full((8,), -100) if step == 7 else torch.zeros(8, dtype=torch.long)
            return functional.cross_entropy(model(torch.randn(8, 16)), labels)

        event = only(fitted(model, SGD(model.parameters(), lr=1e-2), loss_at, STEPS))
        assert event.step == 7
        assert "the loss of step 7 was NaN although all gradients are finite" in event.message
        assert "it came out of nll_loss" in event.message

    def test_model_left_in_evaluation_mode(self) -> None:
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4))
        optimizer = SGD(model.parameters(), lr=1e-2)

        def after(step: int) -> None:
            if step == 9:
                model.eval()

        event = only(fitted(model, optimizer, _loss(model), STEPS, after=after))
        assert (
            "since step 10 each forward pass that feeds an update has run in evaluation mode"
            in event.message
        )
        assert "model.train()" in event.message


class TestStructure:
    def test_weights_that_were_tied(self) -> None:
        embed, head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        head.weight = nn.Parameter(embed.weight.detach().clone())
        model = nn.Sequential(embed, head)

        def loss_at(_step: int) -> Tensor:
            words = torch.randint(30, (32,))
            return functional.cross_entropy(model(words), words.roll(1))

        training = fitted(model, SGD(model.parameters(), lr=0.1), loss_at, STEPS)
        event = only(training)
        assert names(event, training) == {"0.weight", "1.weight"}
        assert "equal in every element but two tensors" in event.message

    def test_units_that_are_copies(self) -> None:
        model = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
        )
        for param in model.parameters():
            nn.init.constant_(param, 0.1)

        def loss_at(_step: int) -> Tensor:
            inputs = torch.randn(32, 8)
            return functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())

        training = fitted(model, SGD(model.parameters(), lr=0.05), loss_at, STEPS)
        event = only(training)
        assert names(event, training) == {"0.weight", "2.weight"}
        assert "all 16 units" in event.message


def test_steps_limit_a_check() -> None:
    model = perceptron()
    rules = {"version": 1, "rules": [{**CHECKS["rules"][0], "steps": {"to": 5}}]}
    training = fitted(model, SGD(model[4].parameters(), lr=1e-2), _loss(model), STEPS)
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
        weights.append([param.detach().clone() for param in training.model.parameters()])
    assert all(map(torch.equal, *weights))
