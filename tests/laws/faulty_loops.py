"""Trainings with a fault that a check finds, for `test_checks` and for the table in the guide.

The docstring of each function is the fault in a few words. Run this file as a script to write the table anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from laws.trainings import Training, adam, fit, fitted, perceptron, regression, scaled
from ranks import Json
from small import relu_net, sgd, tanh_net
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

STEPS = 40
# What another batch may reach is given two hundred updates.
LONG = 201


def unowned() -> Training:
    """parameters that no optimizer has"""
    model = perceptron()
    return fitted(model, sgd(model[4], 0.01), fit(model), STEPS)


def learning_rate_zero() -> Training:
    """a learning rate of 0 in one group"""
    model = perceptron()
    groups: list[Json] = [{"params": part.parameters()} for part in (model[:2], model[2:])]
    groups[0]["lr"] = 0.0
    return fitted(model, SGD(groups, lr=1e-2), fit(model), 3 * STEPS)


def rounded_away() -> Training:
    """updates too small for the dtype of the weights"""
    model = perceptron().bfloat16()
    with torch.no_grad():
        weight = model.get_parameter("2.weight")
        weight.copy_(weight.sign() * (0.3 + torch.rand(32, 32)))
    loss_at = fit(lambda inputs: model(inputs.bfloat16()).float())
    return fitted(model, AdamW(model.parameters(), lr=1e-5), loss_at, STEPS)


def not_written() -> Training:
    """an optimizer that does not write a parameter"""
    model = perceptron()

    class Forgetful(SGD):
        def step(self, closure: Any = None) -> Any:
            weight = model.get_parameter("2.weight").detach()
            kept = weight.clone()
            super().step(closure)
            weight.copy_(kept)

    return fitted(model, Forgetful(model.parameters(), lr=1e-2), fit(model), STEPS)


def outside_of_the_model() -> Training:
    """a trained tensor that is in no module and no optimizer"""
    model = perceptron()
    loss_at = fit(model)
    stray = nn.Parameter(torch.ones(3))
    optimizer = sgd(model, 0.01)
    return fitted(model, optimizer, lambda step: loss_at(step) + stray.square().sum(), STEPS)


def weights_made_nan() -> Training:
    """an update that makes NaN of finite gradients"""
    model = perceptron().half()
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        out: Tensor = model(inputs.half())
        return (out[:, 0] - targets[:, 0].half()).float().square().mean()

    return fitted(model, adam(model), loss_at, 1)


def checkpoint_behind_frozen_layers() -> Training:
    """a reentrant checkpoint whose input needs no gradient"""
    embed = nn.Embedding(30, 16)
    body = nn.Linear(16, 16)
    head = nn.Linear(16, 30)
    model = nn.Sequential(embed.requires_grad_(False), body, head)

    def loss_at(_step: int) -> Tensor:
        words = torch.randint(30, (32,))
        hidden = checkpoint(body, embed(words), use_reentrant=True)
        return functional.cross_entropy(head(hidden), words)

    trained = [*body.parameters(), *head.parameters()]
    return fitted(model, AdamW(trained, lr=1e-2), loss_at, STEPS)


def pair_of_zeros() -> Training:
    """a LoRA pair that begins at zero"""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16)
            self.head = nn.Linear(16, 4)
            self.base.requires_grad_(False)
            self.lora_a = nn.Parameter(torch.zeros(2, 16))
            self.lora_b = nn.Parameter(torch.zeros(16, 2))

        def forward(self, x: Tensor) -> Any:
            return self.head(self.base(x) + x @ self.lora_a.T @ self.lora_b.T)

    model = Adapted()
    trained = [param for param in model.parameters() if param.requires_grad]
    return fitted(model, AdamW(trained, lr=1e-2), fit(model), STEPS)


def cut_off_by_detach() -> Training:
    """a part that the loss does not depend on"""
    model = relu_net(16, 16, 4)
    loss_at = fit(lambda inputs: model[2](model[:2](inputs).detach()))
    return fitted(model, sgd(model, 0.01), loss_at, LONG)


def without_autograd() -> Training:
    """a part that runs under `torch.no_grad()`"""
    model = relu_net(16, 16, 4)
    loss_at = fit(lambda inputs: model[2](torch.no_grad()(model[:2])(inputs)))
    return fitted(model, sgd(model, 0.01), loss_at, LONG)


def loss_without_effect() -> Training:
    """a loss that is always 0"""
    model = relu_net(16, 16, 1)

    def loss_at(_step: int) -> Tensor:
        outputs: Tensor = model(torch.rand(8, 16))
        outputs[:] = 0.0
        return outputs.mean()

    return fitted(model, sgd(model, 0.01), loss_at, LONG)


class _Overflowing(nn.Module):
    """Normalises numbers whose squares overflow."""

    def forward(self, x: Tensor) -> Tensor:
        large = x * 1e25
        return large * large.square().mean(-1, keepdim=True).rsqrt()


def _made_zero_by(operation: Callable[[Tensor], Tensor]) -> Training:
    """Return a training of two layers, with an operation between them."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    loss_at = fit(lambda inputs: model[1](operation(model[0](inputs))))
    return fitted(model, AdamW(model.parameters(), lr=1e-3), loss_at, STEPS)


