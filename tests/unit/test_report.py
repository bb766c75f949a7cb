"""What is told of a run: every file under ``cases/reports``, and what no file can show."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
import report_cases
from runs import add, shown, values, write
from small import sgd

from gradsurgeon.cli.watch import newest_report, screen
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report import Report, RuleInfo, from_run
from gradsurgeon.report.json_form import to_dict
from gradsurgeon.report.sheets import NO_NORM
from gradsurgeon.report.spikes import LEAST_PAST
from gradsurgeon.report.tables import NONFINITE, sparkline
from gradsurgeon.report.web_page import page_data

NORMS = report_cases.read(report_cases.FOLDER.parent / "norms.yaml")


@pytest.mark.parametrize("file", report_cases.FILES, ids=lambda file: file.stem)
def test_each_view_says_what_the_case_says(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = report_cases.read(file)
    if "most_values" in case:
        monkeypatch.setattr("gradsurgeon.report.history.MOST_VALUES", case["most_values"])
    writers = report_cases.record(tmp_path, case)
    with open_run(tmp_path) as run:
        report = from_run(run)
        page = page_data(run)
    width = case.get("width", 100)
    assert report.text(width=width) == case["text"].rstrip("\n")
    if "screen" in case:
        lines = screen(newest_report(tmp_path), width)
        assert lines == case["screen"].rstrip("\n").split("\n")
    json, of_page = case.get("json", {}), case.get("page", {})
    assert report_cases.parts(to_dict(report), json) == json
    assert report_cases.parts(page, of_page) == of_page
    for writer in writers:
        writer.close()


@pytest.mark.parametrize(("norms", "drawn"), NORMS["sparklines"])
def test_a_sparkline_has_a_level_per_decade_and_marks_for_what_is_no_norm(
    norms: str, drawn: str
) -> None:
    history = report_cases.history(norms)
    assert sparkline([NO_NORM if value is None else value for value in history], 32) == drawn


@pytest.mark.parametrize(("norms", "step"), NORMS["spikes"])
def test_a_norm_that_stands_out_from_its_own_past_is_a_spike(
    norms: str, step: int | None, tmp_path: Path
) -> None:
    report_cases.record(tmp_path, {"series": [{"of": {"w": norms}}]})
    with open_run(tmp_path) as run:
        told = re.findall(r"largest spike: (.*) at step (\d+), ", str(from_run(run)))
    assert told == ([] if step is None else [("w, 50", str(step))])


@pytest.mark.parametrize("limit", [2**20, 16 * 164])
def test_that_no_gradient_came_is_said_if_no_row_was_dropped(limit: int) -> None:
    measured = Records(limit_bytes=limit)
    for step in range(40):
        key = Key("norms", "l2", "step", ("w", "early"))
        add(measured, key, step, values(1.0, 0.0), frozenset({1}))
    rules = {"norms": RuleInfo("norm-log", "observe", ("w", "early"))}
    report = Report(
        "t", ("w", "early"), rules, {"norms": RuleStatus(1, 5, 0, 4)}, **shown(measured)
    )
    assert (" rows dropped, the oldest" in report.head[-1]) is (limit < 2**20)
    assert ("never got a gradient: early" in report.remarks) is (limit == 2**20)


@pytest.mark.parametrize("start", [0, 100])
def test_the_summary_of_a_session_holds_its_numbers(start: int) -> None:
    import torch
    from torch import nn

    import gradsurgeon
    from gradsurgeon.report import summary

    last = nn.Linear(1, 1, bias=False)
    nn.init.ones_(last.weight.requires_grad_(False))
    model = nn.Sequential(nn.Linear(2, 1, bias=False), last)
    optimizer = sgd(model)
    steps = {"to": start + 2}
    rules = [
        {"id": "norms", "action": "norm-log", "params": "*", "steps": steps},
        {"id": "double", "action": "scale", "params": "0.*", "factor": 2.0, "steps": steps},
    ]
    with gradsurgeon.apply(
        model, {"version": 1, "rules": rules}, optimizer=optimizer, start_step=start
    ) as session:
        assert " on Sequential: no step seen, 0 events" in str(summary(session))
        # Nothing is recorded in the third step.
        for size in (1.0, 2.0, 3.0):
            optimizer.zero_grad()
            model(torch.tensor([[3.0 * size, 4.0 * size]])).sum().backward()
            optimizer.step()
    found = summary(session)
    text = found.text(width=100).splitlines()
    assert found.params == ("0.weight", "1.weight")
    logged = ("0.weight", "1.weight")
    assert found.rules["norms"] == RuleInfo("norm-log", "observe", logged, has_all_steps=False)
    assert found.rules["double"] == RuleInfo("scale", "edit", (), has_all_steps=False)
    assert f"on Sequential: steps {start}..{start + 2}, 0 events" in text[0]
    assert text[0].endswith("; requires_grad off: 1 parameter, largest 1.weight")
    assert found.remarks == ()
    rows = {line.split()[0]: line.split()[1:] for line in text if line}
    assert rows["0.weight"][1:5] == ["10", "15", "20", "20"]
    assert rows["double"] == ["scale", "1", "2", "-", f"{start + 1}"]


STEPS = 10_000


def long_history(seed: int) -> list[float | None]:
    rng = random.Random(seed)
    return [rng.lognormvariate(0.0, 0.3) for _ in range(STEPS)]


def cells(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


@pytest.mark.parametrize("spike_at", [20, 255, 256, 9_999])
def test_one_step_of_ten_thousand_survives(
    tmp_path: Path, spike_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsurgeon.report.history.MOST_VALUES", 3 * STEPS // 2)
    history, broken = long_history(1), long_history(2)
    history[spike_at], broken[spike_at] = 1e4, math.nan
    write(tmp_path, {"spiky": history, "broken": broken, "calm": long_history(3)}).close()
    with open_run(tmp_path) as run:
        report = from_run(run)
        text = report.text(width=110)
    few = report.history.rows_of_a_column
    shown_at = spike_at - spike_at % few
    if spike_at // few >= LEAST_PAST:
        assert f"largest spike: spiky, 1e+04 at step {shown_at}, " in text
    assert f"non-finite: 1 parameter, first at step {shown_at}: broken" in text
    assert ("finite again since" in text) == (spike_at < STEPS - 1)
    drawn = cells(text, "spiky")[1]
    assert drawn.count("█") == 1
    assert abs(drawn.index("█") - spike_at * len(drawn) / STEPS) <= 1
    assert cells(text, "broken")[1].index(NONFINITE) == drawn.index("█")
    assert "2 successive steps count as one, by their largest norm" in text
