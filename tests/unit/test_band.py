"""The band of a run, what was found and the facts, for each way in which a run can go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsurgeon import Event
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.band import EXPLODING, NONFINITE, PASSED, REPLICAS, Callout, outcome_of
from gradsurgeon.report.ending import ending_of, tally_of

ENDED = {0: RankEnd("finished", {}, None)}
STOPPED = {0: RankEnd("finished", {"error": "KeyError"}, None)}
KILLED = {0: RankEnd("stopped", {}, None)}
RUNNING = {0: RankEnd("running", {}, None)}

CHECK = Event("check", "updates", 19, 0, "a", "step 19, rule updates: a never moved")
OTHER_CHECK = Event("check", "updates", 29, 0, "b", "step 29, rule updates: b never moved")
TRAP = Event("trap", "nans", 3, 0, "a", "step 3, rule nans: bad\nskipped")
DIAGNOSED = replace(
    TRAP,
    diagnosis={"where": "forward", "headline": "NaN born in a", "file": "train.py", "line": 9},
)
SKIPPED = Event("skipped-step", "nans", 3, 0, "", "step 3: skipped")
SCALER = Event("scaler-skip", "", 0, 0, "", "step 0: the scaler skipped")
NEVER = Event("never-fired", "late", 9, 0, "", "never fired")
LOST = Event("hook-lost", "", 3, 0, "a", "step 3: a lost its hooks")
CUT = Event("spike", "cut", 3, 0, "a", "step 3: a spike was clipped")

NAN = Callout(NONFINITE, "non-finite: 1 parameter, first at step 3: a")
NAN_ONCE = Callout(PASSED, "non-finite: 1 parameter, first at step 0: a; finite again since")
GROWN = Callout(EXPLODING, "exploding: a")
APART = Callout(REPLICAS, "ranks differ")
SPIKE = Callout("largest spike", "largest spike: a")
SILENT = Callout("silent", "never got a gradient: a")

# Ends, events, callouts; the band, what was found, and the lines below.
CASES: dict[str, tuple[object, ...]] = {
    "clean": (ENDED, [], [], "fine: ended, clean", "nothing", []),
    "running": (RUNNING, [], [], "fine: running", "nothing", []),
    "a fact": (ENDED, [], [SPIKE], "fine: ended", "no fault", ["facts:", f"  {SPIKE.text}"]),
    "no gradient yet": (
        ENDED, [], [SILENT], "fine: ended", "no fault", ["facts:", f"  {SILENT.text}"],
    ),
    "a cut": (ENDED, [CUT, replace(CUT, name="b")], [],
        "look: ended, spikes cut in 1 step", "no fault", []),
    "lost hooks": (ENDED, [LOST], [], "look: ended, hooks lost 1 time", "no fault", []),
    "a scaler": (ENDED, [SCALER], [NAN_ONCE], "fine: ended, 1 step skipped", "no fault",
        ["facts:", f"  {NAN_ONCE.text}"]),
    "a scaler that skips for ever": (
        ENDED, [SCALER], [NAN], f"look: {NAN.text}", "1 fault", [NAN.text],
    ),
    "a check": (ENDED, [CHECK], [], f"look: {CHECK.message}", "1 fault", []),
    "checks": (
        ENDED, [CHECK, OTHER_CHECK], [SPIKE], f"look: {CHECK.message} (and 1 other fault)",
        "2 faults", ["facts:", f"  {SPIKE.text}"],
    ),
    "two ranks with one finding": (
        {0: ENDED[0], 1: ENDED[0]}, [CHECK, replace(CHECK, rank=1)], [],
        f"look: {CHECK.message}", "1 fault", [],
    ),
    "a trap": (ENDED, [TRAP, replace(TRAP, step=4, message="step 4: bad")], [NAN],
        "broken: step 3, rule nans: bad", "1 fault", ["facts:", f"  {NAN.text}"]),
    "a trap, and finite again": (ENDED, [TRAP], [NAN_ONCE],
        "look: step 3, rule nans: bad", "1 fault", ["facts:", f"  {NAN_ONCE.text}"]),
    "a diagnosis": (ENDED, [DIAGNOSED, SKIPPED], [],
        "look: step 3: NaN born in a, train.py:9", "1 fault", []),
    "no trap": (ENDED, [], [NAN], f"look: {NAN.text}", "1 fault", [NAN.text]),
    "no trap, once": (ENDED, [], [NAN_ONCE], f"look: {NAN_ONCE.text}", "1 fault", [NAN_ONCE.text]),
    "grown": (ENDED, [], [GROWN, APART], f"look: {GROWN.text} (and 1 other fault)", "2 faults",
        [GROWN.text, APART.text]),
    "an idle rule": (ENDED, [NEVER], [], "look: ended, 1 rule never fired", "no fault", []),
    "an error": (STOPPED, [], [SPIKE], "broken: stopped by KeyError", "no fault",
        ["facts:", f"  {SPIKE.text}"]),
    "killed": (KILLED, [], [],
        "broken: no end was written: what came after it is missing", "no fault", []),
    "one of two ranks": ({0: RUNNING[0], 1: STOPPED[0]}, [], [],
        "broken: rank 0: running; rank 1: stopped by KeyError", "no fault", []),
    "many facts": (ENDED, [], [*(
        Callout("a", "a"), Callout("b", "b"), Callout("c", "c"), Callout("d", "d"), Callout("e", "e"),
    )], "fine: ended", "no fault", ["facts:", "  a", "  b", "  c", "  and 2 more"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_run_has_one_band(name: str) -> None:
    ends, events, callouts, band, found, lines = CASES[name]
    tally = tally_of(events, {"cut"})  # type: ignore[arg-type]
    outcome = outcome_of(ending_of(ends, tally), tally, callouts)  # type: ignore[arg-type]
    assert str(outcome.band) == band
    assert outcome.top[0] == band
    assert outcome.found == found
    assert outcome.callout_lines == lines
    says_all_is_well = band.endswith("clean") or found == "nothing"
    assert not (says_all_is_well and (callouts or not band.startswith("fine: ")))


def test_a_rule_of_a_pack_may_have_nothing_to_do() -> None:
    tally = tally_of([NEVER])
    outcome = outcome_of(ending_of(ENDED, tally), tally, [], is_pack=True)
    assert str(outcome.band) == "fine: ended, 1 rule never fired"


def test_a_session_without_a_fault_has_no_band() -> None:
    assert outcome_of(None, tally_of([]), [SPIKE]).top == []
    assert outcome_of(None, tally_of([CHECK]), []).top == [f"look: {CHECK.message}"]


def test_trips_and_findings_are_counted_apart() -> None:
    tally = tally_of([CHECK, OTHER_CHECK, TRAP, CUT], {"cut"})
    assert (tally.trips, tally.kinds["check"]) == (1, 2)


def test_a_diagnosis_comes_first_and_hides_no_other_finding() -> None:
    tally = tally_of([CHECK, TRAP, replace(DIAGNOSED, rank=1)])
    assert tally.findings == ("step 3: NaN born in a, train.py:9", CHECK.message)
