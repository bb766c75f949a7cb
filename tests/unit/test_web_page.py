"""The page of a run: what travels in it, and that nothing of a run is markup or a request."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import call_here
from ranks import Json
from runs import add, values, write

from gradsurgeon.cli import watch
from gradsurgeon.common.events import Event
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report.web_page import line, page_data, web_page, write_page

HOSTILE = "</script><img src=x onerror=alert(1)>.weight"


def _page(*paths: Path) -> tuple[str, Json]:
    runs = [open_run(path) for path in paths]
    page = web_page([page_data(run) for run in runs])
    for run in runs:
        run.close()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return page, json.loads(data[1])


def _run(path: Path) -> Json:
    """Return what the page of one run holds."""
    (run,) = _page(path)[1]["runs"]
    found: Json = run
    return found


def test_of_several_values_at_a_step_the_worst_travels() -> None:
    steps = [0, 0, 1, 1, 2, 3, 3]
    values = [5.0, 1.0, math.nan, 3.0, 4.0, 2.0, -math.inf]
    short = line("w", np.array(steps), np.array(values))
    assert short["steps"] == [0, 1, 2, 3]
    assert short["values"] == [5.0, "NaN", 4.0, "-Infinity"]
    # Of three steps of a long run one travels.
    long = line("w", np.array([*steps, *range(4, 6_000)]), np.array([*values, *[0.5] * 5_996]))
    assert long["steps"][:2] == [1, 3]
    assert long["values"][:2] == ["NaN", "-Infinity"]
    assert len(long["steps"]) == 2_000


def test_names_and_messages_are_never_markup(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", {HOSTILE: [1.0, 2.0]})
    writer.event(Event("notice", "", 0, 0, HOSTILE, "<!-- <script>alert(1)</script>"))
    writer.close()
    page, data = _page(tmp_path / "run")
    # As many as the page itself has, and none of the run's.
    assert page.count("<script") == 2
    assert page.count("<!--") == 1
    assert "<img" not in page
    assert data["runs"][0]["kinds"][0]["map"]["names"] == [HOSTILE]
    assert data["runs"][0]["events"][0]["message"] == "<!-- <script>alert(1)</script>"


def test_it_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "run", {"a": [1.0]}).close()
    page, _ = _page(tmp_path / "run")
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(", page)


def test_events_beyond_some_hundreds_are_left_out_in_the_middle(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", {"a": [1.0]})
    for step in range(0, 2000, 2):
        writer.event(Event("notice", "", step, 0, "", f"event {step}"))
    writer.close()
    run = _run(tmp_path / "run")
    assert [mark[0] for mark in run["marks"]] == [*range(0, 600, 2), *range(1400, 2000, 2)]
    (event,) = run["events"]
    assert (event["message"], event["repeated"]) == ("event 0", "x1,000, steps 0..1998")
    assert run["left_out"] == 0


def test_report_writes_the_page_of_several_runs_and_of_those_in_a_folder(tmp_path: Path) -> None:
    for name in ("one", "folder/two", "folder/three"):
        write(tmp_path / name, {"a": [1.0, 2.0]}).close()
    place = tmp_path / "out.html"
    folder = str(tmp_path / "folder")
    done = call_here("report", str(tmp_path / "one"), folder, "--html", str(place), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{place}: 3 runs; ")
    data = re.search(r'id="data">(.*?)</script>', place.read_text(encoding="utf-8"), re.DOTALL)
    assert data is not None
    folders = [run["folder"] for run in json.loads(data[1])["runs"]]
    assert folders == [str(tmp_path / name) for name in ("one", "folder/three", "folder/two")]
    # Its own page may be written over, nothing else.
    again = call_here("report", str(tmp_path / "one"), "--html", str(place), cwd=tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("command", ["report", "watch"])
def test_no_other_file_is_written_over(tmp_path: Path, command: str) -> None:
    write(tmp_path / "run", {"a": [1.0]}).close()
    script = tmp_path / "train.py"
    script.write_text("print()", encoding="utf-8")
    refused = call_here(command, "run", "--html", "train.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert "is no page of `report`" in refused.stderr
    assert script.read_text(encoding="utf-8") == "print()"


def test_watch_writes_the_page_anew_until_the_run_ends(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", {"a": [1.0, 2.0]})
    writer.commit()
    place = tmp_path / "live.html"
    write_page([tmp_path / "run"], place, reload_seconds=5.0)
    assert '"lasts":[0,1]' in place.read_text(encoding="utf-8")
    add(writer, Key("norms", "l2", "accumulated", ("a",)), 2, values(3.0))
    writer.close()
    ended = call_here("watch", str(tmp_path / "run"), "--html", str(place), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    page = place.read_text(encoding="utf-8")
    assert '"lasts":[0,1,2]' in page
    # The last page has nothing to wait for; while training goes on each one reloads itself.
    assert '"reload":0' in page
    write_page([tmp_path / "run"], place, reload_seconds=5.0)
    assert '"reload":5.0' in place.read_text(encoding="utf-8")


def test_a_page_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    now = [100.0]

    def write_slowly(runs: Sequence[Path], place: Path, **_: object) -> int:
        written.append(now[0])
        now[0] += 2.0
        return 0

    writer = write(tmp_path / "run", {"a": [1.0]})

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 200:
            writer.close()

    monkeypatch.setattr(watch, "write_page", write_slowly)
    monkeypatch.setattr("gradsurgeon.cli.watch.time.monotonic", lambda: now[0])
    monkeypatch.setattr("gradsurgeon.cli.watch.time.sleep", sleep)
    parser = argparse.ArgumentParser()
    watch.add_options(parser)
    page = str(tmp_path / "page.html")
    assert (
        watch.run(parser.parse_args([str(tmp_path / "run"), "--html", page, "--every", "1"])) == 0
    )
    # Each takes 2 seconds, and the next one waits for 20 times as long.
    # The last one shows how the run ended.
    assert written[:3] == [100.0, 142.0, 184.0]
    assert len(written) == 4
