"""A difference as a comment on a pull request, in GitHub's Markdown.

All text of users is in code spans, in which neither markup nor @mentions have a meaning.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from urllib.parse import quote

from gradsurgeon.errors import printable
from gradsurgeon.review.difference import Difference
from gradsurgeon.review.text import Phrases, short

LIMIT = 60_000  # characters; GitHub refuses a comment of more than 65,536
_WIDEST = 400  # characters of one piece of code
_LEADS = {"+": "new", "-": "removed; it was", "~": ""}
_LEGEND = (
    "`+` added, `-` removed, `~` changed, `=` unchanged. *Parameters* is the number of parameters that a "
    "rule acts on, *Elements* the number of their elements."
)
_CUT = (
    "*Cut here, because GitHub limits the length of a comment: {} lines are left out. "
    "`gradsurgeon diff` in a terminal shows every rule, `--format json` has all.*"
)


def render(difference: Difference, *, limit: int = LIMIT) -> str:
    """Return a difference as Markdown of at most ``limit`` characters, ending with a line feed."""
    lines = list(_lines(difference))
    sizes = list(accumulate(len(line) + 1 for line in lines))
    if sizes[-1] <= limit:
        return "\n".join(lines).rstrip("\n") + "\n"
    # Keep as many whole lines as fit, then close the element that they leave open.
    closing = ["", "</details>"]
    room = limit - sum(len(line) + 1 for line in (*closing, "", _CUT.format(len(lines))))
    kept = lines[: bisect_right(sizes, room)]
    still_open = "<details>" in kept and "</details>" not in kept
    end = [*(closing if still_open else []), "", _CUT.format(len(lines) - len(kept))]
    return "\n".join([*kept, *end]) + "\n"


def marker(file: str) -> str:
    """Return a hidden line by which a program finds its own comment on a file."""
    shown = quote(file, safe="/._-:~", errors="backslashreplace").replace("--", "-%2D")
    return f"<!-- gradsurgeon:diff {shown} -->"


def code(text: str) -> str:
    """Return a user's text as code, safe inside and outside of a table."""
    shown = printable(text)
    shown = f"{shown[:_WIDEST]}…" if len(shown) > _WIDEST else shown
    # A bar ends a cell even in code, a backtick ends code, and outer blanks are lost. Some readers look for
    # tags everywhere, and in the log of a job `##[` is a command.
    if shown.strip() == shown != "" and not set("`|<") & set(shown) and "##[" not in shown:
        return f"`{shown}`"
    inner = "".join(char if char.isalnum() else f"&#{ord(char)};" for char in shown)
    return f"<code>{inner}</code>"


def _lines(difference: Difference) -> Iterator[str]:
    phrases = Phrases(difference, code, "→")
    yield marker(difference.new.file)
    yield f"**Effect of the change of {code(difference.new.file)}: {phrases.summary()}.**"
    yield ""
    manifest = difference.manifest
    size = f"{len(manifest.params):,} parameters, {short(manifest.elements)} elements"
    yield f"Rules act on gradients in training. Model: {code(manifest.origin)}, {size}."
    yield ""
    if difference.warnings:
        yield "> [!WARNING]"
        yield from (f"> - {text[:1].upper()}{text[1:]}" for text in phrases.warnings())
        yield ""
    if difference.order_changed:
        yield from (f"Note: {phrases.order()}.", "")
    for note in manifest.notes:
        yield from (f"Note: {code(note)}", "")
    if difference.in_effect:
        yield from _rules(phrases)
        yield from _chains(phrases)


def _rules(phrases: Phrases) -> Iterator[str]:
    yield "| | Rule | Action | Parameters | Elements | What is different |"
    yield "|---|---|---|---:|---:|---|"
    for sign, change, details in phrases.changes():
        things, elements = phrases.binds(change)
        content = "<br>".join(filter(None, [_LEADS[sign], *details]))
        cells = (sign, code(change.id), code(change.action), things, elements, content)
        yield f"| {' | '.join(cells)} |"
    if phrases.difference.unchanged:
        yield f"| = | {phrases.unchanged()} | | | | nothing |"
    yield from ("", _LEGEND, "")


def _chains(phrases: Phrases) -> Iterator[str]:
    groups = phrases.chains()
    if not groups:
        return
    number = sum(len(names) for _, names in groups)
    what = "tensor is" if number == 1 else "tensors are"
    yield "<details>"
    yield f"<summary>{number:,} {what} under other rules than before</summary>"
    yield from ("", "The rules of each tensor, in order of effect.", "")
    yield from ("| Tensors | Before | Now |", "|---|---|---|")
    for (before, after), names in groups:
        yield f"| {phrases.names(names)} | {phrases.chain(before)} | {phrases.chain(after)} |"
    yield from ("", "</details>")
