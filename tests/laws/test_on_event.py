"""`on_event=`: a function of the script that sees each event."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from small import attach, equal, kinds_of, sgd, take_step, weights_of
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import Event, NonFiniteGradientError

NORMS = {"id": "norms", "action": "norm-log", "params": "*"}


def trained(then: str, on_event: Any) -> tuple[list[Tensor], gradsurgeon.Session]:
    """Train with a NaN in the second and in the fourth step; return the weights and the session."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": then}
    with attach(model, NORMS, trap, on_event=on_event) as session:
        for number in range(5):
            factor = torch.nan if number in (1, 3) else 1.0
            with suppress(NonFiniteGradientError):
                take_step(optimizer, model(torch.ones(4, 3)).square().mean() * factor)
    return weights_of(model), session


def test_it_sees_what_the_session_notes_on_its_thread_and_nothing_else() -> None:
    seen: list[tuple[Event, int]] = []

    def note(event: Event) -> None:
        seen.append((event, threading.get_ident()))

    _, session = trained("skip-step", note)
    assert kinds_of(session) == ["trap", "skipped-step", "notice", "trap", "skipped-step"]
    assert seen == [(event, threading.get_ident()) for event in session.events]


@pytest.mark.parametrize("then", ["skip-step", "warn", "raise"])
@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
def test_what_it_raises_is_logged_and_changes_nothing(
    then: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError(event.kind)

    plain, _ = trained(then, None)
    caplog.clear()
    weights, session = trained(then, fail)
    assert equal(weights, plain) or then == "warn"
    logged = [one for one in caplog.records if one.levelno == logging.ERROR]
    errors = [one.exc_info[1] for one in logged if one.exc_info is not None]
    assert [str(error) for error in errors] == kinds_of(session)


def test_what_is_no_function_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="on_event= must be a function of one event, not list"):
        attach(model, NORMS, on_event=[])
    assert not model.weight._backward_hooks
