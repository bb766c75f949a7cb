"""What a report says of several losses: how far they conflict, and what combining them made of their sum."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import call_here
from ranks import Json
from runs import meta, shown, values

from gradsurgeon import open_run
from gradsurgeon.cli.watch import newest_report, screen
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.delivery import Curves
from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.memory import RecordedRow
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report import Report, RuleInfo, from_run
from gradsurgeon.report.json_form import to_dict
from gradsurgeon.report.losses import LossSeries
from gradsurgeon.report.web_page import page_data

NAN = math.nan
PAIRS = ("seg/depth", "seg/edges", "depth/edges")
LOSSES = ("seg", "depth", "edges")
# Four calls, of which the second did not reach `edges`; two of them are in one step.
STEPS = (0, 1, 2, 2)
COSINES = ((-0.5, 0.25, 0.5), (-0.75, NAN, NAN), (0.25, 0.5, -0.125), (-0.25, 0.75, 0.5))
RATIOS = ((2.0, 100.0, 0.5), (8.0, NAN, NAN), (0.5, 1000.0, 0.5), (2.0, 10000.0, 4.0))
WEIGHTS = ((1.0, 1.0, 1.0), (0.5, 0.25, 2.0), (1.5, 0.5, 4.0), (1.0, 0.5, 1.0))
DISTANCES = (0.0, 0.5, math.inf, 1.0)

Row = Sequence[float]


def rules_of(*ids: str) -> dict[str, RuleInfo]:
    return {rule: RuleInfo("conflict", "observe") for rule in ids}


def about(**more: Any) -> Json:
    """Return what `run.json` says of a run with a rule that compares and one that combines."""
    given: Json = {
        "plan": {
            "rules": [
                {"id": "tasks", "action": "conflict", "params": ["w"]},
                {"id": "surgery", "action": "combine", "params": ["w"]},
            ]
        },
        "roles": {
            "tasks": {"role": "observe", "stats": ["cosine", "ratio"]},
            "surgery": {"role": "edit", "stats": ["weight", "distance"]},
        },
    }
    return meta(("w",), **(given | more))


def fill(writer: RunWriter) -> None:
    for stat, rows in (("cosine", COSINES), ("ratio", RATIOS)):
        for step, row in zip(STEPS, rows, strict=True):
            writer.add(Key("tasks", stat, "backward", PAIRS), step, values(*row))
    for step, row, distance in zip(STEPS, WEIGHTS, DISTANCES, strict=True):
        writer.add(Key("surgery", "weight", "backward", LOSSES), step, values(*row))
        key = Key("surgery", "distance", "backward", ("combined",))
        writer.add(key, step, values(distance))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    writer = RunWriter(path, rank=0, meta=about())
    fill(writer)
    writer.statuses({"tasks": RuleStatus(1, 4, 0, 2), "surgery": RuleStatus(1, 4, 3, 2)})
    writer.close()
    return path


def report_of(path: Path) -> Json:
    with open_run(path) as opened:
        return to_dict(from_run(opened))


def recorded(
    by_stat: Mapping[str, Sequence[Row]], names: Sequence[str], rule: str = "tasks"
) -> Records:
    records = Records(2**40)
    for stat, rows in by_stat.items():
        for step, row in enumerate(rows):
            records.add(Key(rule, stat, "backward", tuple(names)), step, values(*row))
    return records


def text_of(records: Records) -> str:
    return Report("t", (), rules_of("tasks"), {}, **shown(records)).text(width=100)


def pairs_of(curve: LossSeries) -> list[tuple[int, float]]:
    return list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def numbers_of(found: Json, stat: str) -> dict[str, Json]:
    return {one["name"]: one for one in found["losses"] if one["stat"] == stat}


def test_the_numbers_are_those_of_the_rows(run: Path) -> None:
    found = report_of(run)
    cosines = numbers_of(found, "cosine")
    assert list(cosines) == list(PAIRS)
    shared = {"rule": "tasks", "stat": "cosine", "steps": [0, 1, 2], "calls": 4}
    wanted: list[Json] = [
        {"nonfinite": 0, "mean": -0.3125, "least": -0.75, "largest": 0.25, "negative": 0.75},
        {"nonfinite": 1, "mean": 0.5, "least": 0.25, "largest": 0.75, "negative": 0.0},
        {"nonfinite": 1, "mean": 0.875 / 3, "least": -0.125, "largest": 0.5, "negative": 1 / 3},
    ]
    for pair, numbers in zip(cosines.values(), wanted, strict=True):
        assert {key: pair[key] for key in shared} == shared
        for key, value in numbers.items():
            assert pair[key] == pytest.approx(value, abs=1e-6)
    ratios = numbers_of(found, "ratio")
    assert [one["median"] for one in ratios.values()] == [2.0, 1000.0, 0.5]


def test_what_was_combined(run: Path) -> None:
    found = report_of(run)
    distance = numbers_of(found, "distance")["combined"]
    assert (distance["rule"], distance["calls"], distance["nonfinite"]) == ("surgery", 4, 1)
    assert distance["mean"] == 0.5  # of those that are finite
    weights = numbers_of(found, "weight").values()
    assert [
        tuple(one[key] for key in ("name", "calls", "mean", "least", "largest")) for one in weights
    ] == [("seg", 4, 1.0, 0.5, 1.5), ("depth", 4, 0.5625, 0.25, 1.0), ("edges", 4, 2.0, 1.0, 4.0)]


def test_the_text_says_what_is_left_out(run: Path) -> None:
    done = call_here("report", str(run), cwd=run.parent)
    assert done.returncode == 0
    text = done.stdout
    assert "norms: no l2" not in text
    lines = [line.split() for line in text.splitlines()]
    row = next(line for line in lines if line[:1] == ["seg/depth"])
    assert row[1:] == ["-0.312", "-0.75", "0.25", "-0.25", "75%", "-"]
    assert "1 pair of 3 conflict on average" in text
    # A call in which one of the losses had no gradient.
    row = next(line for line in lines if line[:1] == ["seg/edges"])
    assert row[-2:] == ["0%", "1"]
    # The rule that combines has changed something in three calls of four.
    row = next(line for line in lines if line[:1] == ["surgery"])
    assert row[:5] == ["surgery", "combine", "1", "4", "75%"]
    assert ["combined", "0.5", "0", "1", "1", "1"] in lines


def test_what_observes_would_have_changed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=about(mode="observe"))
    fill(writer)
    writer.close()
    with open_run(tmp_path / "run") as opened:
        text = from_run(opened).text(width=100)
        page = page_data(opened)
    assert "observed only: no rule changed anything" in text
    assert page["observed"]


def test_norms_beside_them_and_other_statistics_are_shown_as_ever(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=about())
    fill(writer)
    writer.add(Key("extra", "linf", "step", ("w",)), 0, values(1.0))
    writer.close()
    with open_run(tmp_path / "run") as opened:
        assert "norms: no l2 recorded; recorded: cosine, distance, linf," in str(from_run(opened))
    # An update over its weight is a ratio, and no loss.
    records = recorded({"ratio": [[1.0]]}, ["a.weight"])
    assert Report("t", (), rules_of("tasks"), {}, **shown(records)).losses == []


def test_another_rank_adds_pairs_that_only_it_has(tmp_path: Path) -> None:
    writers = [RunWriter(tmp_path / "run", rank=rank, meta=about()) for rank in range(2)]
    for writer, names in zip(writers, (("seg/depth",), ("seg/depth", "seg/edges")), strict=True):
        rank = writer.rank
        key = Key("tasks", "cosine", "backward", names)
        writer.add(key, 0, values(*[0.5 - rank] * len(names)))
        writer.close()
    with open_run(tmp_path / "run") as opened:
        found = from_run(opened).losses
    assert [(one.name, pairs_of(one)) for one in found] == [
        ("seg/depth", [(0, 0.5)]),
        ("seg/edges", [(0, -0.5)]),
    ]


EIGHT = ["segmentation", "depth", "normals", "edges", "keypoints", "boxes", "train/flow", "albedo"]


def test_twenty_eight_pairs_can_be_read() -> None:
    names = [f"{one}/{other}" for one, other in itertools.combinations(EIGHT, 2)]
    rows = [[(place - 14) / 14 for place in range(28)]] * 10
    text = text_of(recorded({"cosine": rows}, names))
    lines = text.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ") and "/" in line]
    assert {*names} <= {*listed}
    assert "more" not in text
    assert "  14 pairs of 28 conflict on average" in text
    assert max(len(line) for line in lines if "conflict" not in line) <= 100


def test_of_hundreds_of_parts_the_worst_are_shown() -> None:
    names = [f"trunk.{place}.weight:seg/depth" for place in range(300)]
    rows = [[(place - 30) / 300 for place in range(300)]] * 16
    rows[3] = [NAN] * 300
    text = text_of(recorded({"cosine": rows}, names))
    listed = re.findall(r"^  (trunk\.\d+\.weight):seg/depth ", text, re.MULTILINE)
    assert listed == [f"trunk.{place}.weight" for place in range(28)]
    assert "  ... and 272 more\n" in text
    assert "cosine of pairs of losses, recorded by tasks in steps 0..15" in text
    assert "30 pairs of 300 conflict on average" in text


def test_parts_that_come_later_have_series_of_their_own() -> None:
    records = Records()
    first = Key("tasks", "cosine", "backward", ("seg/depth",))
    both = Key("tasks", "cosine", "backward", ("seg/depth", "seg/edges", "depth/edges"))
    for step in range(4):
        key, row = (first, [0.5]) if step % 2 else (both, [-0.5, 0.25, 0.0])
        records.add(key, step, values(*row))
    found = Report("t", (), rules_of("tasks"), {}, **shown(records)).losses
    assert [pairs_of(one) for one in found if one.name != "depth/edges"] == [
        [(0, -0.5), (1, 0.5), (2, -0.5), (3, 0.5)],
        [(0, 0.25), (2, 0.25)],
    ]


def test_the_page_has_tables_and_curves(run: Path) -> None:
    with open_run(run) as opened:
        data = page_data(opened)
    cosines, _, weights, distances = data["versus"]
    curves = cosines["lines"]
    assert cosines["title"] == "cosine"
    assert [curve["label"] for curve in curves] == [
        "seg/depth",
        "depth/edges",
        "seg/edges",
    ]
    # Two calls of one step are one point, the worst of them.
    assert (curves[0]["steps"], curves[0]["values"]) == (
        [0, 1, 2],
        [-0.5, -0.75, -0.25],
    )
    # A call that did not reach a loss has no point.
    assert (curves[2]["steps"], curves[2]["values"]) == ([0, 2], [0.25, 0.5])
    (distance,) = distances["lines"]
    assert distance["values"] == [0.0, 0.5, "Infinity"]
    assert [row[:3] for row in weights["table"]["rows"]] == [
        ["seg", "", "1"],
        ["depth", "", "0.562"],
        ["edges", "", "2"],
    ]
    json.dumps(data, allow_nan=False)


def test_trackers_get_median_and_least() -> None:
    def sent(stat: str, names: Sequence[str], *row: float) -> dict[str, float] | None:
        key = Key("tasks", stat, "backward", tuple(names))
        return Curves(()).scalars(RecordedRow(key, 3, values(*row))) or None

    assert sent("cosine", PAIRS, -0.5, NAN, 0.25) == {
        "tasks/seg/depth/cosine": -0.5,
        "tasks/depth/edges/cosine": 0.25,
    }
    many = [f"w{place}:seg/depth" for place in range(100)]
    assert sent("cosine", many, *[0.0] * 99, -0.5) == {
        "tasks/cosine/not finite": 0.0,
        "tasks/cosine/median": 0.0,
        "tasks/cosine/largest": 0.0,
        "tasks/cosine/least": -0.5,
    }
    assert sent("distance", ["combined"], 0.5) == {"tasks/combined/distance": 0.5}
    assert sent("cosine", PAIRS, NAN, NAN, NAN) is None


def test_a_tagged_loss_is_in_text_json_page_and_on_the_screen(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=about())
    for step, loss in enumerate([2.0, 0.5, math.inf, 0.25, 1.0]):
        writer.add(Key("value", "mean", "forward", ("loss", "gap")), step, values(loss, 7.0))
    writer.close()
    title = "losses, recorded by value in steps 0..4"
    with open_run(tmp_path / "run") as opened:
        report = from_run(opened)
        (line,) = page_data(opened)["losses"]
    row = str(report).split(title)[1].splitlines()[2]
    assert row.split() == ["loss", "█▃✗▁▆", "0.938", "0.25", "2", "1", "1"]
    (numbers,) = to_dict(report)["losses"]
    assert numbers == {
        "name": "loss", "rule": "value", "stat": "mean", "steps": [0, 1, 2, 3, 4], "calls": 5,
        "values": [2.0, 0.5, "Infinity", 0.25, 1.0],
        "first": 2.0, "least": 0.25, "median": 0.75, "mean": 0.9375, "largest": 2.0, "last": 1.0,
        "negative": 0.0, "nonfinite": 1,
    }  # fmt: skip
    assert line["values"] == [2.0, 0.5, "Infinity", 0.25, 1.0]
    assert title in screen(newest_report(tmp_path / "run"), 120)
    assert "gap" not in str(report)


def test_a_loss_that_falls_below_zero_has_no_log_scale() -> None:
    records = Records()
    for step, loss in enumerate([1.0, -2.0]):
        records.add(Key("value", "mean", "forward", ("loss",)), step, values(loss))
    (table,) = [
        one
        for one in Report("t", (), {}, {}, **shown(records)).tables
        if one.title.startswith("losses")
    ]
    assert len(table.curves[0]) == 0
    assert table.rows[0][2:6] == ["-0.5", "-2", "1", "-2"]
