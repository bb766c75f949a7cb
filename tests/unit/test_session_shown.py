"""What a session looks like in a terminal and in a notebook."""

from __future__ import annotations

import torch
from html_views import Page
from small import rule_file, sgd, take_step
from torch import nn

import gradsurgeon

RULES = rule_file(
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "later", "action": "scale", "params": "bias", "factor": 0.5, "steps": {"from": 9}},
    {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"},
)


def train(model: nn.Module, *values: float) -> None:
    optimizer = sgd(model)
    for value in values:
        take_step(optimizer, model(torch.full((1, 2), value)).sum())


def test_a_session_says_of_what_it_is_and_what_has_happened() -> None:
    model = nn.Linear(2, 1)
    with gradsurgeon.apply(model, RULES) as session:
        head = "Session of <dict> on Linear (2 parameters)"
        assert repr(session).splitlines() == [
            head,
            "  step 0; no trap has tripped",
            "  0 of 3 rules have fired",
        ]
        train(model, 1.0, float("nan"), 1.0)
        assert repr(session).splitlines() == [
            head,
            "  step 3; the last trap tripped at step 1: rule trap on weight",
            "  2 of 3 rules have fired",
        ]
        session.pause()
        assert "  step 3, paused; the last trap" in repr(session)
    assert "  step 3, removed; the last trap" in repr(session)


def test_a_session_that_observes_says_so() -> None:
    model = nn.Linear(2, 1)
    with gradsurgeon.apply(model, RULES, mode="observe") as session:
        assert "  step 0, observing only; no trap has tripped" in repr(session)


def test_a_notebook_shows_the_same_and_how_to_see_more() -> None:
    with gradsurgeon.apply(nn.Linear(2, 1), RULES) as session:
        shown = Page(session).text
        assert all(line.strip() in shown for line in repr(session).splitlines())
        assert "print(session.plan)" in shown


class Marked(nn.Linear):
    """A model whose name means something to a browser."""


Marked.__name__ = "<script>Marked\u202e"


def test_names_are_escaped() -> None:
    model = Marked(2, 1)
    with gradsurgeon.apply(model, RULES) as session:
        assert "\u202e" not in repr(session)
        for shown in (session, session.plan, gradsurgeon.report.summary(session)):
            page = Page(shown)  # refuses every tag that is not ours
            assert "<script>" not in page.html
            assert r"<script>Marked\u202e" in page.text


def test_showing_a_session_asks_nothing_of_the_device() -> None:
    model = nn.Linear(2, 1)
    with gradsurgeon.apply(model, RULES) as session:
        train(model, 1.0)
        before = len(session._attachment.context.recorder.records)
        assert repr(session)
        assert session._repr_html_()
        assert len(session._attachment.context.recorder.records) == before == 0
