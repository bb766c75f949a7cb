"""Makes the pictures that the documents show: ``python -m benchmarks.pictures`` (Chromium and playwright)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_WIDTH, _HEIGHT = 1100, 830
# The card of the trap is whole.
_WITH_CARD = 1080
# Each with the heading at which its picture begins; without one it is the top of the page.
_STORIES = {
    "exploding_lstm": "",
    "dying_relu": "What stands out",
    "masked_softmax_float16": "What happened",
}


def take(page: Path, picture: Path, *, height: int = _HEIGHT, heading: str = "") -> None:
    """Take a picture of a part of a page of `report --html`.

    Args:
        page: the HTML file.
        picture: the PNG file to write.
        height: of the picture in pixels; it is 1100 wide.
        heading: the heading at which it begins; without one it begins at the top of the page.
    """
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 # of the extra `dev`

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": _WIDTH, "height": height}, color_scheme="light")
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector("html[data-ready]")
        top = 0.0
        if heading:
            # The bar that says which steps are seen would lie across the picture.
            reset = tab.get_by_role("button", name="show all steps")
            if reset.is_visible():
                reset.click()
            box = tab.locator("h2", has_text=heading).bounding_box()
            assert box is not None, f"{page} has no heading `{heading}`"
            top = box["y"]
        tab.screenshot(
            path=picture,
            full_page=True,
            clip={"x": 0, "y": top, "width": _WIDTH, "height": height},
        )
        browser.close()


def _run(*command: str, page: Path) -> None:
    """Run one of our scripts, which writes a page; let the paths in it be those of a reader."""
    _call(*command)
    text = page.read_text(encoding="utf-8").replace(str(_ROOT), "/home/me/gradsurgeon")
    page.write_text(text.replace(str(page.parent), "/home/me/runs"), encoding="utf-8")


def _call(*command: str) -> None:
    """Run one of our scripts in this checkout."""
    # What a script says on stderr is said of a run that is meant to go wrong.
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    subprocess.run((sys.executable, *command), cwd=_ROOT, check=True, capture_output=True, env=env)


def main() -> int:
    """Run the stories, and write a picture of the page of each under `rules/`."""
    rules = _ROOT / "rules"
    with tempfile.TemporaryDirectory() as folder:
        page, record = Path(folder) / "first.html", Path(folder) / "first"
        story = (
            "rules/stories/went_nan.yaml",
            "--record",
            str(record),
            "rules/stories/went_nan.py",
        )
        _call("-m", "gradsurgeon", "run", "--rules", *story)
        _run("-m", "gradsurgeon", "report", str(record), "--html", str(page), page=page)
        take(page, rules / "page.png", height=_WITH_CARD)
        for name, heading in _STORIES.items():
            page, record = Path(folder) / f"{name}.html", Path(folder) / name
            script = str(rules / "stories" / f"{name}.py")
            _run(script, "--record", str(record), "--html", str(page), page=page)
            take(page, rules / "stories" / f"{name}.png", heading=heading)
    return 0


if __name__ == "__main__":
    sys.exit(main())
