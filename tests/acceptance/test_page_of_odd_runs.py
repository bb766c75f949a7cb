"""Pages of runs that are long, sparse, not finite, oddly named, or still going on, in a real browser."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from page_views import READY, eventful_run, label, open_page
from runs import KEY, meta, values, write

from gradsurgeon.events import Event
from gradsurgeon.store.writer import RunWriter

pytestmark = pytest.mark.slow


def _colours_along(page: Any, chart: str, steps: list[float]) -> list[int]:
    """Return how many pixels of the first curve's colour stand above each step."""
    found: list[int] = page.evaluate(
        """([chart, steps]) => {
          const plot = [...charts].find((one) => document.querySelector(chart).contains(one.root));
          const paint = rgb("curve-0");
          return steps.map((step) => {
            const x = Math.round(plot.valToPos(step, "x", true)), { top, height } = plot.bbox;
            const pixels = plot.ctx.getImageData(x, top, 1, height).data;
            let count = 0;
            for (let i = 0; i < pixels.length; i += 4) if (paint.every((part, j) => Math.abs(pixels[i + j] - part) < 60)) count++;
            return count;
          });
        }""",
        [chart, steps],
    )
    return found


def test_of_several_values_at_a_step_the_worst_is_drawn(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    line = {"label": "", "steps": [0, 0, 1, 1, 2, 3, 3], "values": [5, 1, "NaN", 3, None, None, 2]}
    steps, (column,) = page.evaluate("(line) => aligned([line])", line)
    assert steps == [0, 1, 2, 3]
    assert (column[0], math.isnan(column[1]), column[2], column[3]) == (5, True, None, 2)


def test_a_curve_goes_on_where_nothing_was_recorded(page: Any, tmp_path: Path) -> None:
    odd = [1.0 if step % 2 else None for step in range(40)]
    write(tmp_path / "run", {"odd": odd, "even": [2.0 if v is None else None for v in odd]}).close()
    open_page(page, tmp_path, tmp_path / "run")
    page.get_by_role("button", name="odd").click()
    assert all(_colours_along(page, "#chosen", [2, 9, 10.5, 24, 38]))


def test_a_value_between_gaps_is_a_point_and_zero_a_mark_below(page: Any, tmp_path: Path) -> None:
    history = [4.0, 4.0, math.nan, 3.0, math.nan, 4.0, 0.0, 2.0, 2.0, 30.0]
    write(tmp_path / "run", {"a": history}).close()
    open_page(page, tmp_path, tmp_path / "run")
    page.get_by_role("button", name="a", exact=True).click()
    before, gap, point, lone, zero, after = _colours_along(page, "#chosen", [0.5, 2, 3, 5, 6, 8.5])
    assert (before > 0, gap, point > 3, lone > 3, zero, after > 0) == (True, 0, True, True, 0, True)
    assert "exactly 0, which has no place on this axis" in page.locator("#chosen").inner_text()
    marked = page.evaluate(
        """() => {
          const plot = [...charts].at(-1), { top, height } = plot.bbox;
          const x = Math.round(plot.valToPos(6, "x", true));
          return [...plot.ctx.getImageData(x, top + height - 3, 1, 1).data].slice(0, 3);
        }"""
    )
    assert marked == [154, 163, 173]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five thousand tensors, of which each has another norm."""
    path = tmp_path_factory.mktemp("many") / "run"
    names = [f"m{i // 100}.p{i % 100:02}" for i in range(5000)]
    write(path, {name: [1.0 + at] * 3 for at, name in enumerate(names)}).close()
    return path


def test_of_thousands_of_rows_those_on_the_screen_are_drawn(
    page: Any, tmp_path: Path, many: Path
) -> None:
    open_page(page, tmp_path, many)
    page.get_by_role("button", name="unfold all").click()
    cells = page.locator(".cells")
    assert cells.bounding_box()["height"] == 18 * 5050
    for name, row in (("p00", 1), ("p50", 25 * 101 + 51), ("p99", 5049)):
        page.evaluate(
            "(y) => scrollTo(0, scrollY + document.querySelector('.cells').getBoundingClientRect().top + y - 400)",
            18 * row,
        )
        page.wait_for_function("(row) => map.drawn[0] <= row && row < map.drawn[1]", arg=row)
        size, opaque = page.evaluate(
            """(row) => {
              const { canvas, drawn } = map;
              const at = (row - drawn[0] + 0.4) * 18 * devicePixelRatio;
              return [canvas.height, canvas.getContext("2d").getImageData(10, at, 1, 1).data[3]];
            }""",
            row,
        )
        assert (size <= 2.1 * 900, opaque) == (True, 255)
        assert page.locator(".rows button").count() < 120
        box = cells.bounding_box()
        page.evaluate("() => { map.drawCells = () => { throw new Error('drawn again'); }; }")
        page.mouse.move(box["x"] + 20, box["y"] + 18 * row + 8)
        assert f".{name}, step 0: norm" in page.locator(".reading").inner_text()
        mark = page.locator(".mark").bounding_box()
        assert mark["y"] == pytest.approx(box["y"] + 18 * row, abs=1)
        page.evaluate("delete map.drawCells")
    # Keys go to what is not on the screen, and bring it there.
    cells.focus()
    for _ in range(20):
        page.keyboard.press("PageUp")
    assert page.locator(".reading").inner_text().startswith("m48.p00,")
    assert -1 <= page.locator(".mark").bounding_box()["y"] <= 900
    page.get_by_role("searchbox").fill("m31.p07")
    assert page.locator(".rows button").all_inner_texts() == ["m31.p07"]
    page.get_by_role("searchbox").fill("nowhere")
    assert page.get_by_text("no name has nowhere").is_visible()


def test_paper_is_light_and_has_the_first_rows(page: Any, tmp_path: Path, many: Path) -> None:
    page.emulate_media(color_scheme="dark")
    open_page(page, tmp_path, many)
    page.get_by_role("button", name="unfold all").click()
    page.evaluate(
        """addEventListener("beforeprint", () => {
          const marker = document.querySelector(".u-series:nth-child(2) .u-marker");
          window.printed = [document.documentElement.dataset.theme, map.drawn, map.canvas.height, getComputedStyle(marker).borderColor];
        })"""
    )
    page.pdf()
    theme, drawn, height, marker = page.evaluate("printed")
    assert marker == "rgb(11, 98, 196)"
    assert (theme, drawn, height) == ("light", [0, 200], 3600)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    note = page.locator(".printed-only")
    assert not note.is_visible()
    assert note.text_content() == "The first 200 rows are printed, and 4850 more are not."


def test_steps_stand_below_the_columns_that_they_are_of(page: Any, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta())
    for step in (*range(50), *range(1000, 1050)):
        writer.add(KEY, step, values(1.0, 2.0), frozenset())
    writer.close()
    write(tmp_path / "even", {"a": [1.0] * 200}).close()
    open_page(page, tmp_path, tmp_path / "even")
    assert "jump over steps" not in page.locator("main").inner_text()
    open_page(page, tmp_path, tmp_path / "run")
    assert "jump over steps" in page.locator("main").inner_text()
    marks = page.locator(".map + .steps span")
    assert marks.all_inner_texts() == ["0", "20", "40", "1010", "1030"]
    cells = page.locator(".cells").bounding_box()
    left = marks.nth(3).bounding_box()["x"]
    assert left == pytest.approx(cells["x"] + cells["width"] * 60.5 / 100, abs=1)


def test_nothing_is_invented_where_no_norm_is_finite(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "run", {"a": [math.nan] * 9, "loss": [math.nan] * 9, "b": [0.0] * 9}).close()
    open_page(page, tmp_path, tmp_path / "run")
    assert page.locator(".ramp").count() == page.locator(".density").count() == 0
    ticks = page.evaluate("[...charts].map((plot) => plot.axes[1]._values)")
    assert [set(texts) for texts in ticks] == [{""}] * len(ticks)
    assert len(ticks) >= 2


def test_blank_is_said_to_be_what_was_not_recorded(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    cells = page.locator(".cells")
    cells.hover(position={"x": 5, "y": 18 * (label(page, "▾ head (1)") + 1) + 8})
    assert page.locator(".reading").inner_text() == "head.weight, step 0: nothing recorded"
    assert "blank: nothing recorded" in page.locator(".legend").inner_text()


def test_names_of_every_sort_have_rows_and_widen_nothing(page: Any, tmp_path: Path) -> None:
    endless = "x" * 5000
    names = ["=a", "a.b", "a", "=a.c", "\x1b[31m", endless, f"{endless}.{endless}"]
    writer = write(tmp_path / "run", {name: [1.0, 2.0, math.nan] for name in names})
    writer.event(Event("trap", endless, 2, 0, endless, f"{endless}\n{endless}"))
    writer.event(Event("notice", "", 7, 1, "", "after 3 tries"))
    writer.event(Event("notice", "", 2, 0, "", "after 4 tries"))
    writer.close()
    for width in (1200, 400):
        page.set_viewport_size({"width": width, "height": 700})
        open_page(page, tmp_path, tmp_path / "run")
        page.get_by_role("button", name="unfold all").click()
        page.locator(".rows button").nth(5).click()
        page.locator(".cells").hover(position={"x": 5, "y": 8})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        rows = page.locator(".map").bounding_box()["width"]
        assert page.locator(".rows").bounding_box()["width"] <= 0.41 * rows
        texts = set(page.locator(".rows button").all_inner_texts())
        assert texts >= {"=a", "a", "b", "c", "\\x1b[31m", "▾ a (1)", "▾ =a (1)"}
        assert "notice  steps 2 to 7, 2 times" in page.locator("main").text_content()


def test_a_legend_has_values_only_below_the_mouse(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    value = page.locator(".uplot .u-value").nth(1)
    assert not value.is_visible()
    plot = page.locator(".uplot .u-over").first
    plot.hover(position={"x": plot.bounding_box()["width"] * 150 / 199, "y": 20})
    assert value.is_visible()
    assert value.inner_text() == "2.14"


def test_runs_beside_one_another_have_events_and_titles_of_their_own(
    page: Any, tmp_path: Path
) -> None:
    calm = tmp_path / "calm" / "run"
    write(calm, {"other.weight": [1.0] * 200}).close()
    open_page(page, tmp_path, calm, eventful_run(tmp_path / "wild" / "run"))
    assert page.locator("h1").inner_text() == "rules.yaml on Net, calm/run"
    page.get_by_role("button", name="2: ").click()
    assert page.locator("h1").inner_text() == "rules.yaml on Net, wild/run"
    # The trap of the second run, thin in the colour of its curve.
    red, green, blue = page.evaluate(
        """() => {
          const plot = [...charts][0], { top, height } = plot.bbox;
          const x = Math.round(plot.valToPos(120, "x", true));
          return [...plot.ctx.getImageData(x, top + height / 3 + 3, 1, 1).data].slice(0, 3);
        }"""
    )
    assert red > green + 20 > blue + 40


def test_a_live_page_reloads_itself_and_keeps_what_was_chosen(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run", layers=40), reload=1)
    assert "reloads itself" in page.locator("#live").inner_text()
    page.get_by_role("button", name="light and dark").click()
    page.get_by_role("button", name="unfold all").click()
    page.locator(".rows button").nth(3).click()
    page.evaluate("scrollTo(0, 700); window.before = true")
    chosen = page.locator("#chosen .u-legend").inner_text()
    page.wait_for_timeout(3000)
    # The reader has just done something.
    assert page.evaluate("window.before")
    page.wait_for_function("() => !window.before", timeout=20_000)
    page.wait_for_selector(READY)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator(".rows button").count() == 40 * 3 + 3
    assert page.locator("#chosen .u-legend").inner_text() == chosen
    assert page.evaluate("scrollY") == 700
    page.get_by_role("button", name="stop").click()
    assert page.locator("#live").inner_text().endswith("stopped")