def outside_of_a_clamp() -> Training:
    """a layer whose outputs are all outside of a clamp"""
    return _made_zero_by(lambda hidden: hidden.clamp(50, 60))


def norm_that_overflows() -> Training:
    """a norm whose squares overflow"""
    return _made_zero_by(_Overflowing())


def rounded_activations() -> Training:
    """activations that are rounded"""
    return _made_zero_by(torch.round)


def units_that_are_off() -> Training:
    """units that are always off"""
    return _made_zero_by(lambda hidden: functional.relu(hidden - 50))


def module_without_optimizer() -> Training:
    """a module that no optimizer has"""
    encoder = nn.Linear(16, 16)
    model = nn.Linear(16, 4)
    loss_at = fit(lambda inputs: model(encoder(inputs)))
    return fitted(model, sgd(model, 0.01), loss_at, STEPS)


def optimizers_that_share() -> Training:
    """two optimizers for one model"""
    model = perceptron()
    first = adam(model)
    second = adam(model)

    def after(_step: int) -> None:
        second.zero_grad()
        second.step()

    training = fitted(model, first, fit(model), STEPS, after=after)
    return replace(training, optimizers=[first, second])


def gradients_that_two_optimizers_use() -> Training:
    """two optimizers that step after the same pass"""
    model = perceptron()
    encoder = sgd(model[:2], 0.01)
    whole = adam(model)
    training = fitted(
        model,
        encoder,
        fit(model),
        STEPS,
        clear=lambda _: whole.zero_grad(),
        after=lambda _: whole.step(),
    )
    return replace(training, optimizers=[encoder, whole])


def never_cleared() -> Training:
    """no `zero_grad()`"""
    model = perceptron()
    return fitted(model, sgd(model, 1e-05), fit(model), STEPS, clear=lambda _: None)


def cleared_too_early() -> Training:
    """`zero_grad()` between `backward()` and `step()`"""
    model = perceptron()
    optimizer = sgd(model, 0.01)
    return fitted(
        model,
        optimizer,
        fit(model),
        STEPS,
        clear=lambda _: None,
        before=lambda _: optimizer.zero_grad(),
    )


def cleared_for_each_micro_batch() -> Training:
    """`zero_grad()` before each of four passes"""
    model = perceptron()
    optimizer = sgd(model, 0.01)
    loss_at = fit(model)

    def loss_of_micro_batch(step: int) -> Tensor:
        optimizer.zero_grad()
        return loss_at(step)

    return fitted(model, optimizer, loss_of_micro_batch, STEPS, passes=4)


def frozen_and_still_moving() -> Training:
    """weights frozen while their gradients are there"""
    model = perceptron()
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9)

    def after(step: int) -> None:
        if step == 9:
            model[0].requires_grad_(False)

    loss_at = fit(model)
    clear: Callable[[Optimizer], None] = lambda _: optimizer.zero_grad(set_to_none=False)  # noqa: E731
    return fitted(model, optimizer, loss_at, STEPS, clear=clear, after=after)


