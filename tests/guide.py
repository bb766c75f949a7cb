"""The pages of the guide, `rules/guide`, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = ROOT / "rules"
PAGES = {path.stem: path for path in sorted((RULES / "guide").glob("*.md"))}


def text(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def whole() -> str:
    """Return all pages, one after the other."""
    return "\n".join(map(text, PAGES))


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a text in one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [block for kind, block in found if kind == language]


def write_files(page: str, folder: Path) -> None:
    """Write the blocks of a text that begin with the name of a file."""
    for name, block in named(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(block, encoding="utf-8")


def named(page: str) -> dict[str, str]:
    found = (block for language in ("yaml", "python") for block in blocks(page, language))
    return {name[1]: block for block in found if (name := re.match(r"# (\S+\.\w+)\n", block))}
