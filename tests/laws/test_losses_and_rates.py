"""The loss of each update and its learning rates, recorded beside norms: what the script itself adds up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Json
from small import attach, messages, net, rule_file, sgd, take_step, weights_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon.cli.watch import newest_report, screen
from gradsurgeon.records.store.memory import LOSS, RATE
from gradsurgeon.report import summary
from gradsurgeon.report.json_form import to_dict
from gradsurgeon.report.web_page import page_data

NORMS: Json = {"id": "norms", "action": "norm-log", "params": "*"}
RULES = rule_file(NORMS)
STEPS = 3
X = torch.linspace(-1, 1, 32).reshape(8, 4)
# By curve, the values in the order of the updates, from 0.
Curves = dict[str, list[float]]


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def plain(model: nn.Module, optimizer: Any = None, loss_of: Any = loss_of) -> Curves:
    optimizer = optimizer or sgd(model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses}


def one_element(model: nn.Module) -> Curves:
    return plain(model, loss_of=lambda model: loss_of(model).reshape(1, 1))


def half_precision(model: nn.Module) -> Curves:
    return plain(model, loss_of=lambda model: loss_of(model).bfloat16())


def written_to(model: nn.Module) -> Curves:
    """Use the loss for something else before the update."""
    optimizer = sgd(model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        loss.detach().mul_(100.0)
        optimizer.step()
    return {"loss": losses}


def micro_batches(model: nn.Module) -> Curves:
    optimizer = sgd(model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for x in X.chunk(4):
            loss = loss_of(model, x) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return {"loss": losses}


def scaled(model: nn.Module) -> Curves:
    """Scale the losses. The second update overflows, and is skipped."""
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return {"loss": losses}


def two_losses(model: nn.Module) -> Curves:
    """Run the passes of two losses of one forward pass, in two micro-batches."""
    optimizer = sgd(model)
    curves: Curves = {"loss": [], "loss[1]": []}
    for _ in range(STEPS):
        optimizer.zero_grad()
        sums = [0.0, 0.0]
        for x in X.chunk(2):
            output = model(x)
            losses = [output.square().mean(), output.abs().mean()]
            for number, loss in enumerate(losses):
                loss.backward(retain_graph=True)
                sums[number] += loss.item()
        optimizer.step()
        for name, value in zip(curves, sums, strict=True):
            curves[name].append(value)
    return curves


def two_roots(model: nn.Module) -> Curves:
    optimizer = sgd(model)
    curves: Curves = {"loss": [], "loss[1]": []}
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = model(X)
        losses = [output.square().mean(), output.abs().mean()]
        torch.autograd.backward(losses)
        optimizer.step()
        for name, loss in zip(curves, losses, strict=True):
            curves[name].append(loss.item())
    return curves


def vector(model: nn.Module) -> Curves:
    """Begin the pass at a tensor that is no loss."""
    optimizer = sgd(model)
    for _ in range(STEPS):
        output = model(X)
        output.backward(torch.ones_like(output))
        optimizer.step()
    return {}


def cleared_between(model: nn.Module) -> Curves:
    """Run a pass whose gradients are cleared, as for a search or a perturbation."""
    optimizer = sgd(model)
    losses = []
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.zero_grad()
        loss = model(X).abs().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        optimizer.zero_grad()
    return {"loss": losses}


def penalty(model: nn.Module) -> Curves:
    def loss_of(model: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        output = model(x)
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        penalised: Tensor = output.square().mean() + (grad.norm() - 1).square()
        return penalised

    return plain(model, loss_of=loss_of)


def checkpointed(model: nn.Module, *, use_reentrant: bool) -> Curves:
    def loss_of(model: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        output: Tensor = checkpoint(model, x, use_reentrant=use_reentrant)
        return output.square().mean()

    return plain(model, loss_of=loss_of)


def reentrant(model: nn.Module) -> Curves:
    return checkpointed(model, use_reentrant=True)


def non_reentrant(model: nn.Module) -> Curves:
    return checkpointed(model, use_reentrant=False)


def closures(model: nn.Module) -> Curves:
    """Evaluate several times per update: `step` returns the first loss."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    losses: list[Any] = [optimizer.step(closure) for _ in range(STEPS)]
    return {"loss": [loss.item() for loss in losses]}


def by_hand(model: nn.Module) -> Curves:
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)
    return {"loss": losses}


def in_backward(model: nn.Module) -> Curves:
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model)
        losses.append(loss.item())
        loss.backward()
    return {"loss": losses}


def two_optimizers_of_one_loss(model: nn.Module) -> Curves:
    weights = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() == 1]
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.Adam(biases)]
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return {"loss": losses}


def adversaries(model: Any) -> Curves:
    """Let the first layer fool the last one, which learns from two passes; both have an optimizer."""
    generator, _, critic = model
    of_generator = sgd(generator)
    of_critic = sgd(critic)
    curves: Curves = {"loss": [], "2.loss": []}
    for _ in range(STEPS):
        of_critic.zero_grad()
        made = model[:2](X)
        real = critic(torch.ones(8, 6)).square().mean()
        real.backward()
        fake = critic(made.detach()).abs().mean()
        fake.backward()
        of_critic.step()
        curves["2.loss"].append(real.item() + fake.item())
        of_generator.zero_grad()
        loss = critic(made).square().mean()
        loss.backward()
        of_generator.step()
        curves["loss"].append(loss.item())
    return curves


