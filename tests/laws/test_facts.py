"""Facts: what differs from most trainings and may be meant is told once, and is no finding; its healthy opposite is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import data
from small import rule_file, sgd, take_step
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

import gradsurgeon
from gradsurgeon.report import summary

RULES = rule_file(
    {"id": "nans", "action": "nan-trap", "params": "*", "then": "warn"},
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "loop", "action": "check-loop", "params": "*"},
    {"id": "structure", "action": "check-structure", "params": "*"},
)
STEPS = 40


class Training(NamedTuple):
    model: nn.Module
    batch: Callable[[int], Tensor] = lambda step: data(step, 6, 4)
    after: Callable[[int], object] = lambda _: None
    optimizer: Optimizer | None = None


def facts_of(training: Training, steps: int = STEPS) -> list[str]:
    """Train, and return the facts of the summary."""
    model = training.model
    optimizer = training.optimizer or sgd(model, 0.01)
    with gradsurgeon.apply(model, RULES, optimizer=optimizer) as session:
        for step in range(steps):
            take_step(optimizer, model(training.batch(step)).square().mean())
            training.after(step)
    assert [event for event in session.events if event.kind == "check"] == []
    lines = summary(session).outcome.callout_lines
    return [line.removeprefix("  ") for line in lines if line.startswith("  ")]


def layers(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 2))


class Branches(nn.Module):
    """Sums the results of its branches."""

    def __init__(self, *branches: nn.Module, **named: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        for name, module in named.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        parts += [module(x) for name, module in self.named_children() if name != "branches"]
        return torch.stack(parts).sum(0)


class Memory(nn.Module):
    """Reads a table that is an attribute of the module."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(4, table.shape[1])
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor((self.query(x) @ self.table.T).softmax(-1) @ self.table)


def drawn() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(12, 6)


def table_of_positions() -> Tensor:
    angles = (torch.arange(12.0)[:, None] + 0.5) / 10 ** torch.arange(3.0)
    return torch.cat([angles.sin(), angles.cos()], 1)


def stepped(times: int, *, size: int = 10, gamma: float = 0.5) -> Training:
    """Steps a scheduler so many times after each update."""
    model = layers()
    optimizer = sgd(model, 0.1)
    scheduler: LRScheduler = StepLR(optimizer, size, gamma)

    def after(_: int) -> None:
        for _ in range(times):
            scheduler.step()

    return Training(model, after=after, optimizer=optimizer)


def adam(rate: float) -> Training:
    model = layers()
    return Training(model, optimizer=torch.optim.Adam(model.parameters(), rate))


def with_rates(*rates: float) -> Training:
    """Sets the learning rate of each update."""
    model = layers()
    optimizer = sgd(model, rates[0])

    def after(step: int) -> None:
        optimizer.param_groups[0]["lr"] = rates[min(step + 1, STEPS - 1)]

    return Training(model, after=after, optimizer=optimizer)


def trained_table(*, is_owned: bool) -> Training:
    table = drawn().requires_grad_()
    model = Memory(table)
    params = list(model.parameters())
    if is_owned:
        params.append(table)  # type: ignore[arg-type] # a tensor will do
    return Training(model, optimizer=torch.optim.SGD(params, 0.01))


def buffer() -> Training:
    model = Memory(drawn())
    table = model.table
    del model.table
    model.register_buffer("table", table)
    return Training(model)


