"""`on_event=`: a function of the script that sees each event, and may stop the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import Event, NonFiniteGradientError

NAN = float("nan")
NORMS = {"id": "norms", "action": "norm-log", "params": "*"}


class Stop(Exception):  # noqa: N818 # what a script calls it
    pass


def trap(then: str) -> dict[str, Any]:
    return {"id": "trap", "action": "nan-trap", "params": "*", "then": then}


def rules(*given: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "rules": list(given)}


class Training:
    """One layer under Adam, whose loss is NaN in the steps that are named."""

    def __init__(self, bad: tuple[int, ...] = (), *, dead: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self._dead = dead
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self._bad = bad
        self.done = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        factor = NAN if self.done in self._bad else 1.0
        self.done += 1
        bias = None if self._dead else self.model.bias
        out = nn.functional.linear(torch.ones(4, 3), self.model.weight, bias)
        (out.square().mean() * factor).backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        moments = [value.clone() for one in self.optimizer.state.values() for value in one.values()]
        return [*(param.detach().clone() for param in self.model.parameters()), *moments]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def stops_on(*kinds: str) -> Callable[[Event], None]:
    def stop(event: Event) -> None:
        if event.kind in kinds:
            raise Stop(f"{event.kind} at {event.step}")

    return stop


def test_it_sees_what_the_session_notes_and_nothing_else() -> None:
    seen: list[Event] = []
    training = Training(bad=(1, 3))
    with gradsurgeon.apply(
        training.model, rules(NORMS, trap("skip-step")), on_event=seen.append
    ) as session:
        for _ in range(5):
            training.step()
    assert [event.kind for event in seen] == ["trap", "skipped-step"] * 2
    assert seen == session.events


def test_it_is_called_on_the_thread_that_has_seen_the_event() -> None:
    threads: list[int] = []
    training = Training(bad=(0,))

    def note(_: Event) -> None:
        threads.append(threading.get_ident())

    with gradsurgeon.apply(training.model, rules(trap("skip-step")), on_event=note):
        training.step()
    assert set(threads) == {threading.get_ident()}


@pytest.mark.parametrize("then", ["skip-step", "warn"])
@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
def test_what_it_raises_at_a_trap_comes_before_the_weights_move(then: str) -> None:
    training = Training(bad=(2,))
    with gradsurgeon.apply(
        training.model, rules(NORMS, trap(then)), on_event=stops_on("trap")
    ) as session:
        training.step()
        training.step()
        before = training.state()
        with pytest.raises(Stop, match=r"^trap at 2$"):
            training.step()
        # Gradients are as backward has left them, and nothing has moved.
        assert same(training.state(), before)
        assert all(param.grad is not None for param in training.model.parameters())
        # Who catches it may go on, as after a trap that raises.
        training.step()
        assert session.step == 4
    assert not same(training.state(), before)


def test_after_it_has_raised_training_is_what_it_is_without_that_step() -> None:
    stopped, skipped = Training(bad=(2,)), Training(bad=(2,))
    with gradsurgeon.apply(stopped.model, rules(trap("warn")), on_event=stops_on("trap")):
        for step in range(6):
            if step != 2:
                stopped.step()
                continue
            with pytest.raises(Stop), pytest.warns(gradsurgeon.GradSurgeonWarning):
                stopped.step()
    with gradsurgeon.apply(skipped.model, rules(trap("skip-step"))):
        for _ in range(6):
            skipped.step()
    assert same(stopped.state(), skipped.state())


def test_a_trap_that_stops_is_what_is_caught_and_shows_both() -> None:
    training = Training(bad=(0,))
    with (
        gradsurgeon.apply(training.model, rules(trap("raise")), on_event=stops_on("trap")),
        pytest.raises(NonFiniteGradientError) as caught,
    ):
        training.step()
    assert isinstance(caught.value.__context__, Stop)


def test_what_is_seen_after_an_update_is_raised_at_its_end() -> None:
    training = Training(dead=True)
    never = {"id": "bias", "action": "clamp", "params": "bias", "at": "step", "min": -1}
    session = gradsurgeon.apply(
        training.model, rules(NORMS, never), on_event=stops_on("notice", "never-fired")
    )
    with pytest.warns(gradsurgeon.GradSurgeonWarning), pytest.raises(Stop):
        for _ in range(10):
            training.step()
    # The update is complete: counted by the session, and by the optimizer.
    (state,) = {int(state["step"]) for state in training.optimizer.state.values()}
    assert training.done == session.step == state > 2
    # A session that stays, as garbage does for a while, is one more for the models of other tests to be told from.
    with pytest.raises(Stop, match=r"^never-fired"):
        session.remove()


@pytest.mark.parametrize("how", ["with", "remove", "function"])
def test_what_is_seen_when_the_rules_are_taken_off_is_raised_once_they_are(how: str) -> None:
    training = Training()
    late = {**NORMS, "id": "late", "steps": {"from": 100}}
    session = gradsurgeon.apply(training.model, rules(late), on_event=stops_on("never-fired"))
    training.step()
    with pytest.raises(Stop):
        if how == "with":
            with session:
                pass
        elif how == "remove":
            session.remove()
        else:
            gradsurgeon.remove(training.model)
    assert not training.model.weight._backward_hooks
    session.remove()
    training.step()


def test_another_exception_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    late = {**NORMS, "id": "late", "steps": {"from": 100}}
    with (
        caplog.at_level(logging.ERROR, "gradsurgeon"),
        pytest.raises(ZeroDivisionError),
        gradsurgeon.apply(training.model, rules(late), on_event=stops_on("never-fired")),
    ):
        raise ZeroDivisionError
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], Stop)


def test_of_several_errors_the_first_is_raised_and_the_others_are_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(event: Event) -> None:
        raise Stop(event.kind)

    training = Training(bad=(0,))
    with (
        caplog.at_level(logging.ERROR, "gradsurgeon"),
        gradsurgeon.apply(training.model, rules(trap("skip-step")), on_event=fail),
        pytest.raises(Stop, match=r"^trap$"),
    ):
        training.step()
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "skipped-step"


def test_by_hand_it_stops_at_the_tick() -> None:
    model = nn.Linear(3, 2)
    with gradsurgeon.apply(
        model, rules(trap("skip-step")), optimizer=[], on_event=stops_on("trap")
    ) as session:
        (model(torch.ones(4, 3)).sum() * NAN).backward()
        with pytest.raises(Stop):
            session.tick()


def test_a_step_that_the_scaler_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with gradsurgeon.apply(
        training.model,
        rules(NORMS, trap("skip-step")),
        scaler=scaler,
        on_event=stops_on("scaler-skip"),
    ):
        scaler.scale(training.model(torch.ones(4, 3)).sum() * float("inf")).backward()
        with pytest.raises(Stop):
            scaler.step(training.optimizer)
        scaler.update()
    assert not training.optimizer.state


def test_what_is_no_function_is_refused() -> None:
    training = Training()
    with pytest.raises(TypeError, match="on_event= must be a function of one event, not list"):
        gradsurgeon.apply(training.model, rules(NORMS), on_event=[])  # type: ignore[arg-type]
    assert not training.model.weight._backward_hooks
