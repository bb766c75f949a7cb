"""What checks ask about the rules of a file: what each selects, which of two acts first, how they meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import gcd

from gradsurgeon.actions import MOMENTS, Rule, Steps
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning import ROOT, Manifest
from gradsurgeon.planning.matching import NameIndex
from gradsurgeon.review.effects import Effects, Matcher
from gradsurgeon.review.globs import Prover
from gradsurgeon.schema import Inspection, RuleSet

# Rules are compared two by two, pattern by pattern: a file may hold thousands.
MAX_COMPARED = 400


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is asked of a rule once per other rule."""

    tensor: tuple[str, str]
    when: tuple[int, int]  # moment, then position in the file
    patterns: tuple[str, ...]
    where: dict[str, object]


class Case:
    """The rules of a file and its includes, with the names of a model where those are known.

    Attributes:
        rules: in file order.
        compared: those of them that are compared with each other, all but in a huge file.
    """

    def __init__(
        self, rules: RuleSet, inspected: Inspection, manifest: Manifest | None = None
    ) -> None:
        self.rules = rules.rules
        self._whole = rules
        self._inspected, self._manifest = inspected, manifest
        self._prover = Prover()
        self._facts = {
            rule.id: _Facts(
                (rule.target, str(rule.ref)),
                (MOMENTS.index(rule.point), index),
                tuple(getattr(rule, rule.target)),
                rule.where.model_dump(exclude_none=True),
            )
            for index, rule in enumerate(self.rules)
        }
        self._overlaps: dict[tuple[str, str], bool] = {}
        self._selected: dict[str, frozenset[str] | None] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        self._within: dict[tuple[frozenset[str], frozenset[str]], bool] = {}
        total = 0
        small = []
        for rule in self.rules:
            total += len(getattr(rule, rule.target)) + len(rule.exclude)
            small.append(total <= MAX_COMPARED)
        self.compared = self.rules[: len(list(takewhile(bool, small)))]

    def pairs(self) -> Iterator[tuple[Rule, list[Rule]]]:
        """Yield each rule with those before it in the file, the nearest last."""
        for index, rule in enumerate(self.compared):
            yield rule, list(self.compared[:index])

    def written(self, rule: Rule, *keys: str) -> str:
        """Return the first of the keys that stands in the file; the last where none does."""
        options = self._inspected.options(rule.id)
        return next((key for key in keys if key in options), keys[-1])

    def numbers(self, rule: Rule) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield path and text of every number of a rule that is not a whole one."""
        queue: list[tuple[tuple[str | int, ...], object]] = [((), self._inspected.options(rule.id))]
        for path, value in queue:
            if isinstance(value, dict):
                queue += [((*path, key), one) for key, one in value.items()]
            elif isinstance(value, list):
                queue += [((*path, index), one) for index, one in enumerate(value)]
            elif isinstance(value, float):
                place = self._inspected.place(rule.id, *path)
                yield path, place.line_text[place.col - 1 :][: place.width]

    # -- names --------------------------------------------------------------------------------

    @cached_property
    def effects(self) -> Effects | None:
        """Return what the rules do to the model; ``None`` where names are not known."""
        return None if self._manifest is None else Effects(self._whole, Matcher(self._manifest))

    @cached_property
    def _names(self) -> dict[str, NameIndex]:
        if self._manifest is None:
            return {}
        return {
            "params": NameIndex("parameter", self._manifest.params),
            "modules": NameIndex("module", self._manifest.modules),
        }

    def hits(self, rule: Rule, text: str) -> list[str] | None:
        """Return the names that a pattern of a rule matches; ``None`` where names are not known."""
        known = self._names.get(rule.target)
        return None if known is None else list(known.hits(compile_pattern(text)))

    def owners(self, rule: Rule, text: str) -> set[str]:
        """Return the first names of what a pattern matches by any name, where names are known."""
        known = self._names.get(rule.target)
        hits = known.hits(compile_pattern(text)).values() if known else ()
        return {one.name for one in hits}

    def selected(self, rule: Rule) -> frozenset[str] | None:
        """Return the names that a rule selects; ``None`` where names are not known."""
        if rule.id not in self._selected:
            known = self._names.get(rule.target)
            names = None
            if known is not None:
                there = self._is_for_this_model(rule)
                names = (
                    frozenset(one.name for one in known.match(rule)[0]) if there else frozenset()
                )
            # Rules that select the same share one set, so that two sets are compared once.
            self._selected[rule.id] = names and self._sets.setdefault(names, names)
        return self._selected[rule.id]

    def _is_for_this_model(self, rule: Rule) -> bool:
        if rule.model is None or self._manifest is None:
            return True
        pattern = compile_pattern(rule.model)
        return any(map(pattern.matches, self._manifest.model_type or (self._manifest.origin,)))

    def apart(self, rule: Rule, text: str) -> bool:
        """Tell whether it is certain that a pattern meets none of the patterns of a rule."""
        if len(rule.exclude) + len(self._facts[rule.id].patterns) > MAX_COMPARED:
            return False
        return all(self._prover.disjoint(one, text) for one in self._facts[rule.id].patterns)

    # -- two rules ----------------------------------------------------------------------------

    def acts_before(self, first: Rule, second: Rule) -> bool:
        """Tell whether a rule takes effect before another: by moment, then by file order."""
        return self._facts[first.id].when < self._facts[second.id].when

    def overlap(self, one: Rule, other: Rule) -> bool:
        """Tell whether it is certain that two rules meet on a tensor in some step.

        Without names it is certain where what a pattern of one matches is matched by the other.
        """
        if self._facts[one.id].tensor != self._facts[other.id].tensor:
            return False
        key = (one.id, other.id)
        if key not in self._overlaps:
            self._overlaps[key] = self._overlap(one, other)
        return self._overlaps[key]

    def _overlap(self, one: Rule, other: Rule) -> bool:
        names, others = self.selected(one), self.selected(other)
        if names is not None and others is not None:
            return not names.isdisjoint(others) and meet(one.steps, other.steps)
        found = self._takes_from(one, other) or self._takes_from(other, one)
        return found and meet(one.steps, other.steps)

    def _takes_from(self, wide: Rule, narrow: Rule) -> bool:
        texts = self._facts[narrow.id].patterns
        return any(self._takes(wide, narrow, text) for text in texts)

    def covers(self, wide: Rule, narrow: Rule) -> bool:
        """Tell whether it is certain that a rule acts on all that another acts on, whenever it does."""
        if self._facts[wide.id].tensor != self._facts[narrow.id].tensor:
            return False
        if wide.when not in (None, narrow.when) or not within(narrow.steps, wide.steps):
            return False
        names, wider = self.selected(narrow), self.selected(wide)
        if names is not None and wider is not None:
            key = (names, wider)
            if key not in self._within:
                self._within[key] = bool(names) and names <= wider
            return self._within[key]
        texts = self._facts[narrow.id].patterns
        return all(self._takes(wide, narrow, text) for text in texts)

    def _takes(self, wide: Rule, narrow: Rule, text: str) -> bool:
        """Tell whether ``wide`` selects all that ``narrow`` selects by one of its patterns."""
        facts, own = self._facts[wide.id], self._facts[narrow.id]
        if not any(self._contains(wide, one, text) for one in facts.patterns):
            return False
        # The conditions of the one hold wherever those of the other do.
        if not facts.where.items() <= own.where.items() or wide.model not in (None, narrow.model):
            return False
        return all(
            any(self._contains(narrow, left, out) for left in narrow.exclude)
            or self._prover.disjoint(out, text)
            for out in wide.exclude
        )

    def _contains(self, rule: Rule, wide: str, narrow: str) -> bool:
        # The root has a name that no pattern but itself matches.
        if rule.target == "modules" and ROOT in (wide, narrow):
            return wide == narrow
        return self._prover.contains(wide, narrow)


def within(inner: Steps, outer: Steps) -> bool:
    """Tell whether all steps of one schedule are steps of another."""
    ends = outer.to is None or (inner.to is not None and inner.to <= outer.to)
    offset = inner.from_ - outer.from_
    in_time = inner.every % outer.every == 0 and offset % outer.every == 0
    return ends and offset >= 0 and in_time


def meet(one: Steps, other: Steps) -> bool:
    """Tell whether two schedules share a step."""
    first, second = sorted((one, other), key=lambda steps: steps.from_)
    common = gcd(first.every, second.every)
    gap = second.from_ - first.from_
    if gap % common:
        return False
    # The smallest number of periods of the later one after which the earlier one is due, too.
    period = first.every // common
    turns = (-gap // common) * pow(second.every // common, -1, period) % period
    step = second.from_ + turns * second.every
    return all(steps.to is None or step < steps.to for steps in (one, other))


def listed(ids: Sequence[str]) -> str:
    """Return ids for a message: the first few, and how many more."""
    shown = [f"`{one[:60]}`" for one in ids[:3]]
    if len(ids) > len(shown):
        shown.append(f"{len(ids) - len(shown)} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
