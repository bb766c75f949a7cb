"""Patterns and conditions of rules -> the parameters or modules that they select."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from gradsurgeon.actions import Rule, Where, in_order
from gradsurgeon.common.match import compile_pattern, segments, select, suggest, without_zeros
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.language.planning.manifest import ROOT, Manifest, ModuleEntry, Param

Thing = Param | ModuleEntry
_MAX_DOUBTS = 20  # on one rule
_MAX_HINTED = 3  # patterns of a rule that get a hint
_MAX_COMPARED = 100_000  # names that are compared for all hints


class NameIndex:
    """The names of the parameters or modules of a model, with the things that have them."""

    def __init__(
        self,
        noun: str,
        things: Sequence[Thing],
        subject: str = "the model",
        owners: frozenset[str] = frozenset(),
    ) -> None:
        self.noun = noun
        # The names of modules with parameters of their own.
        self._owners = owners
        # Returns the matched things by the name that a pattern matched. Only the name "." matches the root.
        self.hits = cache(self._hits)
        # Each hint compares its pattern with all names, so a big model has few hints to give.
        self._hints = max(_MAX_HINTED, _MAX_COMPARED // (len(things) + 1))
        self._subject = subject
        self._names: list[str] = []
        self._named: dict[str, Thing] = {}
        self._place: dict[str, int] = {}
        for place, thing in enumerate(things):
            self._place[thing.name] = place
            for name in thing.names:
                self._named[name] = thing
                if name != ROOT:
                    self._names.append(name)

    def _hits(self, text: str) -> dict[str, Thing]:
        pattern = compile_pattern(text)
        if pattern.is_literal:
            if text not in self._named:
                return {}
            return {text: self._named[text]}
        # If a segment of the pattern is known, only the names that have it are compared.
        names = self._names
        candidates = []
        for choice in segments(text, len(names)):
            places: list[int] = []
            for segment in choice:
                places += self._having.get(segment, ())
            candidates.append(places)
        if candidates:
            fewest = min(candidates, key=len)
            names = [names[place] for place in sorted(set(fewest))]
        hits = {}
        for place in select([pattern], names):
            name = names[place]
            hits[name] = self._named[name]
        return hits

    @cached_property
    def _having(self) -> dict[str, list[int]]:
        """By segment, the places of the names that have it."""
        having: dict[str, list[int]] = {}
        for place, name in enumerate(self._names):
            for segment in name.split("."):
                having.setdefault(without_zeros(segment), []).append(place)
        return having

    def _matched(self, texts: Sequence[str]) -> dict[str, Thing]:
        """Return the things that patterns match, by canonical name."""
        matched = {}
        for text in texts:
            for thing in self.hits(text).values():
                matched[thing.name] = thing
        return matched

    def _hint(self, text: str) -> str:
        self._hints -= 1
        if self._hints < 0:
            return "the hint about the first patterns that match nothing may help here too"
        return suggest(text, self._names)

    def select(self, rule: Rule) -> list[Thing]:
        matched = self._matched(rule.patterns)
        for name in self._matched(rule.exclude):
            matched.pop(name, None)
        # Each of many rules may match few of many names, so only the matches are looked at.
        names = sorted(matched, key=self._place.__getitem__)
        things = [matched[name] for name in names]
        if rule.where == Where():
            return things
        return [thing for thing in things if not self._failed(rule.where, thing)]

    def doubts(self, rule: Rule) -> list[str]:
        doubts = []
        if len(rule.patterns) > 1:
            for text in rule.patterns:
                if not self.hits(text):
                    hint = self._hint(text)
                    doubts.append(f"pattern {quoted(text)} matches nothing; {hint}")
        if rule.exclude:
            doubts += self._doubts_of_exclude(rule)
        if len(doubts) > _MAX_DOUBTS:
            doubts[_MAX_DOUBTS:] = [f"and {len(doubts) - _MAX_DOUBTS} more doubts of this kind"]
        return doubts

    def _doubts_of_exclude(self, rule: Rule) -> Iterator[str]:
        kept = set(self._matched(rule.patterns))
        for text in rule.exclude:
            hits = self.hits(text)
            dropped = {thing.name: thing for thing in hits.values() if thing.name in kept}
            if not dropped:
                yield f"exclude {quoted(text)} removes nothing from the match"
            for thing in dropped.values():
                others = [name for name in thing.names if name not in hits]
                if others:
                    shown = printable(", ".join(others))
                    kind = "module"
                    if isinstance(thing, Param):
                        kind = "tensor"
                    yield f"exclude {quoted(text)} also removes {shown}: the same {kind}"
            kept -= dropped.keys()

    def no_match(self, rule: Rule) -> str:
        matched = list(self._matched(rule.patterns).values())
        if not matched:
            texts = shorten_names([f'"{text}"' for text in rule.patterns])
            hints = dict.fromkeys([self._hint(text) for text in rule.patterns[:_MAX_HINTED]])
            return f"no {self.noun} of {self._subject} matches {texts}; {'; '.join(hints)}"
        plural = f"{len(matched)} {self.noun}s match"
        # Dictionaries, because they keep the order and drop repeated reasons and names.
        failed: dict[str, None] = {}
        classes: dict[str, None] = {}
        for thing in matched:
            condition = self._failed(rule.where, thing)
            if condition:
                failed[f"`{condition}`"] = None
            classes.update(dict.fromkeys(thing.module_type[:1]))
        if not failed:
            return f"{plural}, but `exclude` removes all of them"
        causes = ", ".join(failed)
        if "`module_type`" in failed:
            causes += f"; the classes are {shorten_names(list(classes))}"
        return f"{plural}{examples(matched)}, but `where` keeps none of them: {causes}"

    def _failed(self, where: Where, thing: Thing) -> str:
        """Return the condition that a thing does not meet, empty if it meets all of them."""
        if where.module_type is not None:
            pattern = compile_pattern(where.module_type)
            if not any(pattern.matches(name) for name in thing.module_type):
                return "module_type"
        if isinstance(thing, Param):
            return _failed_of_param(where, thing)
        if where.owns_params is not None:
            owns_params = not self._owners.isdisjoint(thing.names)
            if owns_params != where.owns_params:
                return "owns_params"
        return ""


def name_indexes(manifest: Manifest, subject: str = "the model") -> dict[str, NameIndex]:
    owners: set[str] = set()
    for param in manifest.params:
        for name in param.names:
            owner = name.rpartition(".")[0]
            if not owner:
                owner = ROOT
            owners.add(owner)
    return {
        "params": NameIndex("parameter", manifest.params, subject),
        "modules": NameIndex("module", manifest.modules, subject, frozenset(owners)),
    }


def _failed_of_param(where: Where, param: Param) -> str:
    if where.ndim is not None and (param.shape is None or len(param.shape) != where.ndim):
        return "ndim"
    if where.dtype is not None and param.dtype != where.dtype:
        return "dtype"
    if where.requires_grad is not None and param.requires_grad != where.requires_grad:
        return "requires_grad"
    if where.numel is not None:
        low = where.numel.min
        high = where.numel.max
        if low is not None and param.numel < low:
            return "numel"
        if high is not None and param.numel > high:
            return "numel"
    return ""


@dataclass(frozen=True, slots=True)
class Match:
    things: tuple[Thing, ...] = ()  # none for tags, which the script names
    names: tuple[str, ...] = ()  # canonical, in model order; for tags, the patterns
    members: frozenset[str] = frozenset()  # the same names
    elements: int = 0  # of the parameters
    is_for: bool = True  # False if `model` names another class
    undecided: tuple[str, ...] = ()  # conditions that the names cannot decide; then nothing matches


class Matcher:
    """Matches rules against the names of a model, once per distinct selection."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.names = name_indexes(manifest)
        self._matches: dict[object, Match] = {}

    def match(self, rule: Rule) -> Match:
        key = (rule.target, rule.patterns, rule.exclude, rule.where, rule.model)
        if key not in self._matches:
            self._matches[key] = self._match(rule)
        return self._matches[key]

    def _match(self, rule: Rule) -> Match:
        undecided = _undecided(rule, self.manifest)
        if undecided:
            return Match(undecided=tuple(undecided))
        if not is_for(rule, self.manifest):
            return Match(is_for=False)
        if rule.target == "tensors":
            patterns = tuple(dict.fromkeys(rule.patterns))
            return Match(names=patterns, members=frozenset(patterns))
        things = self.names[rule.target].select(rule)
        names = []
        elements = 0
        for thing in things:
            names.append(thing.name)
            if isinstance(thing, Param):
                elements += thing.numel
        return Match(tuple(things), tuple(names), frozenset(names), elements)


