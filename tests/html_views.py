"""What a notebook shows, read back: its texts, and what must not be in there."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Protocol, cast

HARMLESS = {"br", "pre"}


class Shown(Protocol):
    """Whatever shows itself in a notebook."""

    def _repr_html_(self) -> str: ...


class Page(HTMLParser):
    """A page, taken apart; any tag or attribute that it has no business with is an error.

    Attributes:
        html: the source.
        texts: every text, in order.
    """

    def __init__(self, shown: object) -> None:
        super().__init__()
        self.html = cast("Shown", shown)._repr_html_()
        self.texts: list[str] = []
        self.feed(self.html)
        self.close()

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in HARMLESS, tag
        # Columns of a table stand below one another in one font only.
        assert attrs == [("style", "font-family: monospace")] * (tag == "pre"), attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
