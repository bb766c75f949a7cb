"""Methods that draw random numbers: new ones in each call, by the seed of the script, whose own numbers stay its own."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from several_losses import Heads, rules, trunk_of, two
from torch import Tensor

import gradsurgeon

pytestmark = pytest.mark.usefixtures("doubles")


def weights(seed: int, *, calls: int = 1, steps: int = 1, start: int = 0) -> list[float]:
    """Return the weights of one loss under two rules that draw, rule by rule, in all calls of some steps."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(seed)
    given = [
        {"id": "one", "action": "combine", "method": "random", "params": "trunk.0.*"},
        {"id": "other", "action": "combine", "method": "random", "params": "trunk.2.*"},
    ]
    found: list[list[Any]] = [[], []]
    with gradsurgeon.apply(model, rules(*given), start_step=start) as session:
        for _ in range(steps):
            for _ in range(calls):
                gradsurgeon.backward(two(model, x))
                for rule, row in zip(("one", "other"), found, strict=True):
                    row.append(session.history("seg", "weight", rule=rule)[-1][1])
            optimizer.step()
    return [value for row in found for value in row]


@pytest.mark.filterwarnings("ignore:.*combines the losses of each backward pass")
def test_the_weights_follow_from_the_seed_the_rule_the_step_and_the_call() -> None:
    found = weights(1, calls=3, steps=2)
    assert len(set(found)) == 2 * 3 * 2
    assert found == weights(1, calls=3, steps=2)
    assert not set(found) & set(weights(2, calls=3, steps=2))


def test_a_training_that_goes_on_draws_what_it_would_have_drawn() -> None:
    one, _, other, _ = weights(1, steps=2)
    assert weights(1) == [one, other]
    assert weights(1, start=1) == [weights(1, steps=2)[1], weights(1, steps=2)[3]]


@pytest.mark.parametrize("method", ["pcgrad", "random"])
def test_the_numbers_of_the_script_are_those_without_rules(method: str) -> None:
    model, x = Heads(), torch.randn(5, 6)
    before = torch.get_rng_state()
    with gradsurgeon.apply(model, rules({"action": "combine", "method": method})):
        gradsurgeon.backward(two(model, x))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.*combines the losses of each backward pass")
@pytest.mark.parametrize("method", ["pcgrad", "random"])
def test_what_another_thread_draws_meanwhile_never_comes_again(method: str) -> None:
    model, x = Heads(), torch.randn(5, 6)
    drawn: list[float] = []
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            drawn.append(float(torch.rand(())))
            time.sleep(0)

    thread = threading.Thread(target=draw)
    with gradsurgeon.apply(model, rules({"action": "combine", "method": method})):
        thread.start()
        try:
            end = time.monotonic() + 20
            while len(drawn) < 500 and time.monotonic() < end:
                gradsurgeon.backward(two(model, x))
        finally:
            over.set()
            thread.join()
    assert len(set(drawn)) == len(drawn) >= 500


def test_another_default_device_changes_nothing() -> None:
    model, x = Heads(), torch.randn(5, 6)
    found: list[list[Tensor | None]] = []
    for device in ("cpu", "meta"):
        model.zero_grad()
        with gradsurgeon.apply(model, rules({"action": "combine", "method": "pcgrad"})):
            losses = two(model, x)
            torch.set_default_device(device)
            try:
                gradsurgeon.backward(losses)
            finally:
                torch.set_default_device(None)
        found.append([param.grad for param in trunk_of(model)])
    assert all(map(torch.equal, *found))
