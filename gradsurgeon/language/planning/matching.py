"""Patterns and conditions of rules -> the parameters or modules that they select."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from gradsurgeon.actions import Rule, Where, in_order
from gradsurgeon.common._grouping import names_of
from gradsurgeon.common.match import MODEL, compile_pattern, select, suggest
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.language.planning.manifest import ROOT, Manifest, ModuleEntry, Param

Thing = Param | ModuleEntry
_MAX_DOUBTS = 20  # on one rule
# Each hint compares its pattern with all names, so one model has few of them to give.
_MAX_HINTS = 20
_MAX_HINTED = 3  # patterns of a rule that get a hint


class NameIndex:
    """The names of the parameters or modules of a model, with the things that have them."""

    def __init__(
        self,
        noun: str,
        things: Sequence[Thing],
        owners: frozenset[str] = frozenset(),
    ) -> None:
        self.noun = noun
        # The names of modules with parameters of their own.
        self._owners = owners
        # Returns the matched things by the name that a pattern matched. Only the name "." matches the root.
        self.hits = cache(self._hits)
        self._hints = _MAX_HINTS
        self._things = things
        self._named: dict[str, Thing] = {}
        for thing in things:
            self._named |= dict.fromkeys(thing.names, thing)
        self._names = [name for name in self._named if name != ROOT]

    def _hits(self, text: str) -> dict[str, Thing]:
        pattern = compile_pattern(text)
        names = [text]
        if not pattern.is_literal:
            names = [self._names[place] for place in select([pattern], self._names)]
        return {name: self._named[name] for name in names if name in self._named}

    def _matched(self, texts: Sequence[str]) -> dict[str, Thing]:
        """Return the things that patterns match, by canonical name."""
        matched = {}
        for text in texts:
            for thing in self.hits(text).values():
                matched[thing.name] = thing
        return matched

    def _hint(self, text: str, model: str = MODEL) -> str:
        self._hints -= 1
        if self._hints < 0:
            return "the hint about the first patterns that match nothing may help here too"
        return suggest(text, self._names, model)

    def select(self, rule: Rule) -> list[Thing]:
        wanted = self._matched(rule.patterns).keys() - self._matched(rule.exclude)
        things = [thing for thing in self._things if thing.name in wanted]
        return [thing for thing in things if self._meets(rule.where, thing)]

    def doubts(self, rule: Rule) -> list[tuple[str, str]]:
        """Return what may not be meant: the option of a pattern without effect, empty for another doubt, and a text."""
        doubts: list[tuple[str, str]] = []
        for text in rule.patterns:
            if len(rule.patterns) > 1 and not self.hits(text):
                hint = self._hint(text)
                doubts.append((rule.target, f"pattern {quoted(text)} matches nothing; {hint}"))
        if rule.exclude:
            doubts += self._doubts_of_exclude(rule)
        more = len(doubts) - _MAX_DOUBTS
        if more > 0:
            doubts[_MAX_DOUBTS:] = [("", f"and {more} more doubts of this kind")]
        return doubts

    def _doubts_of_exclude(self, rule: Rule) -> Iterator[tuple[str, str]]:
        kept = set(self._matched(rule.patterns))
        for text in rule.exclude:
            hits = self.hits(text)
            dropped = {thing.name: thing for thing in hits.values() if thing.name in kept}
            if not dropped:
                yield "exclude", f"exclude {quoted(text)} removes nothing from the match"
            for thing in dropped.values():
                others = [name for name in thing.names if name not in hits]
                if others:
                    shown = printable(", ".join(others))
                    kind = "tensor" if isinstance(thing, Param) else "module"
                    yield "", f"exclude {quoted(text)} also removes {shown}: the same {kind}"
            kept -= dropped.keys()

    def no_match(self, rule: Rule, models: Sequence[str] = (MODEL,)) -> str:
        matched = list(self._matched(rule.patterns).values())
        if not matched:
            texts = shorten_names([f'"{pattern}"' for pattern in rule.patterns])
            first = printable(models[0])
            hints = dict.fromkeys(self._hint(text, first) for text in rule.patterns[:_MAX_HINTED])
            shown = printable(shorten_names(models))
            return f"no {self.noun} of {shown} matches {texts}; {'; '.join(hints)}"
        text = (
            f"{len(matched)} {self.noun}s match{examples(matched)}, but `exclude` and `where` keep "
            "none of them"
        )
        if rule.where.module_type is not None:
            classes = dict.fromkeys([thing.module_type[0] for thing in matched])
            text += f"; the classes are {shorten_names(list(classes))}"
        return text

    def _meets(self, where: Where, thing: Thing) -> bool:
        if where.module_type is not None:
            pattern = compile_pattern(where.module_type)
            if not any(map(pattern.matches, thing.module_type)):
                return False
        if isinstance(thing, Param):
            return _param_meets(where, thing)
        if where.owns_params is None:
            return True
        owns_params = not self._owners.isdisjoint(thing.names)
        return owns_params is where.owns_params


def name_indexes(manifest: Manifest) -> dict[str, NameIndex]:
    owners: set[str] = set()
    for param in manifest.params:
        for name in param.names:
            owners.add(name.rpartition(".")[0] or ROOT)
    return {
        "params": NameIndex("parameter", manifest.params),
        "modules": NameIndex("module", manifest.modules, frozenset(owners)),
    }


def _param_meets(where: Where, param: Param) -> bool:
    ndim = None
    if param.shape is not None:
        ndim = len(param.shape)
    if where.ndim not in (None, ndim) or where.dtype not in (None, param.dtype):
        return False
    if where.requires_grad not in (None, param.requires_grad):
        return False
    if where.numel is None:
        return True
    low = where.numel.min
    high = where.numel.max
    return (low is None or low <= param.numel) and (high is None or param.numel <= high)


class Match(NamedTuple):
    """What a rule matches in a model."""

    things: tuple[Thing, ...] = ()  # none for tags, which the script names
    names: tuple[str, ...] = ()  # canonical, in model order; for tags, the patterns
    members: frozenset[str] = frozenset()  # the same names
    elements: int = 0  # of the parameters
    is_for: bool = True  # False if `model` names another class
    undecided: str = ""  # why the names cannot decide on it; then nothing matches


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
            return Match(undecided=undecided)
        if not is_for(rule, self.manifest):
            return Match(is_for=False)
        if rule.target == "tensors":
            patterns = tuple(dict.fromkeys(rule.patterns))
            return Match(names=patterns, members=frozenset(patterns))
        things = self.names[rule.target].select(rule)
        names = names_of(things)
        elements = sum(thing.numel for thing in things if isinstance(thing, Param))
        return Match(tuple(things), tuple(names), frozenset(names), elements)


def is_for(rule: Rule, manifest: Manifest) -> bool:
    """Tell whether a rule is for the class of a model: its `model` names the class, or is not given."""
    if rule.model is None:
        return True
    pattern = compile_pattern(rule.model)
    return any(map(pattern.matches, manifest.model_type))


def _undecided(rule: Rule, manifest: Manifest) -> str:
    """Return a complaint about conditions on facts that the source of the names lacks, empty if there are none."""
    where = rule.where
    asked = {rule.model, where.module_type, where.requires_grad} - {None}
    if not asked or not manifest.lacks_classes:
        return ""
    return (
        f"`model`, `module_type` and `requires_grad` cannot be decided: {printable(manifest.origin)} lacks these "
        "facts; plan with `--model`, or with the params.json that `gradsurgeon params` writes"
    )


def chains_of(
    rules: Sequence[Rule], names: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return, per tensor, the ids of its rules in order of effect."""
    chains = defaultdict(list)
    for rule in in_order(rules):
        suffix = ""
        if rule.target != "params":
            suffix = f" {rule.ref}"
        for name in names[rule.id]:
            chains[name + suffix].append(rule.id)
    return {key: tuple(chain) for key, chain in chains.items()}


def examples(things: Sequence[Thing]) -> str:
    """Return the first names in parentheses."""
    if not things:
        return ""
    return f" ({shorten_names(names_of(things))})"


def quoted(text: str) -> str:
    return f'"{printable(text)}"'
