"""Healthy trainings that use gradients or weights in an unusual way, for `test_checks`.

The docstring of each function says what a check could take for a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from laws.healthy_loops import STEPS
from laws.trainings import Training, adam, fit, fitted, perceptron, regression
from small import sgd, take_step
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import SGD, Optimizer


class _Lookahead(Optimizer):
    """Steps another optimizer, and every five steps goes half of the way back to its slow weights."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self._inner = inner
        self._steps = 0
        self._slow = [param.detach().clone() for param in inner.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._inner.step(closure)
        self._steps += 1
        if self._steps % 5 == 0:
            for slow, param in zip(self._slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


def lookahead() -> Training:
    """An optimizer that steps another one of the same parameters."""
    model = perceptron()
    return fitted(model, _Lookahead(sgd(model, 0.01)), fit(model), STEPS)


def encoder_with_passes_of_two_kinds() -> Training:
    """Two optimizers have the encoder, and each has a pass of its own, as critic and decoder of a pixel agent."""
    encoder = nn.Linear(16, 8)
    heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    optimizers = [SGD([*encoder.parameters(), *head.parameters()], 0.01) for head in heads]
    loss_at = [fit(nn.Sequential(encoder, head)) for head in heads]

    def loop() -> None:
        for step in range(STEPS):
            for optimizer, loss in zip(optimizers, loss_at, strict=True):
                take_step(optimizer, loss(step))

    return Training(nn.ModuleList([encoder, heads]), [*optimizers], loop)


def two_gradients_of_one_pass() -> Training:
    """Between the updates of two optimizers, the script puts other gradients in the place of the first ones."""
    model = perceptron()
    first = sgd(model, 0.01)
    second = sgd(model, 0.01)

    def after(_step: int) -> None:
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        second.step()

    training = fitted(model, first, fit(model), STEPS, after=after)
    training.optimizers.append(second)
    return training


def _clip(model: nn.Module, bound: float = 0.1) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), bound)


def clip_per_layer() -> Training:
    """Each layer is clipped by its own norm."""
    model = perceptron()

    def before(_step: int) -> None:
        for layer in (model[0], model[2], model[4]):
            _clip(layer)

    return fitted(model, sgd(model, 0.01), fit(model), STEPS, before=before)


def norm_measured_after_the_update() -> Training:
    """An infinite bound only measures."""
    model = perceptron()
    loss_at = fit(model)
    return fitted(model, sgd(model), loss_at, STEPS, after=lambda _: _clip(model, math.inf))


def bound_that_is_never_reached() -> Training:
    """A large bound measures as well."""
    model = perceptron()
    loss_at = fit(model)
    return fitted(model, sgd(model, 0.01), loss_at, STEPS, after=lambda _: _clip(model, 1e6))


def momentum_of_clipped_gradients() -> Training:
    """The script keeps a part of the gradients, clips it, and adds the next pass to it."""
    model = perceptron()

    def clear(_optimizer: Optimizer) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.9)
        _clip(model)

    return fitted(model, sgd(model, 0.001), fit(model), STEPS, clear=clear)


def private_gradients() -> Training:
    """Differential privacy by hand: the gradient of each sample is clipped and kept, noise is added to their sum."""
    model = perceptron()
    optimizer = sgd(model, 0.01)
    batch = regression(batch=4)

    def loop() -> None:
        for _ in range(STEPS):
            inputs, targets = batch()
            kept: list[list[Any]] = []
            for sample in range(4):
                optimizer.zero_grad()
                functional.mse_loss(model(inputs[sample]), targets[sample]).backward()
                _clip(model, 1.0)
                kept.append([param.grad for param in model.parameters()])
            for grads, param in zip(zip(*kept, strict=True), model.parameters(), strict=True):
                param.grad = torch.stack(grads).mean(0) + 0.1 * torch.randn_like(param)
            optimizer.step()

    return Training(model, [optimizer], loop)


