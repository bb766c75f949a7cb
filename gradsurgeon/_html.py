"""HTML for notebooks: small tables in the colours of the page, be it light or dark.

No script, no style sheet and nothing from elsewhere; every text is escaped, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from gradsurgeon.errors import printable

# Notebooks align the cells of tables to the right.
_LEFT, _RIGHT = (
    f"text-align:{side};vertical-align:top;padding:1px 8px" for side in ("left", "right")
)


class Markup(str):
    """A piece of HTML in which every text is escaped already."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """Return what shows a text as it is, each line on one of its own."""
    if isinstance(text, Markup):
        return text
    return Markup("<br>".join(escape(printable(line)) for line in str(text).split("\n")))


def element(tag: str, *content: object) -> Markup:
    return Markup(f"<{tag}>{''.join(map(escaped, content))}</{tag.partition(' ')[0]}>")


def bold(text: object) -> Markup:
    return element("b", text)


def listing(texts: Iterable[object]) -> Markup:
    """Return a list with a point for each text, nothing for none."""
    items = [element("li", text) for text in texts]
    return element('ul style="margin:0.2em 0"', *items) if items else Markup()


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], right: Collection[int] = ()
) -> Markup:
    """Return a table; the columns in ``right`` are aligned to the right."""
    styles = [_RIGHT if column in right else _LEFT for column in range(len(head))]

    def row(tag: str, cells: Sequence[object]) -> Markup:
        pairs = zip(styles, cells, strict=True)
        return element("tr", *(element(f'{tag} style="{style}"', cell) for style, cell in pairs))

    return element(
        'table style="border-collapse:collapse;margin:0.4em 0"',
        element("thead", row("th", head)),
        element("tbody", *(row("td", cells) for cells in rows)),
    )


def folded(summary: object, *content: object) -> Markup:
    """Return what shows only its summary until somebody opens it."""
    return element("details", element("summary", summary), *content)


def page(*parts: object) -> Markup:
    """Return all parts that are not empty as one block."""
    return element("div", *(part for part in parts if part))
