"""The band of a run, what was found and the facts, for each way in which a run can go: the rows of ``cases/bands.yaml``."""

from __future__ import annotations

from typing import Any

import pytest
import report_cases
from ranks import Json

from gradsurgeon import Event
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.band import Callout, outcome_of
from gradsurgeon.report.ending import ending_of, tally_of

CASES: Any = report_cases.read(report_cases.FOLDER.parent / "bands.yaml")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["is"])
def test_a_run_has_one_band(case: Json) -> None:
    plain = {"rule": "", "name": "", "message": ""}
    events = [Event(**{**plain, **event}) for event in case.get("events", [])]
    callouts = [Callout(*one) for one in case.get("callouts", [])]
    tally, ending = tally_of(events, {"cut"}), None
    if case["ends"] is not None:
        ends = {rank: RankEnd(end[0], end[1], None) for rank, end in case["ends"].items()}
        ending = ending_of(ends, tally)
    outcome = outcome_of(ending, tally, callouts, is_pack=case.get("pack", False))
    if case["band"] is None:
        assert outcome.top == []
    else:
        assert str(outcome.band) == outcome.top[0] == case["band"]
    assert outcome.found == case["found"]
    assert outcome.callout_lines == case["lines"]
    assert tally.trips == len({event.step for event in events if event.kind == "trap"})
