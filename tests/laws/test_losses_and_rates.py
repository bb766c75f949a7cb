"""The loss of each update and its learning rates, recorded beside norms: what the script itself adds up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Json
from small import attach, equal, hold_rows, messages, net, rule_file, sgd, take_step, weights_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon.records.store.memory import LOSS, RATE
from gradsurgeon.report import summary
from gradsurgeon.report.json_form import to_dict

NORMS: Json = {"id": "norms", "action": "norm-log", "params": "*"}
RULES = rule_file(NORMS)
STEPS = 3
X = torch.linspace(-1, 1, 32).reshape(8, 4)
# By curve, the values in the order of the updates, from 0.
Curves = dict[str, list[float]]


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def repeated(
    update: Callable[..., float | Sequence[float]],
    model: Any,
    optimizer: Any = None,
    names: Sequence[str] = ("loss", "loss[1]"),
) -> Curves:
    """Return the losses of several updates, each of which a function takes and tells the losses of."""
    optimizer = optimizer or sgd(model)
    curves: Curves = {}
    for _ in range(STEPS):
        losses = update(model, optimizer)
        if isinstance(losses, float):
            losses = [losses]
        for name, value in zip(names, losses, strict=False):
            curves.setdefault(name, []).append(value)
    return curves


def minimized(model: nn.Module, optimizer: Any, loss_of: Any = loss_of) -> float:
    loss: Tensor = loss_of(model)
    take_step(optimizer, loss)
    return loss.item()


plain = partial(repeated, minimized)


def of_loss(loss_of: Any) -> Callable[..., Curves]:
    return partial(repeated, partial(minimized, loss_of=loss_of))


def written_to(model: nn.Module, optimizer: Any) -> float:
    """Use the loss for something else before the update."""
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    value = loss.item()
    loss.detach().mul_(100.0)
    optimizer.step()
    return value


def micro_batches(model: nn.Module, optimizer: Any) -> float:
    optimizer.zero_grad()
    total = 0.0
    for x in X.chunk(4):
        loss = loss_of(model, x) / 4
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def scaled(model: nn.Module) -> Curves:
    """Scale the losses. The second update overflows, and is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    factors = iter([1.0, float("inf"), 1.0])

    def update(model: nn.Module, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(model) * next(factors)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return repeated(update, model)


def two_of(output: Tensor) -> list[Tensor]:
    return [output.square().mean(), output.abs().mean()]


def two_losses(model: nn.Module, optimizer: Any) -> list[float]:
    """Run the passes of two losses of one forward pass, in two micro-batches."""
    optimizer.zero_grad()
    sums = [0.0, 0.0]
    for x in X.chunk(2):
        for number, loss in enumerate(two_of(model(x))):
            loss.backward(retain_graph=True)
            sums[number] += loss.item()
    optimizer.step()
    return sums


def two_roots(model: nn.Module, optimizer: Any) -> list[float]:
    optimizer.zero_grad()
    losses = two_of(model(X))
    torch.autograd.backward(losses)
    optimizer.step()
    return [loss.item() for loss in losses]


def vector(model: nn.Module, optimizer: Any) -> Sequence[float]:
    """Begin the pass at a tensor that is no loss."""
    output = model(X)
    output.backward(torch.ones_like(output))
    optimizer.step()
    return ()


def cleared_between(model: nn.Module, optimizer: Any) -> float:
    """Run a pass whose gradients are cleared, as for a search or a perturbation."""
    loss_of(model).backward()
    loss = model(X).abs().mean()
    take_step(optimizer, loss)
    optimizer.zero_grad()
    return float(loss.item())


def penalty(model: nn.Module) -> Tensor:
    x = X.clone().requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    penalised: Tensor = output.square().mean() + (grad.norm() - 1).square()
    return penalised


def checkpointed(model: nn.Module, *, use_reentrant: bool) -> Tensor:
    output: Any = checkpoint(model, X.clone().requires_grad_(), use_reentrant=use_reentrant)
    loss: Tensor = output.square().mean()
    return loss


def closures(model: nn.Module) -> Curves:
    """Evaluate several times per update: `step` returns the first loss."""

    def update(model: nn.Module, optimizer: Any) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    return repeated(update, model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))


class ByHand:
    """What a script without an optimizer does."""

    def __init__(self, model: Any) -> None:
        self.zero_grad = model.zero_grad
        self.params = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            param.sub_(param.grad, alpha=0.1)


