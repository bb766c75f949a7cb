"""What a session tells, how often, and by which way; and that nothing is lost on it."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
import warnings
from collections import Counter
from typing import Any, cast

import pytest
import torch
from small import attach, events_of, fields_of, kinds_of, rule_file, sgd, take_step
from torch import nn

import gradsurgeon
from gradsurgeon import Event, GradSurgeonWarning, NonFiniteGradientError, load
from gradsurgeon.integrations.launcher import messages
from gradsurgeon.records.event_log import EventLog, Tally

NAN = float("nan")


def make() -> EventLog:
    rules = load(
        'version: 1\nrules:\n  - {id: guard, action: nan-trap, params: "*"}\n'
        '  - {id: other, action: nan-trap, params: "*"}\n'
    ).rules
    return EventLog(rules, [1, 1])


def train(then: str, steps: int, **options: object) -> gradsurgeon.Session:
    """Let a trap trip in every step."""
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    rule = {"id": "guard", "action": "nan-trap", "params": "*", "then": then, **options}
    with attach(model, rule) as session:
        for _ in range(steps):
            take_step(optimizer, (model(torch.ones(1, 2)) * NAN).sum())
    return session


def line_of_the_loss() -> str:
    """Return the message of the event that has the line of the loss in `train`."""
    code, first = inspect.getsourcelines(train)
    number = first + next(place for place, text in enumerate(code) if "take_step" in text)
    text = "take_step(optimizer, (model(torch.ones(1, 2)) * NAN).sum())"
    return f"step 0, rule guard: the line of MulBackward0: {__file__}:{number}, in train: {text}"


@pytest.fixture
def few_events(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("gradsurgeon.records.event_log._MOST_EVENTS", 100)
    return 100


def test_a_skipped_step_is_logged_in_full_once_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "gradsurgeon"):
        session = train("skip-step", 100, give_up_after=1000)
    assert Counter(event.kind for event in session.events) == {
        "trap": 100,
        "skipped-step": 100,
        "notice": 1,
    }
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    first, line, *later = (record.getMessage() for record in caplog.records)
    assert line == line_of_the_loss()
    assert first.startswith("step 0, rule guard: 2 of 2 gradients are not finite after backward\n")
    assert "\nstep skipped: its optimizer got no gradient\n" in first
    assert "> NaN" in first
    both = "gradients are not finite after backward; step skipped: its optimizer got no gradient"
    assert later == [
        f"step {step}, rule guard: 2 of 2 {both} ({step + 1} times so far)" for step in (9, 99)
    ]


def test_python_shows_it_where_nobody_has_configured_logging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("gradsurgeon")
    monkeypatch.setattr(logger, "propagate", False)  # pytest has configured it
    train("skip-step", 9)
    said = capsys.readouterr().err
    assert said.count("guard") == 2
    assert said.endswith(f"{line_of_the_loss()}\n")
    assert said.startswith("step 0, rule guard: 2 of 2 gradients are not finite")


def test_each_rule_is_counted_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    journal = make()
    for rule in ("guard", "other"):
        journal.emit("trap", "bad", rule=rule, step=3)
        # It tells of the same step what the trap has told.
        journal.emit("skipped-step", "step 3 skipped", rule=rule, step=3)
    # That another rank trapped is news.
    journal.emit("skipped-step", "step 4: rank 1 trapped", rule="", step=4)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["rule guard: bad", "rule other: bad", "step 4: rank 1 trapped"]


def test_each_finding_of_a_check_is_told(caplog: pytest.LogCaptureFixture) -> None:
    journal = make()
    for step, text in ((3, "clipped"), (3, "stale"), (13, "evaluation mode")):
        journal.emit("check", text, rule="guard", step=step)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    texts = ["clipped", "stale", "evaluation mode"]
    assert said == [("WARNING", f"rule guard: {text}") for text in texts]


def test_a_trap_that_warns_does_so_and_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session = train("warn", 10, give_up_after=1000)
    first, line, last = (str(one.message) for one in told)
    assert line == line_of_the_loss()
    assert all(one.category is GradSurgeonWarning for one in told)
    assert first.startswith("step 0, rule guard: 2 of 2 gradients")
    assert (first.count("guard"), "> NaN" in first) == (1, True)
    assert last.count("\n") == 0
    assert last.startswith("step 9, rule guard: ")
    assert last.endswith("expect non-finite weights (10 times so far)")
    assert session.status()["guard"].warnings == (first, line, last)
    assert not caplog.records


class Gone(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError("the server of logs is gone")


@pytest.mark.parametrize("by", ["handlers", "filters"])
def test_what_a_handler_raises_spoils_no_decision(
    by: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = Gone()
    caplog.set_level(logging.INFO, "gradsurgeon")
    logger = logging.getLogger("gradsurgeon")
    monkeypatch.setattr(logger, by, [gone if by == "handlers" else gone.emit])
    session = train("skip-step", 3)
    pair = ["trap", "skipped-step"]
    assert kinds_of(session) == [*pair, "notice", *pair, *pair]
    assert "ConnectionError: the server of logs is gone" in capsys.readouterr().err


def test_a_trap_that_raises_is_told_by_its_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NonFiniteGradientError):
        train("raise", 1)
    assert not caplog.records


def test_notices_and_scaler_skips_are_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    journal = make()
    with caplog.at_level(logging.INFO, "gradsurgeon"):
        journal.emit("notice", "by the way\x1b[2J", rule="guard")
        for step in range(20):
            journal.emit("scaler-skip", f"skipped step {step}", step=step)
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert [record.getMessage() for record in caplog.records] == [
        "rule guard: by the way\\x1b[2J",
        "skipped step 0",
        "skipped step 9 (10 times so far)",
    ]


def test_routine_events_make_room_for_traps(few_events: int) -> None:
    journal = make()
    written: list[Event] = []
    journal.listen(written.append)
    journal.emit("notice", "the first", rule="guard")
    for step in range(3 * few_events):
        journal.emit("trap", f"trap {step}", rule="guard", step=step, name="w", quiet=True)
        journal.emit("scaler-skip", f"skip {step}", step=step)
        # So many of either, besides the first of each kind.
        assert len(journal.events) <= 2 * few_events + 4
        # Whatever comes last is there.
        assert {f"trap {step}", f"skip {step}"} & {e.message for e in journal.events[-4:]}
        assert f"trap {step}" in {event.message for event in journal.events}
    kept = fields_of(journal, "message")
    assert {"the first", "trap 0", "skip 0"} <= set(kept)
    assert sum(message.startswith("trap") for message in kept) == few_events + 1
    notices = events_of(journal, "notice")
    assert len(notices) == 2
    assert notices[1].message.startswith("more than 100 events repeat others: the oldest")
    # A run keeps every trap, and so many of the rest.
    kinds = Counter(event.kind for event in written)
    assert (kinds["trap"], kinds["scaler-skip"]) == (3 * few_events, few_events + 1)
    assert kinds["notice"] == 2


@pytest.mark.usefixtures("few_events")
def test_the_error_of_a_trap_is_its_own_however_many_events_there_were() -> None:
    model = nn.Linear(2, 1, bias=False)
    rule = {"id": "t", "action": "nan-trap", "params": "*", "then": "skip-step"}
    rules = rule_file({**rule, "give_up_after": 1000})
    session = gradsurgeon.apply(model, rules)
    for step in range(150):
        model.weight.grad = None
        with pytest.raises(NonFiniteGradientError) as caught:
            (model(torch.ones(1, 2)) * NAN).sum().backward()
        error = caught.value
        assert (error.step, error.rule, error.name, error.rank) == (step, "t", "weight", 0)
        assert str(error).startswith(f"step {step}, rule t: 1 of 1 gradients are not finite")
    session.remove()


class Slow(set[tuple[str, str]]):
    """Lets other threads in between the question and the answer to it."""

    def __contains__(self, topic: object) -> bool:
        found = super().__contains__(topic)
        time.sleep(0.001)
        return found


class SlowTally(Tally):
    """Lets other threads in between reading a number and writing it."""

    @property
    def fired(self) -> int:
        found = self._fired
        time.sleep(0.0001)
        return found

    @fired.setter
    def fired(self, number: int) -> None:
        self._fired = number


@pytest.mark.parametrize("turn", ["once", "fired", "repeated"])
def test_several_threads_lose_and_double_nothing(
    turn: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = make()
    told: list[Event] = []
    journal.listen(told.append)
    journal._noticed = Slow()
    journal._tallies["guard"] = SlowTally(1)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for number in range(50):
            if turn == "once":
                journal.notice_once(f"topic {number}", f"notice {number}")
            elif turn == "fired":
                journal.count_fired("guard", number)
                journal.count_changed("guard", 1)
                journal.count_changed("guard", torch.ones((), dtype=torch.int64))
            else:
                journal.emit("trap", "bad", rule="other", step=threading.get_ident() + number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = journal.status()["guard"]
    if turn == "once":
        for events in (told, journal.events):
            assert sorted(e.message for e in events) == sorted(f"notice {i}" for i in range(50))
    elif turn == "fired":
        assert (status.fired, status.changed) == (200, 2.0)
    else:
        assert len(told) == len(journal.events) == 200
        said = [record.getMessage() for record in caplog.records]
        ends = ("rule other: bad", "(10 times so far)", "(100 times so far)")
        assert [any(one.endswith(end) for one in said) for end in ends] == [True] * 3
        assert len(said) == 3


def test_the_last_step_of_a_rule_is_the_latest_of_all_optimizers() -> None:
    """Each optimizer counts its own steps: the slower one must not make a rule look as if it had ended."""
    log = make()
    for step in (0, 0, 1, 2, 1):
        log.count_fired("guard", step)
    assert log.status()["guard"].last_step == 2
    assert log.status()["other"].last_step is None


class _Tee:
    """As scripts put it in the place of stderr: no ``closed``, no ``fileno``."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        self.texts.append(text)

    def flush(self) -> None:
        pass


class _Broken(_Tee):
    def write(self, text: str) -> None:
        raise RuntimeError("this stream takes nothing")

    @property
    def closed(self) -> bool:
        raise RuntimeError("nor does it answer")


@pytest.mark.parametrize("stderr", [_Broken(), object(), None], ids=["raises", "object", "none"])
def test_a_broken_stderr_stops_no_message(
    stderr: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beginning, tee = _Tee(), _Tee()
    monkeypatch.setattr(sys, "stderr", tee)
    messages.say("to a stream that knows neither `closed` nor `fileno`")
    assert len(tee.texts) > 0
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "__stderr__", beginning)
    messages.say("told all the same")
    assert "".join(beginning.texts) == "gradsurgeon: told all the same\n"
    # As Python shows them where nothing records them.
    monkeypatch.setattr(warnings, "_showwarnmsg_impl", _write_to_stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        make().warn("told by a warning", rule="guard")
        warnings.simplefilter("error")
        with pytest.raises(GradSurgeonWarning, match="an error of the script's choice"):
            make().warn("an error of the script's choice")
    assert capsys.readouterr().out == ""


def _write_to_stderr(warning: warnings.WarningMessage) -> None:
    cast("Any", sys.stderr).write(str(warning.message))
