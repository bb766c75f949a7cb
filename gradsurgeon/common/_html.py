"""HTML for notebooks: text as it is, in the colours of the page, be it light or dark."""

from html import escape

from gradsurgeon.errors import printable


def pre(text: str) -> str:
    """Return HTML that shows a text unchanged: every line is escaped, whoever wrote it."""
    lines = (escape(printable(line)) for line in text.split("\n"))
    return f"<pre>{'<br>'.join(lines)}</pre>"