def by_hand(model: nn.Module) -> Curves:
    return plain(model, ByHand(model))


def in_backward(model: Any) -> Curves:
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)

    def passed(model: nn.Module, _: object) -> float:
        loss = loss_of(model)
        loss.backward()
        return loss.item()

    return repeated(passed, model, optimizers)


def two_optimizers_of_one_loss(model: nn.Module) -> Curves:
    weights = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() == 1]
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.Adam(biases)]

    def update(model: nn.Module, _: object) -> float:
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return repeated(update, model, optimizers)


def adversaries(model: Any) -> Curves:
    """Let the first layer fool the last one, which learns from two passes; both have an optimizer."""
    generator, _, critic = model
    of_critic = sgd(critic)

    def update(model: Any, of_generator: Any) -> list[float]:
        of_critic.zero_grad()
        made = model[:2](X)
        real = critic(torch.ones(8, 6)).square().mean()
        real.backward()
        fake = critic(made.detach()).abs().mean()
        fake.backward()
        of_critic.step()
        loss = critic(made).square().mean()
        take_step(of_generator, loss)
        return [loss.item(), real.item() + fake.item()]

    return repeated(update, model, sgd(generator), ("loss", "2.loss"))


def built_anew(model: nn.Module, _: Any) -> float:
    optimizer = sgd(model)
    return minimized(model, optimizer)


TRAININGS: dict[str, Callable[[Any], Curves]] = {
    "plain": plain,
    "one element": of_loss(lambda model: loss_of(model).reshape(1)),
    "one row": of_loss(lambda model: loss_of(model).reshape(1, 1)),
    "half precision": of_loss(lambda model: loss_of(model).bfloat16()),
    "penalty": of_loss(penalty),
    "reentrant": of_loss(partial(checkpointed, use_reentrant=True)),
    "non-reentrant": of_loss(partial(checkpointed, use_reentrant=False)),
    **{
        update.__name__: partial(repeated, update)
        for update in (
            written_to, micro_batches, two_losses, two_roots, vector, cleared_between, built_anew,
        )
    },
    **{
        train.__name__: train
        for train in (scaled, closures, by_hand, in_backward, two_optimizers_of_one_loss, adversaries)
    },
}  # fmt: skip


def curves_of(session: gradsurgeon.Session, stat: str) -> Iterator[tuple[str, list[float]]]:
    for series in session.recorded().series:
        if series.key.stat == stat:
            for name in series.key.names:
                pairs = series.values_of(name)
                assert [step for step, _ in pairs] == list(range(len(pairs)))
                yield name, [value for _, value in pairs]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_loss_of_an_update_is_what_the_script_adds_up(name: str) -> None:
    model = net()
    with gradsurgeon.apply(model, RULES) as session:
        wanted = TRAININGS[name](model)
        curves = dict(curves_of(session, LOSS))
    assert curves == {name: pytest.approx(values) for name, values in wanted.items()}
    bare = net()
    TRAININGS[name](bare)
    assert equal(weights_of(model), weights_of(bare))


def test_the_learning_rates_of_groups_are_recorded_when_they_change() -> None:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.25))
    with gradsurgeon.apply(model, RULES) as session:
        plain(model, optimizer)
        assert dict(curves_of(session, RATE)) == {"SGD/0": [0.25] * 3, "SGD/1": [0.5]}
        optimizer.param_groups[0]["lr"] = 0.125
        plain(model, optimizer)
        optimizer.param_groups[1]["lr"] = 0.0
        plain(model, optimizer)
        report = to_dict(summary(session))
    assert report["rates"] == [
        {"optimizer": "SGD", "group": 0, "steps": [*range(9)], "values": [0.25] * 3 + [0.125] * 6},
        {"optimizer": "SGD", "group": 1, "steps": [*range(9)], "values": [0.5] * 6 + [0.0] * 3},
    ]  # fmt: skip


def test_a_learning_rate_that_is_nan_is_a_text_in_json() -> None:
    model = net()
    optimizer = sgd(model, 0.25)
    with gradsurgeon.apply(model, RULES) as session:
        plain(model, optimizer)
        optimizer.param_groups[0]["lr"] = float("nan")
        plain(model, optimizer)
        (rate,) = to_dict(summary(session))["rates"]
    assert rate["values"] == [0.25] * 3 + ["NaN"] * 3


