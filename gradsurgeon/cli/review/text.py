"""A difference in words: as text for the terminal, and as the same text in a comment on a pull request."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from gradsurgeon.actions import written
from gradsurgeon.cli.review.difference import Difference, Ids, OptionChange, RuleChange
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import NOUNS, abridged, count

_CHAINS = 20
_ENDS = "training with these rules ends with an error before its first step"


def render(difference: Difference) -> str:
    return "\n".join(_lines(difference))


def markdown(difference: Difference) -> str:
    """Return a difference as Markdown, in a fence that no text of a user can close."""
    text = render(difference)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    # A line that begins with `!` is coloured, too.
    text = re.sub("^(?:~ |(?=warning:))", "! ", text, flags=re.MULTILINE)
    return f"**Effect of the change: {_summary(difference)}.**\n\n{fence}diff\n{text}\n{fence}\n"


def _lines(difference: Difference) -> Iterator[str]:
    manifest = difference.manifest
    size = f"{count(len(manifest.params), 'parameter')}, {manifest.elements:,} elements"
    files = f"{_shown(difference.old.file)} -> {_shown(difference.new.file)}"
    yield f"diff: {files} on {_shown(manifest.origin)}: {size}"
    yield _summary(difference)
    if difference.obstacles or difference.lost or difference.untrapped:
        yield ""
    for rule, obstacle in difference.obstacles:
        yield f"warning: {_shown(rule)}: {_ENDS}. {_shown(obstacle.text)}"
    if difference.lost:
        lost = count(len(difference.lost), "parameter")
        yield (
            f"warning: {lost} lost all protection: no rule edits, freezes or traps "
            f"the gradient now: {_names(difference.lost)}."
        )
    if difference.untrapped:
        untrapped = count(len(difference.untrapped), "parameter")
        yield (
            f"warning: no trap stops or skips a step of {untrapped} any more: {_names(difference.untrapped)}. "
            "A non-finite gradient or a spike reaches the weights."
        )
    if difference.order_changed:
        yield "note: the rules are in another order in the file"
    for note in manifest.notes:
        yield f"note: {_shown(note)}"
    if difference.in_effect:
        yield ""
        yield from _rules(difference)
        yield from _chains(difference)


def _summary(difference: Difference) -> str:
    if not difference.in_effect:
        return "no difference in effect"
    rules = f"{len(difference.added)} added, {len(difference.removed)} removed, {len(difference.changed)} changed"
    covered = f"{_from_to(*difference.covered)} of {len(difference.manifest.params):,}"
    summary = f"{rules}; {covered} parameters under rules"
    if difference.lost:
        summary += f"; {len(difference.lost):,} lost all protection"
    return summary


def _rules(difference: Difference) -> Iterator[str]:
    by_sign = {"+": difference.added, "-": difference.removed, "~": difference.changed}
    for sign, changes in by_sign.items():
        for change in changes:
            yield f"{sign} {change.id}  {change.action} on {_binds(change)}"
            for option in change.options:
                yield f"      {option.name}: {_values(option, sign)}"


def _binds(change: RuleChange) -> str:
    before = change.before
    after = change.after
    text = f"{_from_to(len(before.names), len(after.names))} {NOUNS[change.target]}s"
    if change.target == "params":
        text += f" ({_from_to(before.elements, after.elements)} elements)"
    return text


def _values(option: OptionChange, sign: str) -> str:
    before = _value(option.name, option.before)
    after = _value(option.name, option.after)
    if sign == "+":
        return after
    if sign == "-":
        return before
    return f"{before} -> {after}"


def _value(option: str, value: Any) -> str:
    if value is None:
        return "always" if option in {"steps", "optional"} else "not given"
    if isinstance(value, list) and len(value) == 1:
        # A list of one pattern is a pattern.
        value = value[0]
    return _shown(written(value))


def _chains(difference: Difference) -> Iterator[str]:
    groups: dict[tuple[Ids, Ids], list[str]] = {}
    changes = (*difference.params, *difference.tensors)
    for change in changes:
        groups.setdefault((change.before, change.after), []).append(change.name)
    if not groups:
        return
    yield ""
    yield f"tensors under other rules than before, in order of effect: {len(changes):,}"
    for (before, after), names in list(groups.items())[:_CHAINS]:
        yield f"  {_names(names)}"
        yield f"      before: {_chain(before)}"
        yield f"      now:    {_chain(after)}"
    if len(groups) > _CHAINS:
        yield f"  and {len(groups) - _CHAINS} other pairs of chains: `--format json` has all"


def _names(names: Sequence[str]) -> str:
    return _shown(abridged(names, {}))


def _chain(ids: Sequence[str]) -> str:
    return " -> ".join(ids) or "no rule"


def _from_to(before: int, after: int) -> str:
    if before == after:
        return f"{before:,}"
    return f"{before:,} -> {after:,}"


def _shown(text: str) -> str:
    """Return a user's text without the commands that GitHub reads in logs: `##[`, and `::` at the start of a line."""
    shown = printable(text).replace("##[", "#\\x23[")
    # GitHub ignores blanks before the command.
    if shown.lstrip().startswith("::"):
        shown = shown.replace("::", "\\x3a:", 1)
    return shown
