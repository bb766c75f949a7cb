"""`on_event=`: a function of the script that sees each event."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest
import torch
from ranks import Json
from small import attach, equal, kinds_of
from torch import Tensor, nn

from gradsurgeon import Event, NonFiniteGradientError

NAN = float("nan")
NORMS = {"id": "norms", "action": "norm-log", "params": "*"}


def trap(then: str) -> Json:
    return {"id": "trap", "action": "nan-trap", "params": "*", "then": then}


class Training:
    """One layer under Adam, whose loss is NaN in the steps that are named."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self._bad = bad
        self.done = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        factor = NAN if self.done in self._bad else 1.0
        self.done += 1
        (self.model(torch.ones(4, 3)).square().mean() * factor).backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        moments = [value.clone() for one in self.optimizer.state.values() for value in one.values()]
        return [*(param.detach().clone() for param in self.model.parameters()), *moments]


def test_it_sees_what_the_session_notes_and_nothing_else() -> None:
    seen: list[Event] = []
    training = Training(bad=(1, 3))
    with attach(training.model, NORMS, trap("skip-step"), on_event=seen.append) as session:
        for _ in range(5):
            training.step()
    assert [event.kind for event in seen] == ["trap", "skipped-step"] * 2
    assert seen == session.events


def test_it_is_called_on_the_thread_that_has_seen_the_event() -> None:
    threads: list[int] = []
    training = Training(bad=(0,))

    def note(_: Event) -> None:
        threads.append(threading.get_ident())

    with attach(training.model, trap("skip-step"), on_event=note):
        training.step()
    assert set(threads) == {threading.get_ident()}


@pytest.mark.parametrize("then", ["skip-step", "warn", "raise"])
@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
def test_what_it_raises_is_logged_and_changes_nothing(
    then: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError(event.kind)

    states = []
    for on_event in (None, fail):
        training = Training(bad=(2,))
        with attach(training.model, trap(then), on_event=on_event) as session:
            for _ in range(4):
                with contextlib.suppress(NonFiniteGradientError):
                    training.step()
        states.append(training.state())
    assert equal(*states) or then == "warn"
    logged = [one for one in caplog.records if one.levelno == logging.ERROR]
    errors = [one.exc_info[1] for one in logged if one.exc_info is not None]
    assert [str(error) for error in errors] == kinds_of(session)


def test_what_is_no_function_is_refused() -> None:
    training = Training()
    with pytest.raises(TypeError, match="on_event= must be a function of one event, not list"):
        attach(training.model, NORMS, on_event=[])
    assert not training.model.weight._backward_hooks
