"""The page of a run in Chromium, for tests that look at what it draws."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import write

from gradsurgeon.common.events import Event
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report.web_page import page_data, web_page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror=document.title='harmed'>"
READY = "html[data-ready]"


@contextmanager
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@contextmanager
def tab_of(browser: Any) -> Iterator[Any]:
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
    # A page that reloads itself asks for itself.
    assert [url for url in set(asked) if not url.startswith("file:")] == []
    assert len(set(asked)) == 1
    tab.close()


def open_page(page: Any, tmp_path: Path, *runs: Path, reload: float = 0) -> None:
    opened = [open_run(run) for run in runs]
    place = tmp_path / "page.html"
    text = web_page([page_data(run) for run in opened], reload_seconds=reload)
    place.write_text(text, encoding="utf-8")
    for run in opened:
        run.close()
    page.goto(place.as_uri())
    page.wait_for_selector(READY)


def show_all(page: Any) -> None:
    """Show all steps of a page that has opened on those before a trap."""
    page.get_by_role("button", name="show all steps").click()


def steps_in_view(page: Any) -> list[float]:
    seen: list[float] = page.evaluate("[current.axes[0].min, current.axes[0].max]")
    return seen


def heights(page: Any) -> list[list[float]]:
    """Return top and height of whatever is in the flow of the page."""
    found: list[list[float]] = page.evaluate(
        """() => [...document.querySelectorAll("main section, main h3, main li, main p, main table, .track, .plot, .map")]
          .filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect()).map((box) => [Math.round(box.top + scrollY), Math.round(box.height)])"""
    )
    return found


def eventful_run(path: Path, *, layers: int = 4) -> Path:
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


def label(page: Any, text: str) -> int:
    return int(page.locator(".rows button").all_inner_texts().index(text))


def plots(page: Any, inside: str = "main") -> int:
    """Make `plots` in the page the uPlot charts of a part of it, from its top, and return how many there are."""
    return int(
        page.evaluate(
            """(inside) => {
              const views = current.axes.flatMap((axis) => [...axis.views]).filter((view) => view.plot);
              const part = document.querySelector(inside);
              window.plots = views.map((view) => view.plot).filter((plot) => part.contains(plot.root));
              plots.sort((a, b) => (a.root.compareDocumentPosition(b.root) & 4 ? -1 : 1));
              return plots.length;
            }""",
            inside,
        )
    )


def place(page: Any, step: float, kind: str = "gradient") -> float:
    """Return where a step stands in the map, as a share of its width."""
    return float(
        page.evaluate("([kind, step]) => current.maps[kind].axis.share(step)", [kind, step])
    )
