"""Pages of runs that are not as most are: several records of a step, several sorts of norms, damaged runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from page_views import open_page, plots
from runs import add, meta, values, write

from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report.web_page import write_page

pytestmark = pytest.mark.slow

NAN = math.nan
READY = "html[data-ready]"


def drawn(page: Any, chart: int) -> list[list[float | None]]:
    """Return the norms of a log chart: its steps, and the values of each curve; `None` is a gap, "-" no point at all."""
    plots(page)
    steps, *columns = page.evaluate(
        "at => plots[at].data.map((column) => Array.from(column, (v) => (v === undefined ? '-' : v)))",
        chart,
    )
    norms = [[value if value in (None, "-") else 10**value for value in one] for one in columns]
    return [list(steps), *norms]


def test_of_several_records_of_a_step_the_largest_is_drawn(page: Any, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta(("a",)))
    for step, norms in enumerate(
        [(1.0, 5.0, 2.0), (3.0, 1.0, 1.0), (NAN, 1.0, 1.0), (1.0, 1.0, 2.0)]
    ):
        for norm in norms:
            add(writer, Key("norms", "l2", "backward", ("a",)), step, values(norm), frozenset())
    writer.close()
    open_page(page, tmp_path, tmp_path / "run")
    found = drawn(page, 0)
    assert found == [[0, 1, 2, 3], [pytest.approx(5), pytest.approx(3), None, pytest.approx(2)]]
    # The map says the same.
    assert drawn(page, 1)[2][:2] == pytest.approx([5, 3], rel=0.01)


def test_names_like_those_of_the_tree_stay_apart(page: Any, tmp_path: Path) -> None:
    names = ["=a", "a", "a.b", "=a.c", "__proto__", "constructor"]
    write(tmp_path / "run", {name: [1.0, 2.0] for name in names}).close()
    open_page(page, tmp_path, tmp_path / "run")
    page.get_by_role("searchbox").fill("a")
    assert page.locator(".rows button").all_inner_texts() == ["a", "a.b", "=a", "=a.c"]
    page.get_by_role("searchbox").fill("nowhere")
    assert "no name has nowhere" in page.locator("main").inner_text()


def test_norms_of_several_kinds_have_sections_and_scales_of_their_own(
    page: Any, tmp_path: Path
) -> None:
    rules = [
        {"id": "norms", "action": "norm-log", "params": ["a"]},
        {
            "id": "outputs",
            "action": "norm-log",
            "modules": ["layer", "layer.b"],
            "tensor": "output",
        },
    ]
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta(("a",), plan={"rules": rules}))
    outputs = Key("outputs", "l2", "forward", ("layer", "layer.b"))
    for step in range(5):
        add(writer, Key("norms", "l2", "accumulated", ("a",)), step, values(1.0), frozenset())
        add(writer, outputs, step, values(50.0, 70.0), frozenset())
    writer.close()
    open_page(page, tmp_path, tmp_path / "run")
    assert page.locator("h2").all_inner_texts()[2:4] == ["Gradients", "Outputs"]
    names = [
        part.locator("td:first-child").all_inner_texts() for part in page.locator("section").all()
    ]
    assert names[2:4] == [["a"], ["layer.b", "layer"]]
    # A module with an output of its own has two rows that are called apart.
    rows = page.locator(".rows").nth(1).locator("button").all_inner_texts()
    assert rows == ["▾ layer (2)", "(output)", "b"]
    low = page.evaluate("Object.values(current.maps).map((map) => normOf(Math.round(map.span[0])))")
    assert low[1] / low[0] > 20


def test_a_run_without_norms_says_what_it_has(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "run", {"a": [1.0]}, stat="linf").close()
    open_page(page, tmp_path, tmp_path / "run")
    text = page.locator("section").first.inner_text()
    assert "norms: no l2 recorded; recorded: linf: a norm-log rule on the parameters" in text


def test_what_is_not_on_the_page_is_said_on_it(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "one" / "logs", {"a": [1.0]}).close()
    write(tmp_path / "two" / "logs", {"a": [1.0]}).close()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{}", encoding="utf-8")
    runs = [tmp_path / name for name in ("one/logs", "broken", "two/logs")]
    problems = write_page(runs, tmp_path / "page.html")
    assert len(problems) == 1
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector(READY)
    assert "broken/run.json: is damaged" in page.locator(".problem").inner_text()
    # Two runs of one title are told apart by their folders.
    assert page.locator("h1").inner_text() == "one/logs rules.yaml on Net"