def evaluated_once() -> Training:
    model = layers(nn.Dropout(0.1)).eval()
    return Training(model, after=lambda step: model.train(step == STEPS // 2))


def pixels(step: int) -> Tensor:
    return 255 * data(step, 6, 4).sigmoid()


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1000


FIXED = data(0, 6, 4)
SHARED = nn.Linear(4, 2)

FACTS: dict[str, tuple[Callable[[], Training], str]] = {
    "evaluation mode": (
        lambda: Training(layers(nn.Dropout(0.1), nn.BatchNorm1d(4)).eval()),
        "each of 40 passes ran in evaluation mode, so dropout is off, and batch norms use their running statistics: 1, 2. Call",
    ),
    "a list of one block": (
        lambda: Training(Branches(*[nn.Linear(4, 2)] * 3)),
        "branches.0, branches.1, branches.2 are one object: a list of 3 that repeats one module trains it once",
    ),
    "a copy that is none": (
        lambda: Training(Branches(nn.Linear(4, 2), online=SHARED, target_net=SHARED)),
        "online, target_net are one object, so `target_net` changes with each update",
    ),
    "a plain tensor": (
        lambda: Training(Memory(drawn())),
        "table are plain tensors of a module: the loss depends on them, but no optimizer trains them",
    ),
    "a leaf that no optimizer has": (lambda: trained_table(is_owned=False), "table are plain"),
    "one input": (
        lambda: Training(layers(), batch=lambda _: FIXED),
        "the model got the same input in each of 21 passes looked at",
    ),
    "a scheduler that runs ahead": (
        lambda: stepped(2),
        "the StepLR of an optimizer went 30 steps in 15 updates, so the learning rate changes too fast",
    ),
    "a rate that vanishes": (
        lambda: stepped(1, size=1, gamma=0.4),
        "the learning rate of SGD/0 was below a millionth of its peak of 0.1 in 24 of 40 updates, first at step 16",
    ),
    "a peak of one update": (
        lambda: with_rates(*[0.01] * 9, 0.1, *[0.02] * 30),
        "had its peak of 0.1 in one of 40 updates, at step 9, and less than half before and after",
    ),
    "a rate of Adam above 1": (
        lambda: adam(3.0),
        "the learning rate of Adam is 3, so each update may move each weight by that much",
    ),
    "pixels into a tanh": (
        lambda: Training(layers(nn.Tanh()), batch=pixels),
        "the data that goes into a layer with a tanh has a mean magnitude of 1",
    ),
    "pixels into a sigmoid": (
        lambda: Training(layers(nn.Sigmoid()), batch=lambda step: pixels(step) / 5),
        "of the results are saturated: no gradient passes there. Normalise the input",
    ),
}  # fmt: skip

SILENT: dict[str, Callable[[], Training]] = {
    "training mode": lambda: Training(layers(nn.Dropout(0.1), nn.BatchNorm1d(4))),
    "evaluation mode that changes nothing": lambda: Training(layers(nn.Dropout(0.0)).eval()),
    "training mode from a stage on": evaluated_once,
    "blocks": lambda: Training(Branches(*[nn.Linear(4, 2) for _ in range(3)])),
    "one activation": lambda: Training(nn.Sequential(nn.Linear(4, 2), *[nn.ReLU()] * 2)),
    "an embedding of encoder and decoder": lambda: Training(Branches(encoder=SHARED, decoder=SHARED)),
    "a copy": lambda: Training(Branches(online=nn.Linear(4, 2), target_net=nn.Linear(4, 2))),
    "a table of positions": lambda: Training(Memory(table_of_positions())),
    "a buffer": buffer,
    "a leaf that an optimizer has": lambda: trained_table(is_owned=True),
    "a tanh": lambda: Training(layers(nn.Tanh())),
    "pixels that the model normalises": lambda: Training(
        layers(nn.Tanh()), batch=lambda step: pixels(step) / 128 - 1
    ),
    "large results of a layer into a tanh": lambda: Training(
        nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 2), nn.Tanh())
    ),
    "batches": lambda: Training(layers()),
    "thirty epochs of each rollout": lambda: Training(layers(), batch=lambda step: data(step // 30, 6, 4)),
    "a scheduler in time": lambda: stepped(1),
    "a warm-up and a decay": lambda: with_rates(
        *[step / 90 for step in range(9)], *[(31 - step) / 310 for step in range(31)]
    ),
    "a cosine": lambda: with_rates(*torch.linspace(0, torch.pi, 40).cos().add(1).div(20).tolist()),
    "Adam": lambda: adam(0.01),
    "SGD with a rate above 1": lambda: with_rates(*[1.5] * STEPS),
    "a late start": lambda: with_rates(*[0.0] * 25, *[0.1] * 15),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_is_told_once_and_is_no_finding(name: str) -> None:
    make, text = FACTS[name]
    told = [fact for fact in facts_of(make()) if "spike" not in fact]
    assert len(told) == 1, told
    assert text in told[0]


@pytest.mark.parametrize("name", SILENT)
def test_the_usual_is_silent(name: str) -> None:
    told = [fact for fact in facts_of(SILENT[name]()) if "spike" not in fact]
    assert told == []


def test_the_closures_of_one_update_see_one_batch() -> None:
    model = layers()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=25, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(FIXED) - 1).square().mean()
        loss.backward()
        return loss

    with gradsurgeon.apply(model, RULES, optimizer=optimizer) as session:
        optimizer.step(closure)
    assert not any("same input" in event.message for event in session.events)


def test_a_few_steps_are_no_training() -> None:
    model = layers(nn.Dropout(0.1)).eval()
    assert facts_of(Training(model, batch=lambda _: FIXED), steps=5) == []


SCRIPT = """
class Agent:
    def __init__(self, policy, target):
        self.policy_net = policy
        self.target_net = target

    def update(self, step):
        take_step(step, self.policy_net)

agent = Agent(*networks)
for step in range(3):
    agent.update(step)
"""


@pytest.mark.parametrize("is_copy", [False, True])
def test_two_variables_of_the_script_that_are_one_network(*, is_copy: bool) -> None:
    model = layers()
    optimizer = sgd(model, 0.01)

    def step(number: int, network: Any) -> None:
        take_step(optimizer, network(data(number, 6, 4)).square().mean())

    target = layers() if is_copy else model
    with gradsurgeon.apply(model, RULES, optimizer=optimizer) as session:
        # Frames of the script are known by the name of its module.
        script = {"__name__": "__main__", "networks": (model, target), "take_step": step}
        exec(SCRIPT, script)  # a script of this file
    told = [event.message for event in session.events if event.kind == "fact"]
    assert len(told) == (not is_copy)
    assert all(text.startswith("policy_net, target_net are one object") for text in told)


@pytest.mark.parametrize(("steps", "has_line"), [(11, False), (13, True)])
def test_a_fact_waits_for_its_line_but_not_beyond_the_end(steps: int, *, has_line: bool) -> None:
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    model = nn.ModuleList([first, second])
    optimizer = sgd(model, 0.01)
    rules = rule_file({"id": "update", "action": "check-update", "params": "*"})
    with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
        for step in range(steps):
            x = data(step, 6, 4)
            take_step(optimizer, first(x).square().mean() + 0 * second(x).sum())
    (fact,) = session.events
    assert fact.kind == "fact"
    assert (f"MulBackward0 at {__file__}:" in fact.message) == has_line
    assert not torch.is_anomaly_enabled()