def built_anew(model: nn.Module) -> Curves:
    losses = []
    for _ in range(STEPS):
        optimizer = sgd(model)
        loss = loss_of(model)
        take_step(optimizer, loss)
        losses.append(loss.item())
    return {"loss": losses}


TRAININGS: list[Callable[[Any], Curves]] = [
    plain, one_element, half_precision, written_to, micro_batches, scaled, two_losses, two_roots, vector, cleared_between,
    penalty, reentrant, non_reentrant, closures, by_hand, in_backward, two_optimizers_of_one_loss, adversaries, built_anew,
]  # fmt: skip


def curves_of(session: gradsurgeon.Session, stat: str) -> Iterator[tuple[str, list[float]]]:
    for series in session.recorded().series:
        if series.key.stat == stat:
            for name in series.key.names:
                pairs = series.values_of(name)
                assert [step for step, _ in pairs] == list(range(len(pairs)))
                yield name, [value for _, value in pairs]


@pytest.mark.parametrize("train", TRAININGS, ids=lambda train: train.__name__)
def test_the_loss_of_an_update_is_what_the_script_adds_up(
    train: Callable[[nn.Module], Curves],
) -> None:
    model = net()
    with gradsurgeon.apply(model, RULES) as session:
        wanted = train(model)
        curves = dict(curves_of(session, LOSS))
    assert curves == {name: pytest.approx(values) for name, values in wanted.items()}
    bare = net()
    train(bare)
    for ours, theirs in zip(weights_of(model), weights_of(bare), strict=True):
        assert torch.equal(ours, theirs)


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


def test_optimizers_of_one_kind_have_names_of_their_own() -> None:
    model = net()
    with gradsurgeon.apply(model, RULES) as session:
        adversaries(model)
        rates = dict(curves_of(session, RATE))
    assert rates == {"0.SGD/0": [pytest.approx(0.1)], "2.SGD/0": [pytest.approx(0.1)]}


def test_a_rule_that_acts_in_some_steps_has_their_losses() -> None:
    model = net()
    rules = rule_file({**NORMS, "steps": {"every": 2}})
    with gradsurgeon.apply(model, rules, mode="observe") as session:
        (losses,) = plain(model).values()
        session.pause()
        plain(model)
        session.resume()
        (later,) = plain(model).values()
        steps, values = zip(*session.history("loss", LOSS), strict=True)
    assert steps == (0, 2, 6, 8)
    assert values == pytest.approx([losses[0], losses[2], later[0], later[2]])


def test_without_a_rule_on_norms_no_loss_is_recorded() -> None:
    model = net()
    rules = rule_file({"action": "clip-norm", "params": "*", "max_norm": 1.0, "per": "rule"})
    with gradsurgeon.apply(model, rules) as session:
        plain(model)
        assert list(session.recorded().series) == []


def test_a_run_shows_both_in_text_json_page_and_on_the_screen(tmp_path: Path) -> None:
    model = net()
    with gradsurgeon.apply(model, RULES, record=tmp_path / "run"):
        (losses,) = plain(model).values()
    with gradsurgeon.open_run(tmp_path / "run") as run:
        report = summary(run)
        page = page_data(run)
    found = to_dict(report)
    (loss,) = found["losses"]
    assert (loss["name"], loss["steps"]) == ("loss", [0, 1, 2])
    assert loss["values"] == pytest.approx(losses)
    steps = {"steps": [0, 1, 2], "values": [0.1] * 3}
    assert found["rates"] == [{"optimizer": "SGD", "group": 0, **steps}]
    text = report.text(width=100)
    of_loss = text.split("loss of each update, recorded by norms in steps 0..2")[1].splitlines()[2]
    assert of_loss.split()[0] == "loss"
    assert of_loss.split()[3:6] == [f"{value:.3g}" for value in (losses[-1], losses[0], losses[-1])]
    of_rate = text.split("learning rates, recorded by norms in steps 0..2")[1].splitlines()[2]
    assert of_rate.split()[2:] == ["0.1"] * 3
    shown = screen(newest_report(tmp_path / "run"), 100)
    assert shown[1] == f"loss {losses[-1]:.4g}, learning rate 0.1"
    assert "learning rates, recorded by norms in steps 0..2" in shown
    assert [line["label"] for line in page["losses"] + page["rates"]] == ["loss", "SGD/0"]


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
    optimizer = sgd(model)
    with attach(model, NORMS, tagged) as session:
        plain(model, optimizer, lambda model: gradsurgeon.tag(loss_of(model), "loss") * 2)
        found = to_dict(summary(session))
    assert [(loss["name"], loss["rule"]) for loss in found["losses"]] == [("loss", "t")]


def test_a_diagnosis_tells_the_loss_and_the_learning_rate_before_the_step() -> None:
    model = net()
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "warn"}
    optimizer = sgd(model)
    losses = []
    with (
        attach(model, trap, NORMS) as session,
        pytest.warns(match="rule trap"),
    ):
        for step in range(23):
            if step == 21:
                optimizer.param_groups[0]["lr"] = 0.05
            optimizer.zero_grad()
            loss = loss_of(model, X * float("nan") if step == 22 else X)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        (message,) = messages(session, "trap")
    (before,) = [line for line in message.splitlines() if line.startswith("  before: ")]
    assert before == (
        f"  before: learning rate 0.05 since step 21; loss {losses[2]:.3g} to {losses[21]:.3g} in the 20 steps before"
    )
