"""Threads that train one model together, with losses by name: none sees what another one does meanwhile."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from several_losses import Heads, aggregator, jacobian, rules, trunk_of, two
from torch import Tensor

import gradsurgeon
from gradsurgeon.runtime import running_passes

pytestmark = [
    pytest.mark.usefixtures("doubles", "hurried"),
    pytest.mark.filterwarnings("ignore:.*combines the losses of each backward pass"),
    pytest.mark.filterwarnings("ignore:.*without the losses being known"),
]


def at_once(*works: Callable[[], None]) -> None:
    errors: list[Exception] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except Exception as error:  # noqa: BLE001 # to be raised in this thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def combined(model: Any, x: Tensor) -> Tensor:
    out: Tensor = aggregator("mgda")(jacobian(two(model, x), trunk_of(model)))
    return out


@pytest.mark.parametrize("other", ["named", "plain"])
def test_each_adds_what_it_would_have_added_alone(other: str) -> None:
    model, times = Heads(), 15
    reference = copy.deepcopy(model)
    seen: list[int] = []
    model.trunk[0].weight.register_hook(lambda grad: seen.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = gradsurgeon.apply(
        model, rules({"action": "combine", "method": "mgda"}), optimizer=optimizer
    )
    batches = [torch.randn(2, 5, 6) for _ in range(times)]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)

    def named(place: int) -> None:
        for batch in batches:
            gradsurgeon.backward(two(model, batch[place]))

    def plain() -> None:
        for batch in batches:
            sum(two(model, batch[1]).values()).backward()  # type: ignore[union-attr]

    at_once(lambda: named(0), plain if other == "plain" else lambda: named(1))
    wanted = torch.zeros(sum(param.numel() for param in trunk_of(model)))
    for batch in batches:
        wanted += combined(reference, batch[0])
        if other == "plain":
            wanted += jacobian(two(reference, batch[1]), trunk_of(reference)).sum(0)
        else:
            wanted += combined(reference, batch[1])
    found = torch.cat([param.grad.flatten() for param in trunk_of(model)])  # type: ignore[union-attr]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert session.status()["combine"].fired == times * (1 if other == "plain" else 2)
    # A hook of the script sees each pass that trains, and no other.
    assert len(seen) == 2 * times


def test_gradients_that_another_thread_asks_for_are_its_own() -> None:
    model, x, times = Heads(), torch.randn(5, 6), 60
    params = trunk_of(model)
    gradsurgeon.apply(model, rules({"action": "combine", "method": "mgda"}))
    wanted, asked = combined(model, x), torch.autograd.grad(two(model, x)["seg"], params)
    wrong: list[str] = []

    def train() -> None:
        for _ in range(times):
            model.zero_grad()
            gradsurgeon.backward(two(model, x))
            found = torch.cat([param.grad.flatten() for param in params])  # type: ignore[union-attr]
            if not torch.allclose(found, wanted, rtol=1e-9, atol=1e-12):
                wrong.append("trained")

    def ask() -> None:
        for _ in range(times):
            found = torch.autograd.grad(two(model, x)["seg"], params)
            if not all(map(torch.equal, found, asked)):
                wrong.append("asked")

    at_once(train, ask)
    assert not wrong


def test_gradients_that_a_hook_asks_for_are_those_without_rules() -> None:
    model, x = Heads(), torch.randn(5, 6)
    params = trunk_of(model)
    gradsurgeon.apply(model, rules({"action": "combine", "method": "mgda"}))
    wanted, asked = combined(model, x), torch.autograd.grad(two(model, x)["seg"], params)
    seen: list[bool] = []

    def ask(grad: Tensor) -> None:
        with torch.enable_grad():
            found = torch.autograd.grad(two(model, x)["seg"], params)
        seen.append(all(map(torch.equal, found, asked)))

    for _ in range(3):
        model.zero_grad()
        seg, depth = model(x)
        seg.register_hook(ask)
        conflict = seg.square().mean()
        gradsurgeon.backward(
            {"seg": conflict, "depth": 0.5 * (depth - 1).abs().mean() - 2.0 * conflict}
        )
        found = torch.cat([param.grad.flatten() for param in params])  # type: ignore[union-attr]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert seen
    assert all(seen)


def test_threads_with_models_of_their_own_do_not_wait_for_each_other() -> None:
    models: list[Any] = [Heads(), Heads()]
    x = torch.randn(5, 6)
    inside = threading.Barrier(2)

    def meet(grad: Tensor) -> None:
        inside.wait(20)

    for model in models:
        gradsurgeon.apply(model, rules({"action": "combine", "method": "mgda"}))
        # Neither pass ends before the other one has begun.
        model.seg.weight.register_hook(meet)
    at_once(*(partial(gradsurgeon.backward, two(model, x)) for model in models))
    assert not inside.broken


def test_a_pass_that_waits_long_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_passes, "_PATIENCE", 0.05)
    model: Any = Heads()
    x = torch.randn(5, 6)
    gradsurgeon.apply(model, rules({"action": "combine", "method": "mgda"}))
    inside, waited = threading.Event(), threading.Event()

    def hold(grad: Tensor) -> None:
        inside.set()
        assert waited.wait(20)

    model.seg.weight.register_hook(hold)

    def ask() -> None:
        assert inside.wait(20)
        threading.Timer(0.5, waited.set).start()
        with pytest.warns(gradsurgeon.GradSurgeonWarning, match="run them in one thread"):
            torch.autograd.grad(two(model, x)["depth"], trunk_of(model))

    at_once(partial(gradsurgeon.backward, two(model, x)), ask)
