"""What a difference says in words, the same in a terminal and in a pull request.

A text for people is a list of pieces: plain words of ours, and `Code` that holds what users wrote. A
renderer escapes the latter for where it goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from gradsurgeon._name_ranges import fold_names
from gradsurgeon.planning.table import NOUNS, count
from gradsurgeon.review.difference import Chain, Change, Difference
from gradsurgeon.review.fields import Field, spelled
from gradsurgeon.review.findings import Finding

_SHOWN = 6
_SAME = 10  # unchanged rules that are named
_PAIRS = 10  # of rules that newly change the same tensors
_CHAIN = 40  # rules of one chain


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of text that a user wrote: an id, a pattern, a name, a value."""

    text: str


Words = tuple[str | Code, ...]
Ids = tuple[str, ...]


def short(number: int) -> str:
    """Return a number of elements: ``70.5 M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def from_to(before: str, after: str, arrow: str) -> str:
    """Return ``48 -> 24``, or what did not change."""
    return before if before == after else f"{before} {arrow} {after}"


def summary(difference: Difference, arrow: str = "->") -> str:
    """Return the one line that says it all."""
    if not difference.in_effect:
        return "no difference in effect"
    rewritten = sum(one.renamed for one in difference.changed)
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
    covered = [f"{number:,}" for number in difference.covered]
    whole = f"{len(difference.manifest.params):,} parameters under rules"
    lost = f"{len(difference.lost):,} lost all protection" if difference.lost else ""
    rules = ", ".join(filter(None, parts)) or "other chains"
    return "; ".join(
        filter(None, (rules, f"{from_to(covered[0], covered[1], arrow)} of {whole}", lost))
    )


def names(some: Sequence[str]) -> Words:
    """Return names, folded; the first few of many."""
    return _folded(tuple(some))


@lru_cache(maxsize=64)  # many findings are about the same names
def _folded(some: tuple[str, ...]) -> Words:
    folded = list(fold_names(some).items())
    pieces: list[str | Code] = []
    for text, members in folded[:_SHOWN]:
        pieces += [", "] if pieces else []
        pieces += [Code(text), f" x{len(members)}"] if len(members) > 1 else [Code(text)]
    if (more := len(folded) - _SHOWN) > 0:
        pieces.append(f" and {count(more, 'other')}")
    return tuple(pieces)


def chain(ids: Sequence[str], arrow: str) -> Words:
    """Return rules in order of effect."""
    pieces: list[str | Code] = []
    for one in ids[:_CHAIN]:
        pieces += [f" {arrow} ", Code(one)] if pieces else [Code(one)]
    if (more := len(ids) - _CHAIN) > 0:
        pieces.append(f" {arrow} {more} more")
    return tuple(pieces) or ("no rule",)


def unchanged(ids: Sequence[str]) -> Words:
    """Return the rules that did not change: the first few of many."""
    pieces: list[str | Code] = []
    for one in ids[:_SAME]:
        pieces += [", ", Code(one)] if pieces else [Code(one)]
    if (more := len(ids) - _SAME) > 0:
        pieces.append(f" and {count(more, 'other')}")
    return tuple(pieces)


def warnings(difference: Difference, arrow: str) -> Iterator[Words]:
    """Yield the findings as sentences; of many pairs of rules that overlap the first, and how many."""
    pairs = [one for one in difference.findings if one.kind == "overlap"]
    left = {one.rules for one in pairs[_PAIRS:]}
    over = False
    for one in difference.findings:
        if one.kind == "more-overlaps":
            over = True
        elif one.kind != "overlap" or one.rules not in left:
            yield finding(one, difference, arrow)
    if more := pairs[_PAIRS:]:
        number = f"{'Over ' * over}{count(len(more), 'other pair')}"
        start = f"{number} of rules now change tensors together, such as "
        first, second = more[0].rules
        end = f": `--format json` has {'the first' if over else 'all'}."
        yield (start, Code(first), " and ", Code(second), end)


def finding(one: Finding, difference: Difference, arrow: str) -> Words:
    """Return what a reviewer must not miss, as a sentence."""
    rules = [Code(rule) for rule in one.rules]
    number = count(len(one.names), "parameter")
    if one.kind == "lost-protection":
        what = f"{number} lost all protection: no rule edits, freezes or traps the gradient now"
        return (f"{what}: ", *names(one.names), ".")
    if one.kind == "no-match":
        start = "matches nothing in this model: training with these rules ends with an error"
        return (rules[0], f" {start} before its first step. ", Code(one.detail))
    if one.kind == "expect":
        start = "breaks its own `expect`, so training with these rules ends with an error"
        return (rules[0], f" {one.detail} parameters: it {start} before its first step.")
    if one.kind == "cannot-act":
        start = "cannot act on this model: training with these rules ends with an error"
        return (rules[0], f" {start} before its first step. ", Code(one.detail))
    if one.kind == "overlap":
        first, second = one.detail.split(", then ")
        kinds = {rule.id: rule.target for rule in difference.new.rules}
        what = count(len(one.names), NOUNS[kinds[one.rules[0]]])
        shared = (rules[0], " and ", rules[1], f" now both change {what}: ", *names(one.names))
        return (*shared, ". First ", rules[0], f" ({first}), then ", rules[1], f" ({second}).")
    return _order(one, difference, arrow)


def _order(one: Finding, difference: Difference, arrow: str) -> Words:
    tensors = count(len(one.names), "tensor")
    start = f"the order of effects changed for {tensors}: "
    name = one.names[0]
    example = next(c for c in (*difference.params, *difference.tensors) if c.name == name)
    return (
        *(start, *names(one.names), ". Such as "),
        *chain(example.before, arrow),
        " before, ",
        *chain(example.after, arrow),
        " now.",
    )


def order(difference: Difference, arrow: str) -> Words:
    """Return how the order in the file changed: the stretch that differs."""
    before, after = difference.order_before, difference.order_after
    start = len(list(takewhile(lambda both: both[0] == both[1], zip(before, after, strict=True))))
    tails = zip(reversed(before), reversed(after), strict=True)
    end = len(before) - len(list(takewhile(lambda both: both[0] == both[1], tails)))
    was, now = chain(before[start:end], arrow), chain(after[start:end], arrow)
    seen = any(one.kind == "order" for one in difference.findings)
    effect = "" if seen else "; no tensor sees another order"
    return ("order in the file: ", *was, " became ", *now, effect)


def binds(change: Change, arrow: str) -> tuple[str, str]:
    """Return how much a rule matches before and after: number of things, and of elements."""
    noun = "" if change.target == "params" else f" {NOUNS[change.target]}s"
    sides = [f"{len(side):,}" for side in (change.before, change.after)]
    elements = [short(side) for side in (change.elements_before, change.elements_after)]
    if change.target != "params":
        return f"{from_to(sides[0], sides[1], arrow)}{noun}", ""
    return from_to(sides[0], sides[1], arrow), from_to(elements[0], elements[1], arrow)


def option(field: Field, arrow: str) -> Words:
    """Return one option that differs, with what that means."""
    before, after = (spelled(field.name, value) for value in (field.before, field.after))
    gone, absent = "not given", field.name in {"steps", "optional"}
    sides = [Code(text) if text else (gone if not absent else "always") for text in (before, after)]
    meaning = f"{field.word}: {field.why}" if field.why else field.word
    return (Code(field.name), ": ", sides[0], f" {arrow} ", sides[1], f" ({meaning})")


def options(fields: Sequence[Field]) -> Iterator[Words]:
    """Yield the options of a rule that has no counterpart."""
    for field in fields:
        value = field.after if field.before is None else field.before
        yield (Code(field.name), ": ", Code(spelled(field.name, value)))


def grouped(chains: Sequence[Chain]) -> list[tuple[tuple[Ids, Ids], list[str]]]:
    """Return the tensors that went from one chain to another, for each such pair."""
    groups: dict[tuple[Ids, Ids], list[str]] = {}
    for one in chains:
        groups.setdefault((one.before, one.after), []).append(one.name)
    return list(groups.items())
