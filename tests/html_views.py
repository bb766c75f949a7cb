"""What a notebook shows, read back: tables as lists of cells, and what must not be in there."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Protocol, cast

HARMLESS = {
    *("b", "br", "code", "details", "div", "li", "p", "pre", "span", "summary"),
    *("table", "tbody", "td", "th", "thead", "tr", "ul"),
}
ATTRIBUTES = {"style"}


class Shown(Protocol):
    """Whatever shows itself in a notebook."""

    def _repr_html_(self) -> str: ...


class Page(HTMLParser):
    """A page, taken apart; a tag or attribute that it has no business with is an error.

    Attributes:
        html: the source.
        tables: rows of cells, as texts.
        texts: every text, in order.
        folded: how many parts are folded.
    """

    def __init__(self, shown: object) -> None:
        super().__init__()
        self.html = cast("Shown", shown)._repr_html_()
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self.folded = 0
        self._open: list[str] = []
        self.feed(self.html)
        self.close()
        assert not self._open, self._open

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def rows(self, head: str) -> list[list[str]]:
        """Return the rows below the head of the table that has a column of this name."""
        return next(table[1:] for table in self.tables if head in table[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in HARMLESS, tag
        assert {name for name, _ in attrs} <= ATTRIBUTES, attrs
        styles = [value or "" for name, value in attrs if name == "style"]
        assert not any(word in style for style in styles for word in ("color", "background", "url"))
        if tag != "br":
            self._open.append(tag)
        self.folded += tag == "details"
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data
