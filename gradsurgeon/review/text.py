"""A difference for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.review import phrases
from gradsurgeon.review.difference import Difference, RuleChange
from gradsurgeon.review.matched_rules import ChainChange
from gradsurgeon.review.phrases import Code, Phrase

_ARROW = "->"
_CHAINS = 20


def render(difference: Difference) -> str:
    """Return a difference as text without a line feed at its end."""
    return "\n".join(_lines(difference))


def _lines(difference: Difference) -> Iterator[str]:
    manifest = difference.manifest
    model = (
        f"{_shown(manifest.origin)}: {count(len(manifest.params), 'parameter')}, "
        f"{phrases.short(manifest.elements)} elements"
    )
    files = f"{_shown(difference.old.file)} -> {_shown(difference.new.file)}"
    yield f"diff: {files} on {model}"
    yield phrases.summary(difference)
    if difference.warnings:
        yield ""
        for phrase in phrases.warnings(difference, _ARROW):
            yield f"warning: {_rendered(phrase)}"
    if difference.order_changed:
        yield f"note: {_rendered(phrases.order(difference, _ARROW))}"
    for note in manifest.notes:
        yield f"note: {_shown(note)}"
    if not difference.in_effect:
        return
    yield ""
    yield from _rules(difference)
    yield from _chains((*difference.params, *difference.tensors))


def _rules(difference: Difference) -> Iterator[str]:
    for sign, group in (
        ("+", difference.added),
        ("-", difference.removed),
        ("~", (*difference.changed, *difference.renamed)),
    ):
        for change in group:
            yield f"{sign} {_head(change)}"
            if change.renamed:
                yield f"      renamed from {change.old_id}"
            lines = phrases.options(change.options)
            if sign == "~":
                lines = (phrases.option(option, _ARROW) for option in change.options)
            for phrase in lines:
                yield f"      {_rendered(phrase)}"
    if difference.unchanged:
        yield f"= {_rendered(phrases.unchanged(difference.unchanged))}"


def _head(change: RuleChange) -> str:
    things, elements = phrases.binds(change, _ARROW)
    noun = f" parameters ({elements} elements)" if change.target == "params" else ""
    return f"{change.id}  {change.action} on {things}{noun}"


def _chains(chains: tuple[ChainChange, ...]) -> Iterator[str]:
    if not chains:
        return
    yield ""
    yield f"tensors under other rules than before, in order of effect: {len(chains):,}"
    groups = phrases.grouped(chains)
    for (before, after), names in groups[:_CHAINS]:
        yield f"  {_rendered(phrases.names(names))}"
        yield f"      before: {_rendered(phrases.chain(before, _ARROW))}"
        yield f"      now:    {_rendered(phrases.chain(after, _ARROW))}"
    if (more := len(groups) - _CHAINS) > 0:
        yield f"  and {count(more, 'other pair')} of chains: `--format json` has all"


def _rendered(phrase: Phrase) -> str:
    return "".join(_shown(piece.text) if isinstance(piece, Code) else piece for piece in phrase)


def _shown(text: str) -> str:
    """Return a user's text for a terminal, and for the log of a job, which may obey what it reads.

    To a job of GitHub a line that begins with `::` is a command, and so is `##[` anywhere in it.
    """
    shown = printable(text).replace("##[", "#\\x23[")
    return f"\\x3a{shown[1:]}" if shown.startswith("::") else shown