def clipped_after_the_update() -> Training:
    """a clip after `step()`"""
    model = perceptron()

    def after(_step: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    return fitted(model, sgd(model, 0.01), fit(model), STEPS, after=after)


def clipped_before_the_pass() -> Training:
    """a clip before `backward()`"""
    model = perceptron()

    def clear(optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return fitted(model, sgd(model, 0.01), fit(model), STEPS, clear=clear)


def clipped_while_scaled() -> Training:
    """a clip while the loss scale is on the gradients"""

    def before(model: nn.Module, _optimizer: Optimizer, _scaler: GradScaler) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return scaled(1, 4096.0, before, STEPS)


def stepped_without_the_scaler() -> Training:
    """`optimizer.step()` in the place of `scaler.step(optimizer)`"""
    model = perceptron()
    loss_at = fit(model)
    scaler = GradScaler("cpu", init_scale=1024.0)
    return fitted(model, adam(model), lambda step: scaler.scale(loss_at(step)), STEPS)


def loss_over_nothing() -> Training:
    """a loss that is NaN while gradients are finite"""
    model = nn.Linear(16, 4)

    def loss_at(step: int) -> Tensor:
        labels = torch.full((8,), -100) if step == 7 else torch.zeros(8, dtype=torch.long)
        return functional.cross_entropy(model(torch.randn(8, 16)), labels)

    return fitted(model, sgd(model, 0.01), loss_at, STEPS)


def left_in_evaluation_mode() -> Training:
    """no `model.train()` after an evaluation"""
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = sgd(model, 0.01)
    loss_at = fit(model)

    def after(step: int) -> None:
        if step == 9:
            model.eval()
            with torch.no_grad():
                loss_at(step)

    return fitted(model, optimizer, loss_at, STEPS, after=after)


def untied() -> Training:
    """an embedding and a head that were tied"""
    embed = nn.Embedding(30, 16)
    head = nn.Linear(16, 30, bias=False)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    model = nn.Sequential(embed, head)

    def loss_at(_step: int) -> Tensor:
        words = torch.randint(30, (32,))
        return functional.cross_entropy(model(words), words.roll(1))

    return fitted(model, sgd(model), loss_at, STEPS)


def copied_units() -> Training:
    """layers that begin at one constant"""
    model = nn.Sequential(*tanh_net(8, 16, 16), nn.Tanh(), nn.Linear(16, 2))
    for param in model.parameters():
        nn.init.constant_(param, 0.1)

    def loss_at(_step: int) -> Tensor:
        inputs = torch.randn(32, 8)
        return functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())

    return fitted(model, sgd(model, 0.05), loss_at, STEPS)


def autocast_around_the_loop() -> Training:
    """`torch.autocast` around the whole loop"""
    model = perceptron()
    training = fitted(model, sgd(model, 0.01), fit(model), STEPS)

    def loop() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            training.loop()

    return replace(training, loop=loop)


def frozen_by_attribute() -> Training:
    """`requires_grad` set on a module"""
    model: Any = perceptron()
    model[0].requires_grad = False
    return fitted(model, sgd(model, 0.01), fit(model), STEPS)


def softmax_before_cross_entropy() -> Training:
    """a softmax before `cross_entropy`"""
    model = nn.Sequential(perceptron(), nn.Softmax(-1))
    return fitted(model, sgd(model, 0.01), _classified(model), STEPS)


def _classified(model: nn.Module) -> Callable[[int], Tensor]:
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.cross_entropy(model(inputs), targets.argmax(-1))

    return loss_at


# Each with the action that finds it.
FAULTY: dict[str, tuple[Callable[[], Training], ...]] = {
    "check-update": (
        unowned,
        learning_rate_zero,
        rounded_away,
        not_written,
        outside_of_the_model,
        weights_made_nan,
        checkpoint_behind_frozen_layers,
        pair_of_zeros,
        outside_of_a_clamp,
        norm_that_overflows,
        rounded_activations,
        units_that_are_off,
        cut_off_by_detach,
        without_autograd,
        loss_without_effect,
        module_without_optimizer,
    ),
    "check-loop": (
        never_cleared,
        cleared_too_early,
        optimizers_that_share,
        gradients_that_two_optimizers_use,
        cleared_for_each_micro_batch,
        frozen_and_still_moving,
        clipped_after_the_update,
        clipped_before_the_pass,
        clipped_while_scaled,
        stepped_without_the_scaler,
        loss_over_nothing,
        left_in_evaluation_mode,
        autocast_around_the_loop,
    ),
    "check-structure": (
        untied,
        copied_units,
        frozen_by_attribute,
        softmax_before_cross_entropy,
    ),
}


# Their messages differ from those of others by a word: the guide has one of each kind.
NOT_IN_GUIDE = (rounded_activations, units_that_are_off, without_autograd, clipped_before_the_pass)


def row(make: Callable[[], Training], action: str, message: str) -> str:
    """Return the row of the guide on a fault, given the message of its event."""
    said = message.partition(": ")[2].replace("|", "\\|")
    said = re.sub(r"[^ ]*/faulty_loops\.py:\d+", "train.py:31", said)
    return f"| {(make.__doc__ or '').strip()} | `{action}` | {said} |"


if __name__ == "__main__":
    from laws.test_checks import GUIDE, told

    rows = []
    for name, some in FAULTY.items():
        for one in some:
            if one in NOT_IN_GUIDE:
                continue
            torch.manual_seed(0)
            rows += [row(one, name, event.message) for event in told(one())]
    begin = "<!-- example: what checks say -->\n"
    end = "<!-- example: end -->\n"
    before, _, rest = GUIDE.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    GUIDE.write_text(f"{before}{begin}{chr(10).join(rows)}\n{end}{after}", encoding="utf-8")
