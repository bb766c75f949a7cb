"""The run with bad batches that the guide shows: what is shown is what was measured, and the script runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import spikes, spikes_page

REMEDY = "run `python -m benchmarks.spikes --render`"
FOUND: dict[str, Any] = json.loads(spikes_page.RESULTS.read_text(encoding="utf-8"))


def row(rule: str) -> dict[str, Any]:
    (found,) = (one for one in FOUND["rows"] if one["rule"] == rule)
    return dict(found)


def test_the_table_of_the_guide_is_that_of_the_committed_results() -> None:
    guide = spikes_page.GUIDE.read_text(encoding="utf-8")
    assert spikes_page.with_table(guide, FOUND) == guide, REMEDY
    with pytest.raises(ValueError, match="has no place for the table"):
        spikes_page.with_table("a page", FOUND)


def test_the_picture_is_drawn_from_the_committed_results() -> None:
    assert spikes_page.fingerprint(FOUND).encode() in spikes_page.PICTURE.read_bytes(), REMEDY


def test_what_the_guide_says_of_them_holds() -> None:
    unbounded = [one for one in FOUND["rows"] if not one["rule"]]
    assert 14 < FOUND["drift"] < 16
    assert row(spikes.SIGMAS)["bad_caught"] == 9
    assert row(spikes.SIGMAS)["worst_rise"] < 1.1 * unbounded[0]["worst_rise"]
    assert 0.85 < row(spikes.TIMES_OF_MEAN)["healthy_steps_touched"] < 0.95
    assert unbounded[1]["worst_rise"] > 10
    assert unbounded[1]["bad_times"][0] > 15 > unbounded[1]["bad_times"][-1]


def test_so_many_characters_are_broken() -> None:
    texts = spikes.Texts()
    for size in (4, 50, 96, 800):
        healthy, bad = texts.healthy(300), texts.bad(300, size)
        letter = texts.rarest[1]
        guessed = (bad == letter)[:, -spikes.GUESSED :].sum() - (healthy == letter)[
            size // 50 + 1 :, -spikes.GUESSED :
        ].sum()
        assert size <= guessed <= size + 2  # one of them may have stood there
        assert (healthy != bad).any(1).sum() == -(-size // 50)


@pytest.mark.parametrize("rule", ["", spikes.SIGMAS, spikes.TIMES_OF_MEAN])
def test_a_run_is_seen_before_and_after_the_rule(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"STEPS": 12, "_BAD": range(10, 12, 10), "EVERY": 10, "WIDTH": 8}.items():
        monkeypatch.setattr(spikes, name, value)
    found = spikes.train(rule, None)
    assert list(found.sizes) == [10]
    again = spikes.train(rule, found.sizes)
    assert again.losses[:10] == found.losses[:10]
    assert again.losses[10] != found.losses[10]
    assert again.before.shape == again.after.shape == (12, len(list(spikes.Writer(5).parameters())))
    assert (again.after <= again.before).all()
