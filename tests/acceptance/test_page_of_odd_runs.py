"""Pages of runs that are long, sparse, not finite, oddly named, or still going on, in a real browser."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from page_views import (
    READY,
    eventful_run,
    label,
    open_page,
    place,
    plots,
    show_all,
    steps_in_view,
)
from runs import KEY, add, meta, values, write

from gradsurgeon.common.events import Event
from gradsurgeon.records.store.writer import RunWriter

pytestmark = pytest.mark.slow


def _colours_along(page: Any, chart: str, steps: list[float]) -> list[int]:
    """Return how many pixels of the first curve's colour stand above each step."""
    plots(page, chart)
    found: list[int] = page.evaluate(
        """(steps) => {
          const plot = plots[0], paint = rgb("curve-0");
          return steps.map((step) => {
            const x = Math.round(plot.valToPos(step, "x", true)), { top, height } = plot.bbox;
            const pixels = plot.ctx.getImageData(x, top, 1, height).data;
            let count = 0;
            for (let i = 0; i < pixels.length; i += 4) if (paint.every((part, j) => Math.abs(pixels[i + j] - part) < 60)) count++;
            return count;
          });
        }""",
        steps,
    )
    return found


def test_a_curve_goes_on_where_nothing_was_recorded(page: Any, tmp_path: Path) -> None:
    odd = [1.0 if step % 2 else None for step in range(40)]
    write(tmp_path / "run", {"odd": odd, "even": [2.0 if v is None else None for v in odd]}).close()
    open_page(page, tmp_path, tmp_path / "run")
    page.get_by_role("button", name="odd").click()
    assert all(_colours_along(page, ".curves", [2, 9, 10.5, 24, 38]))


