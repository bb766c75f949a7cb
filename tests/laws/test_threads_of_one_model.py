"""Threads and losses by name: passes of two threads through one model are refused, other passes are left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from several_losses import Heads, aggregator, applied, flat_grads, jacobian, trunk_of, two
from small import equal
from torch import Tensor

import gradsurgeon
from gradsurgeon import GradSurgeonError

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
def test_passes_of_two_threads_through_one_model_are_refused(other: str) -> None:
    model: Any = Heads()
    x = torch.randn(5, 6)
    applied(model, {"action": "combine", "method": "mgda"})
    inside, refused = threading.Event(), threading.Event()

    def hold(grad: Tensor) -> None:
        inside.set()
        assert refused.wait(20)

    model.seg.weight.register_hook(hold)

    def second() -> None:
        assert inside.wait(20)
        with pytest.raises(GradSurgeonError, match="run both passes in one thread"):
            if other == "named":
                gradsurgeon.backward(two(model, x))
            else:
                two(model, x)["depth"].backward()
        refused.set()

    at_once(partial(gradsurgeon.backward, two(model, x)), second)
    model.zero_grad()
    gradsurgeon.backward(two(model, x))
    torch.testing.assert_close(
        flat_grads(trunk_of(model)), combined(model, x), rtol=1e-9, atol=1e-12
    )


def test_a_named_pass_beside_a_running_plain_one_is_refused() -> None:
    model: Any = Heads()
    x = torch.randn(5, 6)
    applied(model, {"action": "combine", "method": "mgda"})
    inside, refused = threading.Event(), threading.Event()

    def hold(grad: Tensor) -> None:
        inside.set()
        assert refused.wait(20)

    def second() -> None:
        assert inside.wait(20)
        with pytest.raises(GradSurgeonError, match="run both passes in one thread"):
            gradsurgeon.backward(two(model, x))
        refused.set()

    handle = model.seg.weight.register_hook(hold)
    at_once(sum(two(model, x).values()).backward, second)  # type: ignore[union-attr]
    handle.remove()


def test_gradients_that_a_hook_asks_for_are_those_without_rules() -> None:
    model, x = Heads(), torch.randn(5, 6)
    params = trunk_of(model)
    applied(model, {"action": "combine", "method": "mgda"})
    wanted, asked = combined(model, x), torch.autograd.grad(two(model, x)["seg"], params)
    seen: list[bool] = []

    def ask(grad: Tensor) -> None:
        with torch.enable_grad():
            found = torch.autograd.grad(two(model, x)["seg"], params)
        seen.append(equal(found, asked))

    for _ in range(3):
        model.zero_grad()
        seg, depth = model(x)
        seg.register_hook(ask)
        conflict = seg.square().mean()
        gradsurgeon.backward(
            {"seg": conflict, "depth": 0.5 * (depth - 1).abs().mean() - 2.0 * conflict}
        )
        torch.testing.assert_close(flat_grads(params), wanted, rtol=1e-9, atol=1e-12)
    assert seen
    assert all(seen)


def test_threads_with_models_of_their_own_do_not_wait_for_each_other() -> None:
    models: list[Any] = [Heads(), Heads()]
    x = torch.randn(5, 6)
    wanted = [combined(model, x) for model in models]
    inside = threading.Barrier(2)

    def meet(grad: Tensor) -> None:
        inside.wait(20)

    for model in models:
        applied(model, {"action": "combine", "method": "mgda"})
        # Neither pass ends before the other one has begun.
        model.seg.weight.register_hook(meet)
    at_once(*(partial(gradsurgeon.backward, two(model, x)) for model in models))
    assert not inside.broken
    for model, grads in zip(models, wanted, strict=True):
        torch.testing.assert_close(flat_grads(trunk_of(model)), grads, rtol=1e-9, atol=1e-12)