def is_for(rule: Rule, manifest: Manifest) -> bool:
    """Tell whether a rule is for the class of a model: its `model` names the class, or is not given."""
    if rule.model is None:
        return True
    pattern = compile_pattern(rule.model)
    if not manifest.model_type:
        return pattern.matches(manifest.origin)
    return any(pattern.matches(name) for name in manifest.model_type)


def _undecided(rule: Rule, manifest: Manifest) -> list[str]:
    """Return complaints about conditions on facts that the source of the names lacks."""
    where = rule.where
    asked = {rule.model, where.module_type, where.requires_grad} - {None}
    if not asked or not manifest.lacks_classes:
        return []
    return [
        f"`model`, `module_type` and `requires_grad` cannot be decided: {printable(manifest.origin)} lacks these "
        "facts; plan with `--model`, or with the params.json that `gradsurgeon params` writes"
    ]


def chains_of(
    rules: Sequence[Rule], names: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return, per tensor, the ids of its rules in order of effect."""
    chains: dict[str, list[str]] = {}
    for rule in in_order(rules):
        suffix = ""
        if rule.target != "params":
            suffix = f" {rule.ref}"
        for name in names[rule.id]:
            chains.setdefault(name + suffix, []).append(rule.id)
    return {key: tuple(chain) for key, chain in chains.items()}


def examples(things: Sequence[Thing], owners: Sequence[str] = ()) -> str:
    """Return the first names in parentheses, each behind its owner if owners are given."""
    if not things:
        return ""
    names = [thing.name for thing in things]
    if owners:
        names = [f"{owner}: {name}" for owner, name in zip(owners, names, strict=True)]
    return f" ({shorten_names(names)})"


def quoted(text: str) -> str:
    return f'"{printable(text)}"'
