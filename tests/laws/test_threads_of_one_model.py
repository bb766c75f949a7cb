"""Threads and losses by name: passes of two threads through one model are refused, other passes are left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def at_once(*works: Callable[[], object]) -> None:
    """Run functions in threads at once; raise what one of them raises."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        start.wait()
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(run, work) for work in works]:
            done.result()


def combined(model: Any, x: Tensor) -> Tensor:
    out: Tensor = aggregator("mgda")(jacobian(two(model, x), trunk_of(model)))
    return out


def check(model: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(flat_grads(trunk_of(model)), wanted, rtol=1e-9, atol=1e-12)


def heads() -> Any:
    model = Heads()
    applied(model, {"action": "combine", "method": "mgda"})
    return model


@pytest.mark.parametrize(
    ("running", "other"), [("named", "named"), ("named", "plain"), ("plain", "named")]
)
def test_passes_of_two_threads_through_one_model_are_refused(running: str, other: str) -> None:
    model = heads()
    x = torch.randn(5, 6)
    inside = threading.Event()
    refused = threading.Event()

    def hold(grad: Tensor) -> None:
        inside.set()
        assert refused.wait(20)

    def run(kind: str) -> None:
        if kind == "named":
            gradsurgeon.backward(two(model, x))
        else:
            sum(two(model, x).values()).backward()  # type: ignore[union-attr]

    def second() -> None:
        assert inside.wait(20)
        with pytest.raises(GradSurgeonError, match="run both passes in one thread"):
            run(other)
        refused.set()

    handle = model.seg.weight.register_hook(hold)
    at_once(partial(run, running), second)
    handle.remove()
    model.zero_grad()
    run("named")
    check(model, combined(model, x))


def test_gradients_that_a_hook_asks_for_are_those_without_rules() -> None:
    model = heads()
    x = torch.randn(5, 6)
    params = trunk_of(model)
    wanted = combined(model, x)
    asked = torch.autograd.grad(two(model, x)["seg"], params)
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
        check(model, wanted)
    assert set(seen) == {True}


def test_threads_with_models_of_their_own_do_not_wait_for_each_other() -> None:
    models = [heads(), heads()]
    x = torch.randn(5, 6)
    wanted = [combined(model, x) for model in models]
    inside = threading.Barrier(2)

    def meet(grad: Tensor) -> None:
        inside.wait(20)

    for model in models:
        # Neither pass ends before the other one has begun.
        model.seg.weight.register_hook(meet)
    at_once(*(partial(gradsurgeon.backward, two(model, x)) for model in models))
    assert not inside.broken
    for model, grads in zip(models, wanted, strict=True):
        check(model, grads)
