"""Several threads train: what one does is none of another's business."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import pytest
import torch
from ranks import Json
from small import fields_of, fired, kinds_of, linears, relu_net, rule_file, sgd, steps_of
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


class Slow(torch.optim.SGD):
    """Waits in the middle of its step, where asked to."""

    gate: tuple[threading.Event, threading.Event] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.gate is not None:
            self.gate[0].set()
            self.gate[1].wait(60)
        return super().step(closure)


@pytest.mark.parametrize("other_session", [False, True])
def test_a_skip_stays_a_skip_while_another_thread_steps(other_session: bool) -> None:
    model: Any = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    first = Slow(model[0].parameters(), 0.1)
    second = torch.optim.Adam(model[1].parameters(), 0.1)
    rules = rule_file(RULES["rules"][3])
    parts = list(model) if other_session else [model]
    sessions = [gradsurgeon.apply(part, rules) for part in parts]
    before, other = (layer.weight.detach().clone() for layer in model)
    (model[0](torch.ones(1, 2)) * float("nan")).sum().backward()
    model[1](torch.ones(1, 2)).sum().backward()
    Slow.gate = gate = (threading.Event(), threading.Event())
    try:
        thread = threading.Thread(target=first.step)
        thread.start()
        assert gate[0].wait(60)
        second.step()
        gate[1].set()
        thread.join()
    finally:
        Slow.gate = None
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
    session = gradsurgeon.apply(model, RULES, optimizer=optimizer)
    for step in range(40):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 8, generator=chance)).square().sum()
        if step % 7 == 5:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
    found[seed] = {
        "weights": [param.tolist() for param in model.parameters()],
        "events": fields_of(session, "kind", "step", "rule"),
        "norms": steps_of(session, "0.weight", rule="n"),
        "passes": steps_of(session, "0.weight", rule="b"),
        "fired": fired(session),
    }
    session.remove()


@pytest.mark.slow
def test_models_in_threads_train_and_are_recorded_as_one_after_the_other() -> None:
    alone: dict[int, Any] = {}
    for seed in range(4):
        train(seed, alone)
    for _ in range(3):
        found: dict[int, Any] = {}
        threads = [threading.Thread(target=train, args=(seed, found)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone


def test_hooks_stay_where_they_are_while_another_thread_steps() -> None:
    # A pass that runs meanwhile would meet a parameter without its rules.
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    second = sgd(other)
    with gradsurgeon.apply(model, RULES):
        hooks: Any = model.weight._backward_hooks
        before = list(hooks)
        other(torch.ones(1, 2)).sum().backward()
        thread = threading.Thread(target=second.step)
        thread.start()
        thread.join()
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
    model.weight = Told(model.weight.detach())
    other = nn.Linear(2, 1)
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
                other(torch.ones(1, 2)).sum().backward()
                second.step()
                second.zero_grad()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not Told.readers
        model(torch.ones(1, 2)).sum().backward()
        assert Told.readers == {threading.get_ident()}
        first.step()  # a session without one warns


def test_the_loss_scale_of_another_thread_is_not_mine() -> None:
    norms = rule_file(RULES["rules"][1], RULES["rules"][2])
    model = nn.Linear(2, 1, bias=False)
    other = nn.Linear(2, 1, bias=False)
    inside, go_on = threading.Event(), threading.Event()

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            inside.set()
            go_on.wait(60)
            return grads[0]

    def scaled() -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        scaler.scale(Wait.apply(other(torch.ones(1, 2))).sum()).backward()

    with gradsurgeon.apply(model, norms) as session, gradsurgeon.apply(other, norms) as second:
        optimizer = sgd(model)
        thread = threading.Thread(target=scaled)
        thread.start()
        assert inside.wait(60)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        go_on.set()
        thread.join()
        for rule in ("n", "b"):
            assert session.latest("weight", rule=rule) == pytest.approx(2**0.5)
        assert second.latest("weight", rule="b") == pytest.approx(2**0.5)


def test_the_gradients_that_another_thread_asks_for_are_not_mine() -> None:
    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            x = torch.ones(1, requires_grad=True)
            thread = threading.Thread(target=lambda: torch.autograd.grad(x * 2, x))
            thread.start()
            thread.join()
            return grads[0]

    model = linears(2, 2, 1)
    optimizer = sgd(model)
    norms = rule_file(RULES["rules"][2])
    with gradsurgeon.apply(model, norms) as session:
        model[1](Ask.apply(model[0](torch.ones(1, 2)))).sum().backward()
        optimizer.step()
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

    threads = [threading.Thread(target=remove, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert not registry._attached
