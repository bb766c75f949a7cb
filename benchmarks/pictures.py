"""Makes the pictures that the documents show: ``python -m benchmarks.pictures`` (Chromium and playwright)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_WIDTH, _HEIGHT = 1100, 830


def take(page: Path, picture: Path, *, height: int = _HEIGHT) -> None:
    """Take a picture of the upper part of a page of `report --html`.

    Args:
        page: the HTML file.
        picture: the PNG file to write.
        height: of the picture in pixels; it is 1100 wide.
    """
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 # of the extra `dev`

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": _WIDTH, "height": height}, color_scheme="light")
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector("html[data-ready]")
        tab.screenshot(path=picture)
        browser.close()


def main() -> int:
    """Run the demo, and write `rules/page.png` of its page."""
    with tempfile.TemporaryDirectory() as folder:
        command = (
            *(sys.executable, "-m", "gradsurgeon.demo"),
            *("--rules", "rules/quickstart.yaml", "--folder", folder),
        )
        subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)  # of ours
        page = Path(folder) / "report.html"
        # As on the machine of a reader.
        text = page.read_text(encoding="utf-8").replace(str(_ROOT), "/home/me/gradsurgeon")
        page.write_text(text, encoding="utf-8")
        take(page, _ROOT / "rules" / "page.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