def clip_of_one_player() -> Training:
    """All parameters are clipped after the pass of the critic, and only the critic is meant."""
    critic = perceptron()
    generator = nn.Linear(16, 16)
    players = nn.ModuleList([critic, generator])
    optimizers = [sgd(player, 0.01) for player in players]
    loss_at = fit(critic)
    fooled = fit(lambda inputs: critic(generator(inputs)))

    def loop() -> None:
        for step in range(STEPS):
            optimizers[0].zero_grad()
            loss_at(step).backward()
            _clip(players)
            optimizers[0].step()
            take_step(optimizers[1], fooled(step))

    return Training(players, [*optimizers], loop)


def frozen_in_turns() -> Training:
    """Layers are frozen one by one; their gradients are None, so momentum does not move them."""
    model = perceptron()
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=0.1)

    def after(step: int) -> None:
        if step in (4, 9):
            model[2 * (step // 9)].requires_grad_(False)

    return fitted(model, optimizer, fit(model), STEPS, after=after)


def zeroth_order() -> Training:
    """After some updates by gradients, MeZO goes on with requires_grad off: it estimates each gradient by two losses."""
    model = perceptron()
    optimizer = SGD(model.parameters(), 0.001, momentum=0.9)
    loss_at = fit(model)
    params = list(model.parameters())

    @torch.no_grad()
    def estimate(step: int) -> None:
        noise = [torch.randn_like(param) for param in params]
        losses = []
        for shift in (1e-3, -2e-3, 1e-3):
            for param, direction in zip(params, noise, strict=True):
                param.add_(direction, alpha=shift)
            losses.append(loss_at(step))
        for param, direction in zip(params, noise, strict=True):
            param.grad = (losses[0] - losses[1]) / 2e-3 * direction

    def loop() -> None:
        for step in range(STEPS):
            if step < 5:
                take_step(optimizer, loss_at(step))
                continue
            model.requires_grad_(False)
            estimate(step)
            optimizer.step()

    return Training(model, [optimizer], loop)


def codebook() -> Training:
    """The optimizer has a codebook without gradients, which a moving average of the inputs moves."""
    model: Any = perceptron()
    model.codebook = nn.Parameter(torch.zeros(8, 16), requires_grad=False)

    @torch.no_grad()
    def after(_step: int) -> None:
        model.codebook.lerp_(torch.randn(8, 16), 0.1)

    return fitted(model, sgd(model, 0.01), fit(model), STEPS, after=after)


def _scaled_by_hand(unscale: Callable[[GradScaler, Optimizer], None], scale: float) -> Training:
    """Return a training whose losses a `GradScaler` scales, and whose optimizer steps without it."""
    model = perceptron()
    optimizer = adam(model)
    loss_at = fit(model)
    scaler = GradScaler("cpu", init_scale=scale)
    return fitted(
        model,
        optimizer,
        lambda step: scaler.scale(loss_at(step)),
        STEPS,
        before=lambda _: unscale(scaler, optimizer),
        after=lambda _: scaler.update(scale),
    )


def divided_by_the_scale() -> Training:
    """The script divides gradients by the scale itself."""

    def divide(scaler: GradScaler, optimizer: Optimizer) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad /= scaler.get_scale()

    return _scaled_by_hand(divide, 1024.0)


def unscaled_before_the_step() -> Training:
    """`unscale_` removes the scale, and the script steps."""
    return _scaled_by_hand(GradScaler.unscale_, 1024.0)


def scale_of_one() -> Training:
    """A scale of 1 changes nothing."""
    return _scaled_by_hand(lambda *_: None, 1.0)


def _with_first_pass(
    first: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor], *, hooked: bool = False
) -> Training:
    """Return a training in which ``first`` runs a pass of model, inputs, targets and loss, and returns the loss of the second.

    The script clears the gradients between them.
    """
    model = perceptron()
    optimizer = sgd(model, 0.01)
    batch = regression()
    if hooked:
        model[0].register_forward_hook(lambda *_: None)

    def loop() -> None:
        for _ in range(STEPS):
            inputs, targets = batch()
            optimizer.zero_grad()
            loss = functional.mse_loss(model(inputs), targets)
            second = first(model, inputs, targets, loss)
            take_step(optimizer, second)

    return Training(model, [optimizer], loop)


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(model(inputs), targets)


def ghost_clipping() -> Training:
    """The first of two passes through one forward pass is for the norms of gradients, as in K-FAC for their products."""

    def first(_model: nn.Module, _inputs: Tensor, _targets: Tensor, loss: Tensor) -> Tensor:
        loss.backward(retain_graph=True)
        return loss

    return _with_first_pass(first)


def second_pass_of_hooks() -> Training:
    """Hooks on modules take what they need from a pass of its own, as K-FAC does."""

    def first(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
        loss.backward()
        return _loss(model, inputs, targets)

    return _with_first_pass(first, hooked=True)


def attacked_inputs() -> Training:
    """FGSM: the first pass is for the gradient of the inputs."""

    def first(model: nn.Module, inputs: Tensor, targets: Tensor, _loss_of: Tensor) -> Tensor:
        attacked: Any = inputs.clone().requires_grad_()
        _loss(model, attacked, targets).backward()
        return _loss(model, (inputs + 0.01 * attacked.grad.sign()).detach(), targets)

    return _with_first_pass(first)


def sharpness_aware() -> Training:
    """SAM: the first pass moves the weights to where the second one takes its gradient."""

    def first(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
        loss.backward()
        params: list[Any] = list(model.parameters())
        moves = [0.01 * param.grad for param in params]
        for param, move in zip(model.parameters(), moves, strict=True):
            param.data.add_(move)
        second = _loss(model, inputs, targets)
        second.register_hook(lambda _: _move_back(model, moves))
        return second

    return _with_first_pass(first)


def _move_back(model: nn.Module, moves: list[Tensor]) -> None:
    for param, move in zip(model.parameters(), moves, strict=True):
        param.data.sub_(move)


def fisher_information() -> Training:
    """A pass on sampled targets gives the Fisher information; its loss is of another kind."""

    def first(model: nn.Module, inputs: Tensor, targets: Tensor, _loss_of: Tensor) -> Tensor:
        out = model(inputs)
        functional.cross_entropy(out, out.argmax(1)).backward()
        return _loss(model, inputs, targets)

    return _with_first_pass(first)


def fisher_between_tasks() -> Training:
    """Passes between two tasks give the Fisher information, as for EWC."""
    model = perceptron()
    optimizer = sgd(model, 0.01)
    loss_at = fit(model)

    def after(step: int) -> None:
        for _ in range(30 * (step == 9)):
            optimizer.zero_grad()
            loss_at(step).backward()

    return fitted(model, optimizer, loss_at, STEPS, after=after)


def reference_gradients() -> Training:
    """A pass on old data whose gradients would correct those of the new data if they disagreed, as in A-GEM."""
    model = perceptron()
    optimizer = sgd(model, 0.01)
    loss_at = fit(model)

    def gradients() -> Tensor:
        return torch.cat(
            [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        )

    def loop() -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_at(step).backward()
            reference = gradients()
            optimizer.zero_grad()
            loss_at(step).backward()
            if gradients() @ reference < 0:
                optimizer.zero_grad()
            optimizer.step()

    return Training(model, [optimizer], loop)


HEALTHY: tuple[Callable[[], Training], ...] = (
    lookahead,
    encoder_with_passes_of_two_kinds,
    two_gradients_of_one_pass,
    clip_per_layer,
    norm_measured_after_the_update,
    bound_that_is_never_reached,
    momentum_of_clipped_gradients,
    private_gradients,
    clip_of_one_player,
    frozen_in_turns,
    zeroth_order,
    codebook,
    divided_by_the_scale,
    unscaled_before_the_step,
    scale_of_one,
    ghost_clipping,
    second_pass_of_hooks,
    attacked_inputs,
    sharpness_aware,
    fisher_information,
    fisher_between_tasks,
    reference_gradients,
)
