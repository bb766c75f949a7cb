"""Trainings with a fault that a check finds, for `test_checks` and for the table in the guide.

The docstring of each function is the fault in a few words. Run this file as a script to write the table anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from laws.trainings import Training, fit, fitted, perceptron, regression, scaled
from ranks import Json
from small import relu_net, sgd
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
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
    rest = [*model[2].parameters(), *model[4].parameters()]
    groups: list[Json] = [{"params": model[0].parameters(), "lr": 0.0}, {"params": rest}]
    return fitted(model, SGD(groups, lr=1e-2), fit(model), 3 * STEPS)


def rounded_away() -> Training:
    """updates too small for the dtype of the weights"""
    model = perceptron().bfloat16()
    batch = regression()
    with torch.no_grad():
        weight = model.get_parameter("2.weight")
        weight.copy_(weight.sign() * (0.3 + torch.rand(32, 32)))

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(model(inputs.bfloat16()).float(), targets)

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
    loss_at, stray = fit(model), nn.Parameter(torch.ones(3))
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

    return fitted(model, Adam(model.parameters(), lr=1e-3), loss_at, 1)


def checkpoint_behind_frozen_layers() -> Training:
    """a reentrant checkpoint whose input needs no gradient"""
    embed, body, head = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 30)
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
            self.base, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
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
    body, head = nn.Linear(16, 16), nn.Linear(16, 4)
    model = nn.Sequential(body, nn.ReLU(), head)
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(head(body(inputs).detach()), targets)

    return fitted(model, sgd(model, 0.01), loss_at, LONG)


def without_autograd() -> Training:
    """a part that runs under `torch.no_grad()`"""
    body, head = nn.Linear(16, 16), nn.Linear(16, 4)
    model = nn.Sequential(body, nn.ReLU(), head)
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        with torch.no_grad():
            hidden = body(inputs)
        return functional.mse_loss(head(hidden), targets)

    return fitted(model, sgd(model, 0.01), loss_at, LONG)


def loss_without_effect() -> Training:
    """a loss that is always 0"""
    model = relu_net(16, 16, 1)

    def loss_at(_step: int) -> Tensor:
        return functional.cross_entropy(model(torch.rand(8, 16)), torch.rand(8, 1))

    return fitted(model, sgd(model, 0.01), loss_at, LONG)


def module_without_optimizer() -> Training:
    """a module that no optimizer has"""
    encoder, model = nn.Linear(16, 16), nn.Linear(16, 4)
    batch = regression()

    def loss_at(_step: int) -> Tensor:
        inputs, targets = batch()
        return functional.mse_loss(model(encoder(inputs)), targets)

    return fitted(model, sgd(model, 0.01), loss_at, STEPS)


def optimizers_that_share() -> Training:
    """two optimizers for one model"""
    model = perceptron()
    loss_at = fit(model)
    first, second = Adam(model.parameters(), lr=1e-3), Adam(model.parameters(), lr=1e-3)

    def loop() -> None:
        for step in range(STEPS):
            loss = loss_at(step)
            first.zero_grad()
            loss.backward()
            first.step()
            second.zero_grad()
            second.step()

    return Training(model, [first, second], loop)


def never_cleared() -> Training:
    """no `zero_grad()`"""
    model = perceptron()
    optimizer, loss_at = sgd(model, 1e-05), fit(model)

    def loop() -> None:
        for step in range(STEPS):
            loss_at(step).backward()
            optimizer.step()

    return Training(model, [optimizer], loop)


def cleared_too_early() -> Training:
    """`zero_grad()` between `backward()` and `step()`"""
    model = perceptron()
    optimizer, loss_at = sgd(model, 0.01), fit(model)

    def loop() -> None:
        for step in range(STEPS):
            loss_at(step).backward()
            optimizer.zero_grad()
            optimizer.step()

    return Training(model, [optimizer], loop)


def clipped_while_scaled() -> Training:
    """a clip while the loss scale is on the gradients"""

    def before(model: nn.Module, _optimizer: Optimizer, _scaler: GradScaler) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return scaled(1, 4096.0, before, STEPS)


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
    optimizer, loss_at = sgd(model, 0.01), fit(model)

    def after(step: int) -> None:
        if step == 9:
            model.eval()
            with torch.no_grad():
                loss_at(step)

    return fitted(model, optimizer, loss_at, STEPS, after=after)


def untied() -> Training:
    """an embedding and a head that were tied"""
    embed, head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    model = nn.Sequential(embed, head)

    def loss_at(_step: int) -> Tensor:
        words = torch.randint(30, (32,))
        return functional.cross_entropy(model(words), words.roll(1))

    return fitted(model, sgd(model), loss_at, STEPS)


def copied_units() -> Training:
    """layers that begin at one constant"""
    hidden = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(16, 2))
    for param in model.parameters():
        nn.init.constant_(param, 0.1)

    def loss_at(_step: int) -> Tensor:
        inputs = torch.randn(32, 8)
        return functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())

    return fitted(model, sgd(model, 0.05), loss_at, STEPS)


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
        cut_off_by_detach,
        without_autograd,
        loss_without_effect,
        module_without_optimizer,
    ),
    "check-loop": (
        never_cleared,
        cleared_too_early,
        optimizers_that_share,
        clipped_while_scaled,
        loss_over_nothing,
        left_in_evaluation_mode,
    ),
    "check-structure": (untied, copied_units),
}


def row(make: Callable[[], Training], action: str, message: str) -> str:
    """Return the row of the guide on a fault, given the message of its event."""
    said = message.partition(": ")[2].replace("|", "\\|")
    return f"| {(make.__doc__ or '').strip()} | `{action}` | {said} |"


if __name__ == "__main__":
    from laws.test_checks import GUIDE, told

    rows = []
    for name, some in FAULTY.items():
        for one in some:
            torch.manual_seed(0)
            rows += [row(one, name, event.message) for event in told(one())]
    begin, end = "<!-- example: what checks say -->\n", "<!-- example: end -->\n"
    before, _, rest = GUIDE.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    GUIDE.write_text(f"{before}{begin}{chr(10).join(rows)}\n{end}{after}", encoding="utf-8")
