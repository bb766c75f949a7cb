"""Several threads train: what one does is none of another's business."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from ranks import Json
from small import (
    attach,
    equal,
    fields_of,
    fired,
    kinds_of,
    linears,
    relu_net,
    rule_file,
    sgd,
    steps_of,
    take_step,
    weights_of,
)
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon.runtime import registry

pytestmark = pytest.mark.usefixtures("hurried")

RULES: Json = rule_file(
    {"id": "clamp", "action": "clamp", "params": "*", "at": "step", "min": -0.01, "max": 0.01},
    {"id": "n", "action": "norm-log", "params": "*"},
    {"id": "b", "action": "norm-log", "params": "*", "at": "backward"},
    {"id": "t", "action": "nan-trap", "params": "*", "then": "skip-step"},
)


def in_threads(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Slow(torch.optim.SGD):
    """Lets something happen in the middle of its step."""

    meanwhile: Callable[[], object] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.meanwhile is not None:
            in_threads(self.meanwhile)
        return super().step(closure)


@pytest.mark.parametrize("other_session", [False, True])
def test_a_skip_stays_a_skip_while_another_thread_steps(other_session: bool) -> None:
    model: Any = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    first = Slow(model[0].parameters(), 0.1)
    second = torch.optim.Adam(model[1].parameters(), 0.1)
    parts = list(model) if other_session else [model]
    sessions = [attach(part, RULES["rules"][3]) for part in parts]
    before, other = weights_of(model)
    (model[0](torch.ones(1, 2)) * float("nan")).sum().backward()
    model[1](torch.ones(1, 2)).sum().backward()
    first.meanwhile = second.step
    first.step()
    assert torch.equal(before, model[0].weight)
    assert not torch.equal(other, model[1].weight)
    assert model[0].weight.grad is not None
    assert kinds_of(sessions[0]) == ["trap", "skipped-step"]
    for session in sessions:
        session.remove()


def train(seed: int, found: dict[int, Any]) -> None:
    chance = torch.Generator().manual_seed(seed)
    model = relu_net(8, 16, 4)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=chance) * 0.2)
    optimizer = sgd(model, 0.01)
    with gradsurgeon.apply(model, RULES, optimizer=optimizer) as session:
        for step in range(40):
            loss = model(torch.randn(5, 8, generator=chance)).square().sum()
            take_step(optimizer, loss * (float("nan") if step % 7 == 5 else 1.0))
        found[seed] = (
            weights_of(model),
            fields_of(session, "kind", "step", "rule"),
            steps_of(session, "0.weight", rule="n"),
            steps_of(session, "0.weight", rule="b"),
            fired(session),
        )


@pytest.mark.slow
def test_models_in_threads_train_and_are_recorded_as_one_after_the_other() -> None:
    alone: dict[int, Any] = {}
    for seed in range(4):
        train(seed, alone)
    for _ in range(3):
        found: dict[int, Any] = {}
        in_threads(*(partial(train, seed, found) for seed in range(4)))
        for seed, (weights, *told) in alone.items():
            assert equal(found[seed][0], weights)
            assert [*found[seed][1:]] == told


def test_hooks_stay_where_they_are_while_another_thread_steps() -> None:
    # A pass that runs meanwhile would meet a parameter without its rules.
    model = nn.Linear(2, 1)
    other = nn.Linear(2, 1)
    second = sgd(other)
    with gradsurgeon.apply(model, RULES):
        hooks: Any = model.weight._backward_hooks
        before = list(hooks)
        other(torch.ones(1, 2)).sum().backward()
        in_threads(second.step)
        assert list(hooks) == before


_GRAD: Any = Tensor.grad


class Told(nn.Parameter):
    """Notes which threads read its gradient."""

    readers: ClassVar[set[int]] = set()

    @property
    def grad(self) -> Any:
        self.readers.add(threading.get_ident())
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        _GRAD.__set__(self, value)


def test_no_thread_reads_the_gradients_that_another_one_trains() -> None:
    # Autograd and `zero_grad` write them without Python's lock: who reads them then may crash the process.
    model = nn.Linear(2, 1, bias=False)
    other = nn.Linear(2, 1)
    model.weight = Told(model.weight.detach())
    first, second = (sgd(part) for part in (model, other))
    with (
        gradsurgeon.apply(model, RULES, optimizer=first),
        gradsurgeon.apply(other, RULES, optimizer=second),
    ):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        Told.readers.clear()

        def run() -> None:
            for _ in range(3):
                take_step(second, other(torch.ones(1, 2)).sum())

        in_threads(run)
        assert not Told.readers
        model(torch.ones(1, 2)).sum().backward()
        assert Told.readers == {threading.get_ident()}
        first.step()  # a session without one warns


class Meanwhile(torch.autograd.Function):
    """Lets something happen in another thread while its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], object]) -> Tensor:
        ctx.work = work
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        in_threads(ctx.work)
        return grads[0], None


def test_the_loss_scale_of_another_thread_is_not_mine() -> None:
    model = nn.Linear(2, 1, bias=False)
    other = nn.Linear(2, 1, bias=False)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def train() -> None:
        take_step(optimizer, model(torch.ones(1, 2)).sum())

    norms = RULES["rules"][1:3]
    with attach(model, *norms) as session, attach(other, *norms) as second:
        scaler.scale(Meanwhile.apply(other(torch.ones(1, 2)), train).sum()).backward()
        for rule in ("n", "b"):
            assert session.latest("weight", rule=rule) == pytest.approx(2**0.5)
        assert second.latest("weight", rule="b") == pytest.approx(2**0.5)


def test_the_gradients_that_another_thread_asks_for_are_not_mine() -> None:
    def ask() -> None:
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(x * 2, x)

    model = linears(2, 2, 1)
    optimizer = sgd(model)
    with attach(model, RULES["rules"][2]) as session:
        out = model[1](Meanwhile.apply(model[0](torch.ones(1, 2)), ask))
        take_step(optimizer, out.sum())
        assert steps_of(session, "1.weight") == [0]


class SlowList(list[Any]):
    """Lets other threads in between looking and acting on it."""

    def __iter__(self) -> Any:
        yield from self[:]
        time.sleep(0.01)


def test_rules_go_in_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_attached", SlowList())
    failed: list[BaseException] = []
    models = [nn.Linear(2, 1) for _ in range(6)]
    sessions = [gradsurgeon.apply(model, RULES) for model in models]

    def remove(session: gradsurgeon.Session) -> None:
        try:
            session.remove()
        except BaseException as error:  # noqa: BLE001 # to be told by the test, not by the thread
            failed.append(error)

    in_threads(*(partial(remove, session) for session in sessions))
    assert failed == []
    assert not registry._attached
