"""A difference in words: as text for the terminal, and as the same text in a comment on a pull request."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from gradsurgeon.actions import written
from gradsurgeon.cli.review.difference import SIGNS, Difference, RuleChange
from gradsurgeon.common._grouping import grouped, names_of
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import NOUNS, abridged, count
from gradsurgeon.language.schema import RuleSet

_CHAINS = 20
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?")
_ENDS = "training with these rules ends with an error before its first step"


def render(difference: Difference) -> str:
    """Return a difference as text."""
    return "\n".join(_lines(difference))


def markdown(difference: Difference) -> str:
    """Return the same as Markdown, in a fence that no text of a user can close."""
    text = render(difference)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    # A line that begins with `!` is coloured, too.
    text = re.sub("^(?:~ |(?=warning:|order:))", "! ", text, flags=re.MULTILINE)
    return f"**Effect of the change: {_summary(difference)}.**\n\n{fence}diff\n{text}\n{fence}\n"


def _lines(difference: Difference) -> Iterator[str]:
    manifest = difference.manifest
    size = f"{count(len(manifest.params), 'parameter')}, {manifest.elements:,} elements"
    files = f"{_shown(difference.old.file)} -> {_shown(difference.new.file)}"
    yield f"diff: {files} on {_shown(manifest.origin)}: {size}"
    yield _summary(difference)
    warnings = list(_warnings(difference))
    if warnings:
        yield ""
        yield from warnings
    for order in difference.orders:
        yield order.text
        for rule in order[:2]:
            for line in _on_run(difference, rule):
                yield f"      {_shown(rule)} {line}"
    for note in manifest.notes:
        yield f"note: {_shown(note)}"
    if difference.rules:
        yield ""
    for change in difference.rules:
        yield from _rule(difference, change)
    yield from _chains(difference)


def _on_run(difference: Difference, rule: str) -> Iterator[str]:
    """Yield what the change of a rule would have done in a run, if one was named."""
    sides = difference.on(rule)
    if any(sides):
        from gradsurgeon.report.evidence import words  # noqa: PLC0415 # imported with numpy

        yield _shown(words.change(*sides))


def _warnings(difference: Difference) -> Iterator[str]:
    for rule, obstacle in difference.obstacles:
        yield f"warning: {_shown(rule)}: {_ENDS}. {_shown(obstacle.text)}"
    if difference.lost:
        yield (
            f"warning: {count(len(difference.lost), 'parameter')} lost all protection: no rule edits, freezes or traps "
            f"the gradient now: {_names(difference.lost)}."
        )
    if difference.untrapped:
        untrapped = count(len(difference.untrapped), "parameter")
        yield (
            f"warning: no trap stops or skips a step of {untrapped} any more: {_names(difference.untrapped)}. "
            "A non-finite gradient or a spike reaches the weights."
        )
    for change, names in difference.disarmed:
        # A trap may also match fewer parameters, or stop no step any more.
        schedule = "changed"
        for effect in change.effects:
            if effect.field == "steps":
                schedule = effect.text
        yield (
            f"warning: {_shown(change.id)} {schedule}, and no other trap fills the gap for {count(len(names), 'parameter')}: "
            f"{_names(names)}. In the gap a non-finite gradient or a spike reaches the weights."
        )


def _summary(difference: Difference) -> str:
    if not difference.in_effect:
        return "no difference in effect"
    numbers = Counter(rule.sign for rule in difference.rules)
    rules = ", ".join(f"{numbers[sign]} {word}" for sign, word in SIGNS.items())
    total = count(len(difference.manifest.params), "parameter")
    before, after = difference.covered
    covered = f"{after:,}" if before == after else f"{before:,} -> {after:,}"
    summary = f"{rules}; {covered} of {total} under rules"
    if difference.orders:
        summary += "; order changed"
    if difference.lost:
        summary += f"; {len(difference.lost):,} lost all protection"
    return summary


def _rule(difference: Difference, change: RuleChange) -> Iterator[str]:
    target = change.rule.target
    before = change.before
    after = change.after
    binds = _counted(len(before.names), len(after.names), NOUNS[target])
    if target == "params":
        binds += f" ({_counted(before.elements, after.elements, 'element')})"
    yield f"{change.sign} {change.id}  {change.rule.action} on {binds}"
    for effect in change.effects:
        if effect.kind == "renamed":
            yield f"      {_shown(effect.text)}"
    for name, old, new in change.options:
        texts = []
        if change.sign != "+":
            texts.append(_as_written(difference.old, change.old_id, name, old))
        if change.sign != "-":
            texts.append(_as_written(difference.new, change.id, name, new))
        line = f"      {name}: {' -> '.join(texts)}"
        for effect in change.effects:
            if effect.field == name and effect.kind != "other":
                line += f"  ({effect.text})"
        yield line
    for line in _on_run(difference, change.id):
        yield f"      {line}"


def _as_written(rules: RuleSet, rule: str, option: str, value: Any) -> str:
    """Return a number as the file has it, such as ``1e9``, and any other value as files have such values."""
    if isinstance(value, float):
        place = rules.place(rule, *option.split("."))
        number = _NUMBER.match(place.line_text, max(0, place.col - 1))
        if number is not None and float(number[0]) == value:
            return number[0]
    if value is None:
        return "always" if option == "steps" else "not given"
    if isinstance(value, list) and len(value) == 1:
        # A list of one pattern is a pattern.
        value = value[0]
    return _shown(written(value))


def _chains(difference: Difference) -> Iterator[str]:
    groups = grouped(difference.chains, attrgetter("before", "after"))
    if not groups:
        return
    yield ""
    number = len(difference.chains)
    yield f"tensors under other rules than before, in order of effect: {number:,}"
    for (before, after), changes in islice(groups.items(), _CHAINS):
        yield f"  {_names(names_of(changes))}"
        yield f"      before: {' -> '.join(before) or 'no rule'}"
        yield f"      now:    {' -> '.join(after) or 'no rule'}"
    if len(groups) > _CHAINS:
        yield f"  and {len(groups) - _CHAINS} other pairs of chains: `--format json` has all"


def _names(names: Sequence[str]) -> str:
    return _shown(abridged(names, {}))


def _counted(before: int, after: int, noun: str) -> str:
    text = count(after, noun)
    return text if before == after else f"{before:,} -> {text}"


def _shown(text: str) -> str:
    """Return a user's text without the commands that GitHub reads in logs: `##[`, and `::` at the start of a line."""
    shown = printable(text).replace("##[", "#\\x23[")
    # GitHub ignores blanks before the command.
    if shown.lstrip().startswith("::"):
        shown = shown.replace("::", "\\x3a:", 1)
    return shown
