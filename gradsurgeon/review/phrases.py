"""What a difference says in words, the same in a terminal and in a pull request.

A phrase is a sequence of pieces: plain words of ours, and `Code` that holds what users wrote. A
renderer escapes the latter for where it goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from gradsurgeon.actions import written
from gradsurgeon.planning.table import NOUNS, count, fold_names
from gradsurgeon.review.diff_warnings import DiffWarning
from gradsurgeon.review.difference import Difference, RuleChange
from gradsurgeon.review.matched_rules import ChainChange
from gradsurgeon.review.option_changes import OptionChange

_MAX_NAMES = 6
_MAX_UNCHANGED = 10
_MAX_OVERLAPS = 10  # pairs of rules that newly change the same tensors
_MAX_CHAIN = 40  # rules of one chain
_QUOTED = ("params", "modules", "tensors", "exclude", "model", "where.module_type")


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of text that a user wrote: an id, a pattern, a name, a value."""

    text: str


Phrase = tuple[str | Code, ...]
Ids = tuple[str, ...]


def short(number: int) -> str:
    """Return a number of elements in short: ``70.5 M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def from_to(before: str, after: str, arrow: str) -> str:
    """Return ``48 -> 24``, or just ``48`` if nothing changed."""
    return before if before == after else f"{before} {arrow} {after}"


def summary(difference: Difference, arrow: str = "->") -> str:
    if not difference.in_effect:
        return "no difference in effect"
    rewritten = sum(change.renamed for change in difference.changed)
    changed = f"{len(difference.changed)} changed"
    parts = [
        f"{len(difference.added)} added" if difference.added else "",
        f"{len(difference.removed)} removed" if difference.removed else "",
        changed + (f" ({rewritten} of them renamed)" if rewritten else "")
        if difference.changed
        else "",
        f"{len(difference.renamed)} only renamed" if difference.renamed else "",
        "other order" if difference.order_changed else "",
    ]
    rules = ", ".join(filter(None, parts)) or "other chains"
    before, after = (f"{number:,}" for number in difference.covered)
    covered = f"{from_to(before, after, arrow)} of {len(difference.manifest.params):,}"
    lost = f"{len(difference.lost):,} lost all protection" if difference.lost else ""
    return "; ".join(filter(None, (rules, f"{covered} parameters under rules", lost)))


def names(names: Sequence[str]) -> Phrase:
    """Return names with their numbers folded; the first few of many."""
    return _names(tuple(names))


@lru_cache(maxsize=64)  # many warnings are about the same names
def _names(names: tuple[str, ...]) -> Phrase:
    folded = list(fold_names(names).items())
    pieces: list[str | Code] = []
    for text, members in folded[:_MAX_NAMES]:
        pieces += [", "] if pieces else []
        pieces += [Code(text), f" x{len(members)}"] if len(members) > 1 else [Code(text)]
    if (more := len(folded) - _MAX_NAMES) > 0:
        pieces.append(f" and {count(more, 'other')}")
    return tuple(pieces)


def chain(ids: Sequence[str], arrow: str) -> Phrase:
    """Return the rules of a chain, in order of effect."""
    pieces = _joined(ids[:_MAX_CHAIN], f" {arrow} ")
    if (more := len(ids) - _MAX_CHAIN) > 0:
        pieces.append(f" {arrow} {more} more")
    return tuple(pieces) or ("no rule",)


def unchanged(ids: Sequence[str]) -> Phrase:
    pieces = _joined(ids[:_MAX_UNCHANGED], ", ")
    if (more := len(ids) - _MAX_UNCHANGED) > 0:
        pieces.append(f" and {count(more, 'other')}")
    return tuple(pieces)


def _joined(ids: Sequence[str], separator: str) -> list[str | Code]:
    pieces: list[str | Code] = []
    for rule in ids:
        pieces += [separator, Code(rule)] if pieces else [Code(rule)]
    return pieces


def warnings(difference: Difference, arrow: str) -> Iterator[Phrase]:
    """Yield the warnings. Of many pairs of rules that overlap, only the first are written out."""
    overlaps = [warning for warning in difference.warnings if warning.kind == "overlap"]
    left_out = {warning.rules for warning in overlaps[_MAX_OVERLAPS:]}
    over = any(warning.kind == "more-overlaps" for warning in difference.warnings)
    for warning in difference.warnings:
        is_left_out = warning.kind == "overlap" and warning.rules in left_out
        if warning.kind != "more-overlaps" and not is_left_out:
            yield _warning(warning, difference, arrow)
    if more := overlaps[_MAX_OVERLAPS:]:
        number = f"{'Over ' * over}{count(len(more), 'other pair')}"
        start = f"{number} of rules now change tensors together, such as "
        first, second = more[0].rules
        end = f": `--format json` has {'the first' if over else 'all'}."
        yield (start, Code(first), " and ", Code(second), end)


def _warning(warning: DiffWarning, difference: Difference, arrow: str) -> Phrase:
    rules = [Code(rule) for rule in warning.rules]
    if warning.kind == "lost-protection":
        number = count(len(warning.names), "parameter")
        what = f"{number} lost all protection: no rule edits, freezes or traps the gradient now"
        return (f"{what}: ", *names(warning.names), ".")
    if warning.kind == "no-match":
        start = "matches nothing in this model: training with these rules ends with an error"
        return (rules[0], f" {start} before its first step. ", Code(warning.detail))
    if warning.kind == "expect":
        start = "breaks its own `expect`, so training with these rules ends with an error"
        return (rules[0], f" {warning.detail} parameters: it {start} before its first step.")
    if warning.kind == "cannot-act":
        start = "cannot act on this model: training with these rules ends with an error"
        return (rules[0], f" {start} before its first step. ", Code(warning.detail))
    if warning.kind == "overlap":
        first, second = warning.detail.split(", then ")
        target = next(r.target for r in difference.new.rules if r.id == warning.rules[0])
        what = count(len(warning.names), NOUNS[target])
        shared = (rules[0], " and ", rules[1], f" now both change {what}: ", *names(warning.names))
        return (*shared, ". First ", rules[0], f" ({first}), then ", rules[1], f" ({second}).")
    return _other_order(warning, difference, arrow)


def _other_order(warning: DiffWarning, difference: Difference, arrow: str) -> Phrase:
    tensors = count(len(warning.names), "tensor")
    chains = (*difference.params, *difference.tensors)
    example = next(chain for chain in chains if chain.name == warning.names[0])
    return (
        f"the order of effects changed for {tensors}: ",
        *(*names(warning.names), ". Such as "),
        *(*chain(example.before, arrow), " before, "),
        *(*chain(example.after, arrow), " now."),
    )


def order(difference: Difference, arrow: str) -> Phrase:
    """Return how the order in the file changed, from the first rule that moved to the last."""
    before, after = difference.order_before, difference.order_after
    start = len(list(takewhile(lambda both: both[0] == both[1], zip(before, after, strict=True))))
    tails = zip(reversed(before), reversed(after), strict=True)
    end = len(before) - len(list(takewhile(lambda both: both[0] == both[1], tails)))
    old, new = chain(before[start:end], arrow), chain(after[start:end], arrow)
    seen = any(warning.kind == "order" for warning in difference.warnings)
    effect = "" if seen else "; no tensor sees another order"
    return ("order in the file: ", *old, " became ", *new, effect)


def binds(change: RuleChange, arrow: str) -> tuple[str, str]:
    """Return how many things, and how many elements, a rule matches before and after."""
    things = from_to(f"{len(change.before):,}", f"{len(change.after):,}", arrow)
    if change.target != "params":
        return f"{things} {NOUNS[change.target]}s", ""
    return things, from_to(short(change.elements_before), short(change.elements_after), arrow)


def option(change: OptionChange, arrow: str) -> Phrase:
    """Return an option that differs, with the meaning of the change."""
    absent = "always" if change.name in {"steps", "optional"} else "not given"
    texts = (_spelled(change.name, value) for value in (change.before, change.after))
    before, after = (Code(text) if text else absent for text in texts)
    meaning = f"{change.direction}: {change.meaning}" if change.meaning else change.direction
    return (Code(change.name), ": ", before, f" {arrow} ", after, f" ({meaning})")


def options(changes: Sequence[OptionChange]) -> Iterator[Phrase]:
    """Yield the options of a rule that was added or removed."""
    for change in changes:
        value = change.after if change.before is None else change.before
        yield (Code(change.name), ": ", Code(_spelled(change.name, value)))


def _spelled(name: str, value: Any) -> str:
    """Return a value as a rule file spells it; empty for one that is not given."""
    if value is None:
        return ""
    if name in _QUOTED:
        texts = [value] if isinstance(value, str) else value
        quoted = [json.dumps(text, ensure_ascii=False) for text in texts]
        return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.items())}}}"
    return f"[{', '.join(value)}]" if isinstance(value, list) else written(value)


def grouped(chains: Sequence[ChainChange]) -> list[tuple[tuple[Ids, Ids], list[str]]]:
    """Return the names of tensors by the change of their chain."""
    groups: dict[tuple[Ids, Ids], list[str]] = {}
    for change in chains:
        groups.setdefault((change.before, change.after), []).append(change.name)
    return list(groups.items())