def test_a_value_between_gaps_is_a_point_and_zero_a_mark_below(page: Any, tmp_path: Path) -> None:
    history = [4.0, 4.0, math.nan, 3.0, math.nan, 4.0, 0.0, 2.0, 2.0, 30.0]
    write(tmp_path / "run", {"a": history}).close()
    open_page(page, tmp_path, tmp_path / "run")
    page.get_by_role("button", name="a", exact=True).click()
    before, gap, point, lone, zero, after = _colours_along(page, ".curves", [0.5, 2, 3, 5, 6, 8.5])
    assert (before > 0, gap, point > 3, lone > 3, zero, after > 0) == (True, 0, True, True, 0, True)
    assert "exactly 0, which has no place on this axis" in page.locator(".curves").inner_text()
    marked = page.evaluate(
        """() => {
          const plot = plots[0], { top, height } = plot.bbox;
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


def test_of_thousands_of_rows_some_hundreds_are_drawn(
    page: Any, tmp_path: Path, many: Path
) -> None:
    open_page(page, tmp_path, many)
    page.get_by_role("button", name="unfold all").click()
    cells = page.locator(".cells")
    assert cells.bounding_box()["height"] == 18 * 600
    assert page.get_by_text("and 4450 more rows: fold modules, or filter the names").is_visible()
    # Every row that is there is drawn, to the last one.
    opaque = page.evaluate(
        """() => {
          const { canvas } = current.maps.gradient, context = canvas.getContext("2d");
          return [0, 300, 599].map((row) => context.getImageData(canvas.width / 2, (row + 0.4) * canvas.height / 600, 1, 1).data[3]);
        }"""
    )
    assert opaque == [255] * 3
    # Keys bring a row that is not on the screen there.
    cells.focus()
    for _ in range(50):
        page.keyboard.press("PageDown")
    assert page.locator(".reading").inner_text().startswith("m4.p95,")
    assert -1 <= page.locator(".mark").bounding_box()["y"] <= 900
    page.get_by_role("searchbox").fill("m31.p07")
    assert page.locator(".rows button").all_inner_texts() == ["m31.p07"]
    page.get_by_role("searchbox").fill("nowhere")
    assert page.get_by_text("no name has nowhere").is_visible()


def test_paper_is_light_and_as_wide_as_the_curves(page: Any, tmp_path: Path) -> None:
    page.emulate_media(color_scheme="dark")
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    plots(page)
    page.evaluate(
        """addEventListener("beforeprint", () => {
          window.printed = [document.documentElement.dataset.theme, plots[0].width, document.body.clientWidth, colour("curve-0")];
        })"""
    )
    page.pdf()
    theme, width, body, paint = page.evaluate("printed")
    assert (theme, paint) == ("light", "rgb(11,98,196)")
    assert 590 < width <= body == 700
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("plots[0].width") > 700


def test_nothing_is_drawn_at_steps_without_records(page: Any, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta())
    for step in (*range(50), *range(1000, 1050)):
        add(writer, KEY, step, values(1.0, 2.0), frozenset())
    writer.close()
    open_page(page, tmp_path, tmp_path / "run")
    alphas = page.evaluate(
        """() => {
          const map = current.maps.gradient, context = map.canvas.getContext("2d");
          return [25, 49, 60, 500, 990, 1001, 1049].map((step) => context.getImageData(Math.floor(map.axis.share(step) * map.canvas.width), 0, 1, 1).data[3]);
        }"""
    )
    assert alphas == [255, 255, 0, 0, 0, 255, 255]


def test_steps_are_whole_numbers_and_the_last_one_is_seen_whole(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "run", {"a": [1.0, 2.0, 1.0, 3.0, 1.0]}).close()
    open_page(page, tmp_path, tmp_path / "run")
    plots(page)
    ticks, right, last = page.evaluate(
        "[plots[0].axes[0]._values.filter(Boolean), plots[0].over.clientWidth, plots[0].valToPos(4, 'x')]"
    )
    assert ticks == ["step 0", "1", "2", "3", "4"]
    assert right - last > 8


def test_nothing_is_invented_where_no_norm_is_finite(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "run", {"a": [math.nan] * 9, "loss": [math.nan] * 9, "b": [0.0] * 9}).close()
    open_page(page, tmp_path, tmp_path / "run")
    assert page.locator(".ramp").count() == 0
    assert plots(page) == 2
    norm, curves = page.evaluate("plots.map((plot) => plot.axes[1]._values)")
    assert {*norm, *curves} == {""}


def test_blank_is_said_to_be_what_was_not_recorded(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    show_all(page)
    cells = page.locator(".cells")
    cells.hover(position={"x": 5, "y": 18 * label(page, "head.weight") + 8})
    assert page.locator(".reading").inner_text() == "head.weight, step 0: nothing recorded"
    assert "blank: nothing recorded" in page.locator(".colours").inner_text()


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
        assert texts >= {"▾ =a (2)", "▾ a (2)", "(gradient)", "b", "c", "\\x1b[31m"}
        assert "notice x2, steps 2..7, rank 0, 1" in page.locator("main").text_content()


def test_a_legend_has_values_only_below_the_mouse(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    show_all(page)
    value = page.locator(".legend .value").first
    assert value.inner_text() == ""
    plot = page.locator(".u-over").first
    plot.hover(position={"x": plot.bounding_box()["width"] * place(page, 150), "y": 20})
    assert value.inner_text() == "2.14"
    page.mouse.move(5, 5)
    assert value.inner_text() == ""


def test_runs_beside_one_another_have_events_and_titles_of_their_own(
    page: Any, tmp_path: Path
) -> None:
    calm = tmp_path / "calm" / "run"
    write(calm, {"other.weight": [1.0] * 200}).close()
    open_page(page, tmp_path, calm, eventful_run(tmp_path / "wild" / "run"))
    assert page.locator("h1").inner_text() == "wild/run rules.yaml on Net"
    page.get_by_role("button", name="calm/run").click()
    assert page.locator("h1").inner_text() == "calm/run rules.yaml on Net"
    # The trap of the second run, thin in the colour of its curve.
    plots(page)
    paint, found = page.evaluate(
        """() => {
          const plot = plots[0], { top, height } = plot.bbox;
          const x = Math.round(plot.valToPos(120, "x", true));
          const pixels = [-1, 0, 1].map((beside) => [...plot.ctx.getImageData(x + beside, top + height / 3 + 3, 1, 1).data].slice(0, 3));
          return [rgb("curve-1"), pixels.find((pixel) => pixel[2] < 100)];
        }"""
    )
    assert found == pytest.approx(paint, abs=40)


def test_a_live_page_reloads_itself_and_keeps_what_was_chosen(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run", layers=40), reload=1)
    assert "reloads itself" in page.locator("#live").inner_text()
    page.get_by_role("button", name="light and dark").click()
    page.get_by_role("button", name="unfold all").click()
    page.locator(".rows button").nth(3).click()
    show_all(page)
    page.evaluate("scrollTo(0, 700); window.before = true")
    chosen = page.locator(".curves .legend").inner_text()
    page.wait_for_timeout(3000)
    # The reader has just done something.
    assert page.evaluate("window.before")
    page.wait_for_function("() => !window.before", timeout=20_000)
    page.wait_for_selector(READY)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator(".rows button").count() == 40 * 3 + 2
    assert page.locator(".curves .legend").inner_text() == chosen
    assert page.evaluate("scrollY") == 700
    assert steps_in_view(page)[1] > 199
    page.get_by_role("button", name="stop").click()
    assert page.locator("#live").inner_text().endswith("stopped")
