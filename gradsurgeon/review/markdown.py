"""A difference as a comment on a pull request, in the Markdown of GitHub.

Nothing that a user wrote stands outside of code: there neither markup nor @mentions mean anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.review import phrases
from gradsurgeon.review.difference import Difference, RuleChange
from gradsurgeon.review.matched_rules import ChainChange
from gradsurgeon.review.phrases import Code, Phrase

LIMIT = 60_000  # characters; GitHub refuses a comment of more than 65,536
_WIDEST = 400  # characters of one piece of code
_ARROW = "→"
_CHAINS = "The rules of each tensor, in the order in which they take effect."
_LEGEND = (
    "`+` added, `-` removed, `~` changed, `=` unchanged. *Parameters* is how many of the model's "
    "parameters a rule acts on, *Elements* how many numbers those are. *Tightened*: the rule lets "
    "less through, or acts more often, than before; *loosened* is the opposite."
)


def render(difference: Difference, *, limit: int = LIMIT) -> str:
    """Return a difference as Markdown of at most ``limit`` characters, ending with a line feed."""
    return _within(_lines(difference), limit)


def marker(file: str) -> str:
    """Return a hidden line by which a program finds its comment on a file again."""
    shown = quote(file, safe="/._-:~", errors="backslashreplace").replace("--", "-%2D")
    return f"<!-- gradsurgeon:diff {shown} -->"


def code(text: str) -> str:
    """Return a user's text as code, safe inside and outside of a table."""
    shown = printable(text)
    shown = f"{shown[:_WIDEST]}…" if len(shown) > _WIDEST else shown
    # A bar ends a cell even in code, a backtick ends code, blanks at its ends are lost, a tag means
    # something to what looks for tags alone, and `##[` is a command in the log of a job.
    if shown.strip() == shown != "" and not set("`|<") & set(shown) and "##[" not in shown:
        return f"`{shown}`"
    inner = "".join(char if char.isalnum() else f"&#{ord(char)};" for char in shown)
    return f"<code>{inner}</code>"


def _rendered(phrase: Phrase) -> str:
    return "".join(code(piece.text) if isinstance(piece, Code) else piece for piece in phrase)


def _lines(difference: Difference) -> Iterator[str]:
    yield marker(difference.new.file)
    summary = phrases.summary(difference, _ARROW)
    yield f"**What the change of {code(difference.new.file)} does: {summary}.**"
    yield ""
    manifest = difference.manifest
    size = f"{len(manifest.params):,} parameters, {phrases.short(manifest.elements)} elements"
    yield f"Rules say what happens to gradients in training. Model: {code(manifest.origin)}, {size}."
    yield ""
    if difference.warnings:
        yield "> [!WARNING]"
        for phrase in phrases.warnings(difference, _ARROW):
            yield f"> - {_capital(_rendered(phrase))}"
        yield ""
    if difference.order_changed:
        yield f"Note: {_rendered(phrases.order(difference, _ARROW))}."
        yield ""
    for note in manifest.notes:
        yield f"Note: {code(note)}"
        yield ""
    if difference.in_effect:
        yield from _rules(difference)
        yield from _chains((*difference.params, *difference.tensors))


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _rules(difference: Difference) -> Iterator[str]:
    yield "| | Rule | Action | Parameters | Elements | What is different |"
    yield "|---|---|---|---:|---:|---|"
    for change in difference.added:
        yield _row("+", change, ["new", *map(_rendered, phrases.options(change.options))])
    for change in difference.removed:
        cells = [_rendered(phrase) for phrase in phrases.options(change.options)]
        yield _row("-", change, ["removed; it was", *cells])
    for change in (*difference.changed, *difference.renamed):
        was = [f"renamed from {code(change.old_id)}"] if change.renamed else []
        cells = [_rendered(phrases.option(option, _ARROW)) for option in change.options]
        yield _row("~", change, [*was, *cells])
    if same := difference.unchanged:
        yield f"| = | {_rendered(phrases.unchanged(same))} | | | | nothing |"
    yield ""
    yield _LEGEND
    yield ""


def _row(sign: str, change: RuleChange, cells: Sequence[str]) -> str:
    things, elements = phrases.binds(change, _ARROW)
    action, content = code(change.action), "<br>".join(cells)
    return f"| {sign} | {code(change.id)} | {action} | {things} | {elements} | {content} |"


def _chains(chains: tuple[ChainChange, ...]) -> Iterator[str]:
    if not chains:
        return
    yield "<details>"
    what = "tensor is" if len(chains) == 1 else "tensors are"
    yield f"<summary>{len(chains):,} {what} under other rules than before</summary>"
    yield ""
    yield _CHAINS
    yield ""
    yield "| Tensors | Before | Now |"
    yield "|---|---|---|"
    for (before, after), names in phrases.grouped(chains):
        sides = [_rendered(phrases.chain(side, _ARROW)) for side in (before, after)]
        yield f"| {_rendered(phrases.names(names))} | {sides[0]} | {sides[1]} |"
    yield ""
    yield "</details>"


def _within(lines: Iterator[str], limit: int) -> str:
    """Return as many whole lines as fit, close what they leave open, and say what is missing."""
    every = list(lines)
    if sum(len(line) + 1 for line in every) <= limit:
        return "\n".join(every).rstrip("\n") + "\n"
    closing = ["", "</details>"]
    room = limit - sum(len(line) + 1 for line in (*closing, "", _cut(every)))
    at = 0
    while at < len(every) and (room := room - len(every[at]) - 1) >= 0:
        at += 1
    kept, left = every[:at], every[at:]
    while kept and not _is_content(kept[-1]):  # a heading of nothing
        kept.pop()
    still_open = "<details>" in kept and "</details>" not in kept
    return "\n".join([*kept, *(closing if still_open else []), "", _cut(left)]) + "\n"


def _is_content(line: str) -> bool:
    return not line.startswith(("|---", "| |", "| Tensors ", "<", "> [!", _CHAINS)) and line != ""


def _cut(left: Sequence[str]) -> str:
    """Return the note at the end of a comment that says which lines were left out."""
    body = [line for line in left if line.startswith(("> - ", "| ")) and _is_content(line)]
    warnings = sum(line.startswith("> ") for line in body)
    rules = sum(line.startswith(("| + |", "| - |", "| ~ |")) for line in body)
    groups = sum(line.startswith(("| `", "| <")) for line in body)
    counts = ((warnings, "warning"), (rules, "rule"), (groups, "group"))
    parts = [count(number, noun) for number, noun in counts if number]
    if groups:
        parts[-1] += " of tensors"
    what = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return (
        f"*Cut here, because a comment on GitHub has an end: {what or 'the legend'} left out. "
        "`gradsurgeon diff` in a terminal shows every rule, `--format json` has all.*"
    )
