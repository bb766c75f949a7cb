"""HTML for notebooks: text as it is, in the colours of the page, be it light or dark."""

from html import escape

from gradsurgeon.errors import printable


def pre(text: str) -> str:
    """Return HTML that shows a text unchanged: every line is escaped, whoever wrote it."""
    lines = (escape(printable(line)) for line in text.split("\n"))
    # The lab template of nbconvert shows `pre` in a proportional font.
    return f'<pre style="font-family: monospace">{"<br>".join(lines)}</pre>'