def test_optimizers_of_one_kind_have_names_of_their_own() -> None:
    model = net()
    with gradsurgeon.apply(model, RULES) as session:
        adversaries(model)
        rates = dict(curves_of(session, RATE))
    assert rates == {"0.SGD/0": [pytest.approx(0.1)], "2.SGD/0": [pytest.approx(0.1)]}


def test_a_rule_that_acts_in_some_steps_has_their_losses() -> None:
    model = net()
    with attach(model, {**NORMS, "steps": {"every": 2}}, mode="observe") as session:
        losses = plain(model)["loss"]
        session.pause()
        plain(model)
        session.resume()
        later = plain(model)["loss"]
        wanted = [(0, losses[0]), (2, losses[2]), (6, later[0]), (8, later[2])]
        hold_rows(session.history("loss", LOSS), wanted)


def test_each_rule_on_norms_has_the_losses_and_the_first_one_records_them() -> None:
    model = net()
    others = ({**NORMS, "id": "seldom", "steps": {"every": 2}}, {**NORMS, "id": "later"})
    with attach(model, others[0], NORMS, others[1]) as session:
        losses = list(enumerate(plain(model)["loss"]))
        for rule in ("norms", "seldom", "later", None):
            hold_rows(session.history("loss", LOSS, rule=rule), losses)
            assert session.history("SGD/0", RATE, rule=rule)
        (key,) = [series.key for series in session.recorded().series if series.key.stat == LOSS]
        assert key.rule == "norms"


def test_without_a_rule_on_norms_no_loss_is_recorded() -> None:
    model = net()
    clip = {"action": "clip-norm", "params": "*", "max_norm": 1.0, "per": "rule"}
    with attach(model, clip) as session:
        plain(model)
        assert list(session.recorded().series) == []


def test_a_long_curve_has_at_most_2000_points_and_keeps_its_worst() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model, 0.0)
    with gradsurgeon.apply(model, RULES) as session:
        for step in range(2500):
            # A peak of one update between two of the points that are shown.
            optimizer.param_groups[0]["lr"] = 0.5 if step == 1004 else 0.25
            loss = model(torch.ones(1, 1)).sum() * 0.0 + (float("nan") if step == 1001 else 1.0)
            loss.backward()
            optimizer.step()
        found = to_dict(summary(session))
    (loss,) = found["losses"]
    assert len(loss["values"]) == len(loss["steps"]) == 1250
    assert loss["values"].count("NaN") == 1
    assert loss["steps"][500] == 1001
    (rate,) = found["rates"]
    assert len(rate["values"]) == len(rate["steps"]) <= 2000
    assert rate["steps"][rate["values"].index(0.5)] == 1004
    assert rate["values"].count(0.5) == 1


def test_a_tag_goes_before_the_loss_of_its_name() -> None:
    model = net()
    tagged = {
        "id": "t", "action": "norm-log", "tensors": "loss", "tensor": "value", "stats": ["mean"],
    }  # fmt: skip
    train = of_loss(lambda model: gradsurgeon.tag(loss_of(model), "loss") * 2)
    with attach(model, NORMS, tagged) as session:
        train(model)
        found = to_dict(summary(session))
    assert [(loss["name"], loss["rule"]) for loss in found["losses"]] == [("loss", "t")]


def test_a_loss_with_dimensions_that_is_nan_is_found() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    loop = {"id": "loop", "action": "check-loop", "params": "*"}
    with attach(model, NORMS, loop) as session:
        for _ in range(3):
            take_step(optimizer, model(torch.randn(0, 4)).mean(0))
    (message,) = messages(session, "check")
    text = "the loss of step 0 (made by `mean`) was NaN although all gradients are finite"
    assert text in message


def test_a_diagnosis_tells_the_loss_and_the_learning_rate_before_the_step() -> None:
    model = net()
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "warn"}
    optimizer = sgd(model)
    losses = []
    with attach(model, trap, NORMS) as session, pytest.warns(match="rule trap"):
        for step in range(23):
            if step == 21:
                optimizer.param_groups[0]["lr"] = 0.05
            loss = loss_of(model, X * float("nan") if step == 22 else X)
            take_step(optimizer, loss)
            losses.append(loss.item())
        (message,) = messages(session, "trap")
    (before,) = [line for line in message.splitlines() if line.startswith("  before: ")]
    assert before == (
        "  before: learning rate 0.05 since step 21, 0.1 before; "
        f"loss {losses[2]:.3g} to {losses[21]:.3g} in the 20 steps before"
    )
