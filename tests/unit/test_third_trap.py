"""A trap of a kind that nobody has thought of is found wherever traps are: nothing asks for a trap by its name."""

from __future__ import annotations

import dataclasses
import pdb  # noqa: T100 # it is replaced
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import actions_of_users
import pytest
import torch
from commands import call_here
from kept_sink import Kept
from small import events_of, rule_file, sgd
from torch import nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning, TrapError
from gradsurgeon.cli.watch import newest_report, screen
from gradsurgeon.integrations.launcher import debugger
from gradsurgeon.integrations.launcher.models import Models
from gradsurgeon.integrations.launcher.settings import Settings


@pytest.fixture(autouse=True)
def own() -> Iterator[Any]:
    with actions_of_users.third_trap() as module:
        yield module


def train(then: str, **options: Any) -> gradsurgeon.Session:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    rule = {"id": "long", "action": "length-trap", "params": "weight", "limit": 50.0, "then": then}
    norms = {"id": "norms", "action": "norm-log", "params": "*"}
    rules = rule_file(rule, norms)
    optimizer = sgd(model, 0.01)
    with gradsurgeon.apply(model, rules, optimizer=optimizer, **options) as session:
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (100.0 if step == 2 else 1.0)).sum().backward()
            optimizer.step()
    return session


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with pytest.warns(GradSurgeonWarning):
        train("warn", record=tmp_path / "run")
    return tmp_path / "run"


def test_its_error_is_a_trap_error_that_the_debugger_opens_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TrapError) as caught:
        train("raise")
    error = caught.value
    assert type(error).__name__ == "LongError"
    assert (error.rule, error.step, error.name) == ("long", 2, "weight")
    opened: list[object] = []
    monkeypatch.setattr(pdb, "post_mortem", opened.append)
    models = Models(
        Settings(""), gradsurgeon.load([gradsurgeon.NanTrap(id="t", params=("*",), then="warn")])
    )
    debugger._on_end(models, lambda *_: None, type(error), error, error.__traceback__)
    assert opened == [error.__traceback__]
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    assert last.f_code.co_filename == __file__


def test_its_events_reach_sinks_session_and_report() -> None:
    sink = Kept()
    with pytest.warns(GradSurgeonWarning):
        session = train("warn", sinks=[sink])
    (event,) = events_of(session, "check")
    assert (event.rule, event.step, event.name) == ("long", 2, "weight")
    assert "the last trap tripped at step 2: rule long on weight" in repr(session)
    assert "gradsurgeon/events/check/message" in [name for _, name, _ in sink.texts]
    assert "checked 5 updates, tripped 1 time" in str(gradsurgeon.report.summary(session))


def test_it_is_in_the_page_on_the_screen_and_in_plots(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert call_here("report", str(run), "--html", str(page), cwd=tmp_path).returncode == 0
    assert "tripped 1 time" in page.read_text(encoding="utf-8")
    lines = screen(newest_report(run), 120)
    assert any("step 2  check  long" in text for text in lines)
    assert any("tripped 1 time" in text for text in lines)
    with gradsurgeon.open_run(run) as opened:
        (legend,) = opened.plot().legends
    assert "trap, check or skipped step" in [text.get_text() for text in legend.get_texts()]


def test_fail_on_knows_its_kind(run: Path) -> None:
    assert call_here("report", str(run), "--fail-on", "check", cwd=run).returncode == 1
    assert call_here("report", str(run), "--fail-on", "trap", cwd=run).returncode == 0


def test_a_statistic_of_several_numbers_is_refused(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = own.LengthTrap.compile

    def of_histogram(rule: Any) -> Any:
        return dataclasses.replace(compiled(rule), statistic="histogram")

    monkeypatch.setattr(own.LengthTrap, "compile", of_histogram)
    remedy = "rule long: histogram is several numbers, and a trap judges one: use another statistic, such as `l2`"
    with pytest.raises(gradsurgeon.BindError, match=remedy):
        train("warn")
