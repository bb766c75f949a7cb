"""The two tasks that the guide shows: what is shown is what was measured, and the script runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

import gradsurgeon
from benchmarks import two_tasks, two_tasks_page

REMEDY = "run `python -m benchmarks.two_tasks --render`"
FOUND: dict[str, Any] = json.loads(two_tasks_page.RESULTS.read_text(encoding="utf-8"))
ROWS: dict[str, Any] = {row["name"]: row for row in FOUND["rows"]}
GUIDE = two_tasks_page.GUIDE.read_text(encoding="utf-8")
SURGERY = "`method: imtl-g`"


def mean(name: str, what: str) -> float:
    return float(ROWS[name][what]["mean"])


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = two_tasks.script()
    monkeypatch.setattr(found, "STEPS", 12)
    monkeypatch.setattr(two_tasks, "EVERY", 6)
    return found


def test_the_table_of_the_guide_is_that_of_the_committed_results() -> None:
    assert two_tasks_page.with_table(GUIDE, FOUND) == GUIDE, REMEDY
    with pytest.raises(ValueError, match="has no place for the table"):
        two_tasks_page.with_table("a page", FOUND)


def test_the_picture_is_drawn_from_the_committed_results() -> None:
    fingerprint = two_tasks_page.fingerprint(FOUND).encode()
    assert fingerprint in two_tasks_page.PICTURE.read_bytes(), REMEDY


def test_the_results_have_every_variant_with_every_seed() -> None:
    assert list(ROWS) == [variant.name for variant in two_tasks.VARIANTS]
    assert set(two_tasks_page.SHOWN) <= set(ROWS)
    for row in FOUND["rows"]:
        assert len(row["digits"]["all"]) == len(row["ink"]["all"]) == len(two_tasks.SEEDS) >= 5
        assert len(row["digits"]["by_step"]) == FOUND["steps"] // FOUND["every"]


def test_what_the_guide_says_of_the_results_holds() -> None:
    plain = ROWS[two_tasks.SUM]
    assert 1 / 7 < plain["digits"]["mean"] / 100 < 1 / 5.5  # one digit in six
    assert 0.45 < plain["conflict"]["opposed"] < 0.55
    assert abs(plain["conflict"]["cosine"]) < 0.02
    assert f"{plain['conflict']['times_smaller']:.0f} times smaller" in GUIDE
    assert max(plain["digits"]["all"]) < min(ROWS[SURGERY]["digits"]["all"]) - 50
    for name in ("`method: upgrad`", "`method: pcgrad`"):
        assert mean(name, "digits") < 40
    assert mean("weight of the ink 0.0001", "digits") > mean(SURGERY, "digits")
    assert mean("weight of the ink 0.0001", "ink") < mean(SURGERY, "ink") - 3
    assert mean("weight of the ink 0.001", "digits") == pytest.approx(
        mean(SURGERY, "digits"), abs=0.5
    )
    weights = [row for row in FOUND["rows"] if row["name"].startswith("weight")]
    for row in weights:  # none has both at once
        both = [row[what]["mean"] - mean(SURGERY, what) for what in ("digits", "ink")]
        assert min(both) < 0
    best = "ink standardised, the plain sum"
    for what in ("digits", "ink"):
        others = [mean(name, what) for name in ROWS if "alone" not in name and name != best]
        assert mean(best, what) > max(others)


def test_the_rules_of_the_guide_are_those_of_the_script() -> None:
    shown = [
        gradsurgeon.load(text).rules
        for text in re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    ]
    assert [rule for rules in shown for rule in rules] == list(
        gradsurgeon.load(two_tasks.script().RULES).rules
    )


def test_looking_changes_nothing_and_surgery_does(story: Any) -> None:
    plain = two_tasks.trained(story, two_tasks.Variant("without"), (0, 1))
    # `SUM` is trained with the rules of the story, in observe mode.
    looked = two_tasks.trained(story, two_tasks.Variant(two_tasks.SUM), (0, 1))
    assert looked["conflict"]["times_smaller"] > 1
    figures = [story.train(**given)[0] for given in ({"mode": "observe"}, {"mode": "act"})]
    assert figures[0] != figures[1]
    for what in ("digits", "ink"):
        assert looked[what] == plain[what]


def test_with_a_weight_of_0_the_other_loss_is_trained_alone(story: Any) -> None:
    def digits(weight: float) -> list[float]:
        # What the ink is measured in is seen in the trunk only where it is trained.
        runs = [
            story.train(two_tasks.rules(""), weights=(1.0, weight), standardised=standardised)[0]
            for standardised in (False, True)
        ]
        return [right for ((right, _),) in runs]

    alone, both = digits(0.0), digits(1.0)
    assert alone[0] == alone[1]
    assert both[0] != both[1]


@pytest.mark.slow
def test_the_script_says_what_the_guide_says() -> None:
    command = [sys.executable, str(two_tasks.SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall(r'mode="(\w+)": ([\d.]+)% of the digits, ([\d.]+)% of the ink', done.stdout)
    (observed, *looked), (acted, *surgery) = found
    assert (observed, acted) == ("observe", "act")
    assert float(looked[0]) < 50
    assert float(surgery[0]) > 85
    assert min(float(looked[1]), float(surgery[1])) > 90
    (smaller, _) = re.findall(r"digit (\d+) times smaller", done.stdout)
    assert int(smaller) > 10
