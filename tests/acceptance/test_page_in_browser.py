"""The page of a run in a real browser: it draws, answers mouse and keys, and asks for nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from page_views import HOSTILE, eventful_run, label, open_page
from runs import KEY, meta, values, write

from gradsurgeon.events import RuleStatus
from gradsurgeon.store.writer import RunWriter

pytestmark = pytest.mark.slow


def _pixel(page: Any, row: int, step: int) -> list[int]:
    found: list[int] = page.evaluate(
        """([row, step]) => {
          const canvas = document.querySelector(".map canvas");
          const x = Math.floor((step + 0.5) / 200 * canvas.width);
          const y = Math.floor((row + 0.4) * 18 * canvas.height / canvas.clientHeight);
          return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data];
        }""",
        [row, step],
    )
    return found


def test_it_draws_curves_traps_and_the_map(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    headings = page.locator("h2").all_inner_texts()
    assert headings == ["What happened", "What stands out", "All norms", "Rules"]
    assert page.locator(".uplot canvas").count() == 2
    assert page.locator("details[open] pre").first.inner_text() == "NaN born"
    assert "largest spike: block.1.weight, 90 at step 50" in page.locator(".callouts").inner_text()
    worst = page.locator(".scroll").first.locator("td.name").all_inner_texts()
    assert worst[:2] == ["block.2.bias", "block.1.weight"]
    # What is not finite has a colour of its own, a spike one of red, and no gradient none.
    bias, weight = label(page, "▾ 2 (2)") + 2, label(page, "▾ 1 (2)") + 1
    assert _pixel(page, bias, 120) == [255, 31, 143, 255]
    assert _pixel(page, bias, 121) == _pixel(page, bias, 10)
    red, green, blue, _ = _pixel(page, weight, 50)
    assert (red, green < 50, blue < 50) == (255, True, True)
    assert _pixel(page, label(page, "▾ head (1)") + 1, 10)[3] == 0
    assert _pixel(page, label(page, "▾ head (1)") + 1, 150)[3] == 255


def test_hovering_and_arrow_keys_read_cells(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    row = label(page, "▾ 1 (2)") + 1
    cells = page.locator(".cells")
    box = cells.bounding_box()
    cells.hover(position={"x": box["width"] * 50.5 / 200, "y": 18 * row + 8})
    assert page.locator(".reading").inner_text() == "block.1.weight, step 50: norm 90"
    cells.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".reading").inner_text() == "block.1.weight, step 51: norm 0.2"
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    assert page.locator(".reading").inner_text() == "block.1 (2), step 199: largest norm 0.2"
    # A key folds the module, whose two tensors are gone then.
    before = page.locator(".rows button").count()
    page.keyboard.press("Enter")
    assert page.locator(".rows button").count() == before - 2


def test_modules_fold_and_names_are_searched(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    page.get_by_role("button", name="fold all").last.click()
    assert page.locator(".rows button").all_inner_texts() == ["▸ block (8)", "▸ head (1)"]
    # A folded module shows the worst that is in it.
    assert _pixel(page, 0, 120) == [255, 31, 143, 255]
    page.locator(".rows button").first.press("Enter")
    assert page.locator(".rows button").count() == 6
    page.get_by_role("searchbox").fill("BIAS")
    names = [f"block.{layer}.bias" for layer in range(4)]
    assert page.locator(".rows button").all_inner_texts() == names


def test_a_tensor_that_is_chosen_is_drawn_as_a_curve(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    assert "none chosen" in page.locator("#chosen").inner_text()
    page.get_by_role("button", name="weight").first.click()
    assert "block.0.weight" in page.locator("#chosen .u-legend").inner_text()
    page.get_by_role("button", name="weight").first.click()
    assert "none chosen" in page.locator("#chosen").inner_text()


def test_dark_and_light_are_the_reader_s_choice(page: Any, tmp_path: Path) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="dark")
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    assert background() == "rgb(20, 23, 27)"
    page.get_by_role("button", name="light and dark").click()
    assert background() == "rgb(255, 255, 255)"
    page.get_by_role("button", name="light and dark").click()
    page.emulate_media(media="print")
    assert background() == "rgb(255, 255, 255)"


def test_hostile_names_are_shown_and_do_nothing(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "run", {f"{HOSTILE}.weight": [1.0, 2.0]}).close()
    open_page(page, tmp_path, tmp_path / "run")
    assert page.locator("img").count() == 0
    assert page.title() == "rules.yaml on Net: gradsurgeon report"
    assert HOSTILE in page.locator("td.name").first.inner_text()


def test_a_run_that_was_only_observed_says_what_would_have_changed(
    page: Any, tmp_path: Path
) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta(mode="observe"))
    writer.add(KEY, 0, values(1.0, 2.0), frozenset())
    writer.statuses({"norms": RuleStatus(2, 2, 0.5, 0)})
    writer.close()
    open_page(page, tmp_path, tmp_path / "run")
    assert "would have changed" in page.locator("th").all_inner_texts()
    assert "no other events" in page.locator("section").first.inner_text()


def test_one_of_several_runs_is_shown_whole(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "other", {"other.weight": [1.0] * 30}).close()
    open_page(page, tmp_path, eventful_run(tmp_path / "run"), tmp_path / "other")
    assert page.locator("h2").first.inner_text() == "The runs beside one another"
    page.get_by_role("button", name="2: ").click()
    page.wait_for_function("document.querySelectorAll('.rows button').length == 2")
    assert page.locator("td.name").first.inner_text() == str(tmp_path / "run")
    assert "other.weight" in page.locator("main").inner_text()
