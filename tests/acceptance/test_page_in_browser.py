"""The page of a run in a real browser: it draws, answers mouse and keys, and asks for nothing from elsewhere."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import write

from gradsurgeon.events import Event
from gradsurgeon.report.web_page import web_page
from gradsurgeon.store.run import open_run

pytestmark = pytest.mark.slow
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror=document.title='harmed'>"
_READY = "html[data-ready]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab that fails the test for whatever the page complains of, or asks for from elsewhere."""
    tab = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    wrong: list[str] = []

    def say(text: str) -> None:
        # The tests themselves read pixels back, of which Chromium has an opinion.
        if "getImageData" not in text:
            wrong.append(text)

    tab.on("console", lambda message: say(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    yield tab
    assert wrong == []
    assert [url for url in asked if not url.startswith("file:")] == []
    assert len(asked) == len(set(asked))
    tab.close()


def _open(page: Any, tmp_path: Path, *runs: Path) -> None:
    opened = [open_run(run) for run in runs]
    place = tmp_path / "page.html"
    place.write_text(web_page(opened), encoding="utf-8")
    for run in opened:
        run.close()
    page.goto(place.as_uri())
    page.wait_for_selector(_READY)


def _run(path: Path, *, layers: int = 4) -> Path:
    """Two hundred steps, with a spike at step 50 in one tensor, and a NaN at step 120 in another."""
    histories: dict[str, list[float | None]] = {
        f"block.{layer}.{kind}": [0.1 * (layer + 1)] * 200
        for layer in range(layers)
        for kind in ("weight", "bias")
    }
    histories["block.1.weight"][50] = 90.0
    histories["block.2.bias"][120] = math.nan
    histories["head.weight"] = [None] * 100 + [2.0] * 100
    writer = write(path, histories)
    writer.event(Event("trap", "no-nan", 120, 0, "block.2.bias", "step 120, rule no-nan\nNaN born"))
    writer.event(Event("notice", "", 0, 0, HOSTILE, f"{HOSTILE} is a name\nwith {HOSTILE}"))
    writer.close()
    return path


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


def _label(page: Any, text: str) -> int:
    return int(page.locator(".rows button").all_inner_texts().index(text))


def test_it_draws_curves_traps_and_the_map(page: Any, tmp_path: Path) -> None:
    _open(page, tmp_path, _run(tmp_path / "run"))
    headings = page.locator("h2").all_inner_texts()
    assert headings == ["What happened", "What stands out", "All norms", "Rules"]
    assert page.locator(".uplot canvas").count() == 2
    assert page.locator("details[open] pre").first.inner_text() == "NaN born"
    assert "largest spike: block.1.weight, 90 at step 50" in page.locator(".callouts").inner_text()
    worst = page.locator(".scroll").first.locator("td.name").all_inner_texts()
    assert worst[:2] == ["block.2.bias", "block.1.weight"]
    # What is not finite has a colour of its own, a spike one of red, and no gradient none.
    bias, weight = _label(page, "▾ 2 (2)") + 2, _label(page, "▾ 1 (2)") + 1
    assert _pixel(page, bias, 120) == [255, 31, 143, 255]
    assert _pixel(page, bias, 121) == _pixel(page, bias, 10)
    red, green, blue, _ = _pixel(page, weight, 50)
    assert (red, green < 50, blue < 50) == (255, True, True)
    assert _pixel(page, _label(page, "▾ head (1)") + 1, 10)[3] == 0
    assert _pixel(page, _label(page, "▾ head (1)") + 1, 150)[3] == 255


def test_hovering_and_arrow_keys_read_cells(page: Any, tmp_path: Path) -> None:
    _open(page, tmp_path, _run(tmp_path / "run"))
    row = _label(page, "▾ 1 (2)") + 1
    canvas = page.locator(".map canvas")
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] * 50.5 / 200, "y": 18 * row + 8})
    assert page.locator(".reading").inner_text() == "block.1.weight, step 50: norm 90"
    canvas.focus()
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
    _open(page, tmp_path, _run(tmp_path / "run"))
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
    _open(page, tmp_path, _run(tmp_path / "run"))
    assert "none chosen" in page.locator("#chosen").inner_text()
    page.get_by_role("button", name="weight").first.click()
    assert "block.0.weight" in page.locator("#chosen .u-legend").inner_text()
    page.get_by_role("button", name="weight").first.click()
    assert "none chosen" in page.locator("#chosen").inner_text()


def test_dark_and_light_are_the_reader_s_choice(page: Any, tmp_path: Path) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="dark")
    _open(page, tmp_path, _run(tmp_path / "run"))
    assert background() == "rgb(20, 23, 27)"
    page.get_by_role("button", name="light and dark").click()
    assert background() == "rgb(255, 255, 255)"
    page.get_by_role("button", name="light and dark").click()
    page.emulate_media(media="print")
    assert background() == "rgb(255, 255, 255)"


def test_hostile_names_are_shown_and_do_nothing(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "run", {f"{HOSTILE}.weight": [1.0, 2.0]}).close()
    _open(page, tmp_path, tmp_path / "run")
    assert page.locator("img").count() == 0
    assert page.title() == "rules.yaml on Net: gradsurgeon report"
    assert HOSTILE in page.locator("td.name").first.inner_text()


def test_one_of_several_runs_is_shown_whole(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "other", {"other.weight": [1.0] * 30}).close()
    _open(page, tmp_path, _run(tmp_path / "run"), tmp_path / "other")
    assert page.locator("h2").first.inner_text() == "The runs beside one another"
    page.get_by_role("button", name="2: ").click()
    page.wait_for_function("document.querySelectorAll('.rows button').length == 2")
    assert page.locator("td.name").first.inner_text() == str(tmp_path / "run")
    assert "other.weight" in page.locator("main").inner_text()
