"""What rules have seen of parameters goes with them to the optimizer that claims them, whenever that is met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import data
from small import attach, kinds_of, steps_of, tanh_net, weights_of
from torch import nn

from gradsurgeon import NonFiniteGradientError

NAN = float("nan")
TRAP = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step", "forensics": False}
NORMS = {"id": "norms", "action": "norm-log", "params": "*"}

pytestmark = pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")


def two_layers() -> Any:
    torch.manual_seed(0)
    return tanh_net(4, 4, 2)


def backward(model: Any, number: int, spoilt: str = "") -> None:
    """Run a pass in which the gradient of one parameter is NaN."""
    named = dict(model.named_parameters())
    handles = [named[spoilt].register_hook(lambda grad: grad * NAN)] if spoilt else []
    model(data(number, 3, 4)).square().sum().backward()
    for handle in handles:
        handle.remove()


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("owned", ["the first layer", "all"])
def test_a_report_has_the_passes_before_the_optimizer_was_known(owned: str) -> None:
    model = two_layers()
    early = sgd(model.parameters() if owned == "all" else model[0].parameters())
    with attach(model, TRAP, optimizer=early) as session:
        backward(model, 0, spoilt="2.weight")
        backward(model, 1)
        late = sgd(model[2].parameters())
        before = model[2].weight.detach().clone()
        late.step()
        assert torch.equal(model[2].weight, before)
        if owned != "all":
            early.step()
    trap, skip = session.events
    assert (trap.kind, skip.kind) == ("trap", "skipped-step")
    lines = trap.message.splitlines()
    assert lines[0].endswith("1 of 2 gradients are not finite after backward, micro-batch 1 of 2")
    assert lines[-1] == (
        "the border lies between 2.bias (still finite) and 2.weight (first that is not)"
    )


def test_a_row_of_skips_of_a_scaler_goes_on_under_another_optimizer() -> None:
    model = two_layers()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with attach(model, {**TRAP, "give_up_after": 3}, scaler=scaler):
        caught: Sequence[str] = ()
        for number in range(4):
            optimizer = sgd(model.parameters())
            optimizer.zero_grad()
            scaler.scale(model(data(number, 3, 4)).sum() * NAN).backward()
            try:
                scaler.step(optimizer)
            except NonFiniteGradientError as error:
                caught = str(error).splitlines()
                break
            scaler.update()
    assert number == 2
    assert "the GradScaler keeps skipping (3 steps in a row)" in caught[0]


@pytest.mark.parametrize("late", [False, True])
def test_a_state_waits_for_optimizers_that_are_met_later(late: bool) -> None:
    spikes = {
        "id": "spikes",
        "action": "spike-trap",
        "params": "*",
        "per": "parameter",
        "then": "clip",
        "above": {"times": 1.05, "warmup": 2},
    }
    model = two_layers()
    optimizer = sgd(model.parameters())
    with attach(model, spikes, optimizer=optimizer) as session:
        for number in range(8):
            optimizer.zero_grad()
            backward(model, number)
            optimizer.step()
        state = session.state_dict()

    resumed = two_layers()
    first = sgd(resumed[0].parameters())
    with attach(resumed, spikes, optimizer=first) as session:
        session.load_state_dict(state)
        backward(resumed, 8)
        if late:
            first.step()
        sgd(resumed[2].parameters()).step()
        if not late:
            first.step()
        assert session.step == 9
        updates: list[float] = []
        for part in session.state_dict()["rules"]["spikes"]["statistics"]:
            updates += part["kept"][0].tolist()
        assert updates == [9.0] * 4


def test_rows_before_the_optimizer_was_known_are_kept_though_its_steps_begin_anew() -> None:
    model = two_layers()
    early = sgd(model[0].parameters())
    late = None
    with attach(model, NORMS) as session:
        for number in range(6):
            backward(model, number)
            early.step()
            if number == 3:
                late = sgd(model[2].parameters())
            if late is not None:
                late.step()
            model.zero_grad()
        steps = steps_of(session, "2.weight")
    # The steps of an optimizer that is met late begin at 0, and the pass came before it.
    assert steps == [0, 1, 2, 3, 1, 2]


def test_a_row_of_trips_stays_with_the_optimizer_that_had_it() -> None:
    first, second, shared = (nn.Linear(1, 1, bias=False) for _ in range(3))
    model = nn.ModuleList([first, second, shared])
    one = sgd([first.weight, shared.weight])
    other = sgd([second.weight, shared.weight])
    optimizers = [one, other]

    def step(optimizer: torch.optim.Optimizer, spoilt: nn.Linear | None) -> None:
        model.zero_grad()
        sum(param.sum() for param in optimizer.param_groups[0]["params"]).backward()
        if spoilt is not None and spoilt.weight.grad is not None:
            spoilt.weight.grad.fill_(NAN)
        optimizer.step()

    trap = {**TRAP, "give_up_after": 3}
    with attach(model, trap, optimizer=optimizers) as session:
        step(one, None)
        step(other, second)
        step(other, second)
        # A third trip in a row would raise.
        step(one, first)
        with pytest.raises(NonFiniteGradientError, match="tripped 3 times in a row"):
            step(other, second)
    assert kinds_of(session).count("skipped-step") == 3


@pytest.mark.parametrize("of", ["a module", "parameters"])
def test_what_came_before_a_pause_is_not_held_against_a_later_update(of: str) -> None:
    model = two_layers()
    optimizer = sgd(model.parameters())
    rule = dict(TRAP)
    if of == "a module":
        del rule["params"]
        rule |= {"modules": "2", "tensor": "output"}
    with attach(model, rule, optimizer=optimizer) as session:
        weights = weights_of(model)
        model(torch.full((3, 4), NAN)).square().sum().backward()
        session.pause()
        optimizer.step()
        session.resume()
        with torch.no_grad():
            for param, weight in zip(model.parameters(), weights, strict=True):
                param.copy_(weight)
        optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
        assert not torch.equal(model[2].weight, weights[2])
        assert session.events == []


class Twice(torch.optim.SGD):
    """An optimizer that evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_nothing_is_learnt_or_recorded_of_an_update_in_which_the_session_pauses() -> None:
    model = two_layers()
    optimizer = Twice(model.parameters(), lr=0.0)
    above = {"times": 2.0, "warmup": 2}
    spikes = {"id": "spikes", "action": "spike-trap", "params": "*", "above": above, "then": "warn"}
    weights = {**NORMS, "tensor": "value"}
    with attach(model, spikes, weights, optimizer=optimizer) as session:

        def train(*, pauses: bool) -> None:
            calls = []

            def closure() -> None:
                calls.append(1)
                if pauses and len(calls) == 2:
                    session.pause()
                model.zero_grad()
                with torch.enable_grad():
                    backward(model, 0)

            optimizer.step(closure)
            session.resume()

        for number in range(4):
            train(pauses=number == 2)
        learnt = session.state_dict()["rules"]["spikes"]["statistics"][0]["kept"]
        steps = steps_of(session, "2.weight")
    assert learnt[0].tolist() == [3.0] * learnt.shape[1]
    assert steps == [0, 1, 3]
