"""Patterns and conditions of rules -> the parameters or modules that they select."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from gradsurgeon.actions import Rule, Where, in_order
from gradsurgeon.common.match import compile_pattern, segments, select, suggest, without_zeros
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.language.planning.manifest import ROOT, Manifest, ModuleEntry, Param

Thing = Param | ModuleEntry
_MAX_DOUBTS = 20  # on one rule
_FEW, _COMPARED = 3, 100_000  # patterns that get a hint, names compared for all hints


class NameIndex:
    def __init__(
        self,
        noun: str,
        things: Sequence[Thing],
        owner: str = "the model",
        owners: frozenset[str] = frozenset(),
    ) -> None:
        self.noun = noun
        # The names of modules with parameters of their own.
        self._owners = owners
        # Returns the matched things by the name that a pattern matched. Only the name "." matches the root.
        self.hits = cache(self._hits)
        # Each hint compares its pattern with all names, so a big model has few hints to give.
        self._hints = max(_FEW, _COMPARED // (len(things) + 1))
        self._of = owner
        self._names = [name for thing in things for name in thing.names if name != ROOT]
        self._named = {name: thing for thing in things for name in thing.names}
        self._things = things
        self._place = {thing.name: place for place, thing in enumerate(things)}

    def _hits(self, text: str) -> dict[str, Thing]:
        pattern = compile_pattern(text)
        if pattern.is_literal:
            return {text: self._named[text]} if text in self._named else {}
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
        matched = [names[place] for place in select([pattern], names)]
        return {name: self._named[name] for name in matched}

    @cached_property
    def _having(self) -> dict[str, list[int]]:
        """By segment, the places of the names that have it."""
        having: dict[str, list[int]] = {}
        for place, name in enumerate(self._names):
            for segment in name.split("."):
                having.setdefault(without_zeros(segment), []).append(place)
        return having

    def _under(self, texts: Sequence[str]) -> dict[str, Thing]:
        return {thing.name: thing for text in texts for thing in self.hits(text).values()}

    def _hint(self, text: str) -> str:
        self._hints -= 1
        if self._hints < 0:
            return "the hint about the first patterns that match nothing may help here too"
        return suggest(text, self._names)

    def select(self, rule: Rule) -> list[Thing]:
        chosen = self._under(rule.patterns).keys() - self._under(rule.exclude).keys()
        # Each of many rules may match few of many names, so only the matches are looked at.
        things = [self._things[place] for place in sorted(map(self._place.__getitem__, chosen))]
        if rule.where == Where():
            return things
        return [thing for thing in things if not self._failed(rule.where, thing)]

    def doubts(self, rule: Rule) -> list[str]:
        doubts = []
        if len(rule.patterns) > 1:
            missed = [text for text in rule.patterns if not self.hits(text)]
            doubts += [
                f"pattern {quoted(text)} matches nothing; {self._hint(text)}" for text in missed
            ]
        kept = set(self._under(rule.patterns))
        for text in rule.exclude:
            hits = self.hits(text)
            dropped = {thing.name: thing for thing in hits.values() if thing.name in kept}
            if not dropped:
                doubts.append(f"exclude {quoted(text)} removes nothing from the match")
            for thing in dropped.values():
                others = [name for name in thing.names if name not in hits]
                if others:
                    what = "tensor" if isinstance(thing, Param) else "module"
                    shown = printable(", ".join(others))
                    doubts.append(f"exclude {quoted(text)} also removes {shown}: the same {what}")
            kept -= dropped.keys()
        if len(doubts) > _MAX_DOUBTS:
            doubts[_MAX_DOUBTS:] = [f"and {len(doubts) - _MAX_DOUBTS} more doubts of this kind"]
        return doubts

    def no_match(self, rule: Rule) -> str:
        matched = list(self._under(rule.patterns).values())
        if not matched:
            texts = shorten_names([f'"{text}"' for text in rule.patterns])
            hints = dict.fromkeys(map(self._hint, rule.patterns[:_FEW]))
            return f"no {self.noun} of {self._of} matches {texts}; {'; '.join(hints)}"
        plural = f"{len(matched)} {self.noun}s match"
        reasons = {self._failed(rule.where, thing): None for thing in matched}
        reasons.pop("", None)
        if not reasons:
            return f"{plural}, but `exclude` removes all of them"
        causes = ", ".join(f"`{key}`" for key in reasons)
        if "module_type" in reasons:
            known = dict.fromkeys(name for thing in matched for name in thing.module_type[:1])
            causes += f"; the classes are {shorten_names(list(known))}"
        return f"{plural}{examples(matched)}, but `where` keeps none of them: {causes}"

    def _failed(self, where: Where, thing: Thing) -> str:
        if where.module_type is not None:
            pattern = compile_pattern(where.module_type)
            if not any(pattern.matches(name) for name in thing.module_type):
                return "module_type"
        if isinstance(thing, Param):
            return _failed_param(where, thing)
        owns = not self._owners.isdisjoint(thing.names)
        return "" if where.owns_params in (None, owns) else "owns_params"


def name_indexes(manifest: Manifest, owner: str = "the model") -> dict[str, NameIndex]:
    names = (name for param in manifest.params for name in param.names)
    owners = frozenset(name.rpartition(".")[0] or ROOT for name in names)
    return {
        "params": NameIndex("parameter", manifest.params, owner),
        "modules": NameIndex("module", manifest.modules, owner, owners),
    }


def _failed_param(where: Where, param: Param) -> str:
    if where.ndim is not None and (param.shape is None or len(param.shape) != where.ndim):
        return "ndim"
    if where.dtype is not None and param.dtype != where.dtype:
        return "dtype"
    if where.requires_grad is not None and param.requires_grad != where.requires_grad:
        return "requires_grad"
    if where.numel is not None:
        low = where.numel.min or 0
        high = where.numel.max
        if param.numel < low or (high is not None and param.numel > high):
            return "numel"
    return ""


@dataclass(frozen=True, slots=True)
class Match:
    things: tuple[Thing, ...] = ()  # none for tags, which the script names
    names: tuple[str, ...] = ()  # canonical, in model order; for tags, the patterns
    members: frozenset[str] = frozenset()  # the names as a set
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
            names = tuple(dict.fromkeys(rule.patterns))
            return Match(names=names, members=frozenset(names))
        things = tuple(self.names[rule.target].select(rule))
        names = tuple(thing.name for thing in things)
        elements = sum(thing.numel for thing in things if isinstance(thing, Param))
        return Match(things, names, frozenset(names), elements)


def is_for(rule: Rule, manifest: Manifest) -> bool:
    """Tell whether a rule is for the class of a model: its `model` names the class, or is not given."""
    if rule.model is None:
        return True
    pattern = compile_pattern(rule.model)
    return any(pattern.matches(name) for name in manifest.model_type or (manifest.origin,))


def _undecided(rule: Rule, manifest: Manifest) -> list[str]:
    """Return complaints about conditions on facts that the source of the names lacks."""
    where = rule.where
    asked = {rule.model, where.module_type, where.requires_grad} - {None}
    if not (asked and manifest.lacks_classes):
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
