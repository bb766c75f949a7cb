"""A difference for the terminal."""

from collections.abc import Iterator

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.review.difference import Difference
from gradsurgeon.review.phrases import Phrases, short

_CHAINS = 20


def render(difference: Difference) -> str:
    return "\n".join(_lines(difference))


def _lines(difference: Difference) -> Iterator[str]:
    phrases = Phrases(difference, _shown, "->")
    manifest = difference.manifest
    size = f"{count(len(manifest.params), 'parameter')}, {short(manifest.elements)} elements"
    files = f"{_shown(difference.old.file)} -> {_shown(difference.new.file)}"
    yield f"diff: {files} on {_shown(manifest.origin)}: {size}"
    yield phrases.summary()
    if difference.warnings:
        yield ""
        for warning in phrases.warnings():
            yield f"warning: {warning}"
    if difference.order_changed:
        yield f"note: {phrases.order()}"
    for note in manifest.notes:
        yield f"note: {_shown(note)}"
    if difference.in_effect:
        yield ""
        yield from _rules(phrases)
        yield from _chains(phrases)


def _rules(phrases: Phrases) -> Iterator[str]:
    for sign, change, details in phrases.changes():
        things, elements = phrases.binds(change)
        plural = "s" * (things != "1")
        noun = f" parameter{plural} ({elements} elements)" if change.target == "params" else ""
        yield f"{sign} {change.id}  {change.action} on {things}{noun}"
        for detail in details:
            yield f"      {detail}"
    if phrases.difference.unchanged:
        yield f"= {phrases.unchanged()}"


def _chains(phrases: Phrases) -> Iterator[str]:
    groups = phrases.chains()
    if not groups:
        return
    yield ""
    number = sum(len(names) for _, names in groups)
    yield f"tensors under other rules than before, in order of effect: {number:,}"
    for (before, after), names in groups[:_CHAINS]:
        yield f"  {phrases.names(names)}"
        yield f"      before: {phrases.chain(before)}"
        yield f"      now:    {phrases.chain(after)}"
    if (more := len(groups) - _CHAINS) > 0:
        yield f"  and {count(more, 'other pair')} of chains: `--format json` has all"


def _shown(text: str) -> str:
    """Return a user's text without commands, for a terminal and for the log of a job.

    GitHub reads a line of a log that begins with `::` as a command, and `##[` anywhere in a line.
    """
    shown = printable(text).replace("##[", "#\\x23[")
    # GitHub ignores blanks before the command.
    return shown.replace("::", "\\x3a:", 1) if shown.lstrip().startswith("::") else shown
