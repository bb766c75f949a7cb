"""Patterns and conditions of a rule -> the parameters or modules it selects, with doubts about them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from gradsurgeon.actions import Rule, Where
from gradsurgeon.errors import printable
from gradsurgeon.match import NameSearch, Pattern, compile_pattern, suggest
from gradsurgeon.planning.manifest import ROOT, Manifest, Module, Param

Thing = Param | Module
_EXAMPLES = 3
_MAX_DOUBTS = 20  # on one rule
_FEW, _COMPARED = 3, 100_000  # patterns that get a hint, names compared for all hints


class NameIndex:
    """The names of all parameters, or of all modules, with aliases, and the thing behind each name."""

    def __init__(self, noun: str, things: Sequence[Thing], owner: str = "the model") -> None:
        self.noun = noun
        # Each hint compares its pattern with all names.
        self._hints = max(_FEW, _COMPARED // (len(things) + 1))
        self._of = owner
        self.names = [name for thing in things for name in thing.names if name != ROOT]
        self._named = {name: thing for thing in things for name in thing.names}
        self._search = NameSearch(self.names)
        self._things = things
        self._place = {thing.name: place for place, thing in enumerate(things)}

    def hits(self, pattern: Pattern) -> dict[str, Thing]:
        """Return the matched things by the name that matched. Only the name "." matches the root."""
        if pattern.is_literal:
            names = [pattern.text] if pattern.text in self._named else []
        else:
            names = [self.names[place] for place in self._search.matching(pattern)]
        return {name: self._named[name] for name in names}

    def hint(self, pattern: Pattern) -> str:
        """Return the likely meaning of a pattern without a match; a big model has few hints to give."""
        self._hints -= 1
        if self._hints < 0:
            return "the hint about the first patterns that match nothing may help here too"
        return suggest(pattern.text, self.names)

    def select(self, rule: Rule, doubts: list[str] | None = None) -> list[Thing]:
        """Return the things that a rule selects, in model order, and append doubts to ``doubts``."""
        chosen: set[str] = set()
        patterns = rule.patterns  # compiled at each call
        for pattern in patterns:
            hits = self.hits(pattern)
            if doubts is not None and not hits and len(patterns) > 1:
                doubts.append(f"pattern {quoted(pattern)} matches nothing; {self.hint(pattern)}")
            chosen.update(thing.name for thing in hits.values())
        for pattern in map(compile_pattern, rule.exclude):
            hits = self.hits(pattern)
            dropped = {thing.name for thing in hits.values()} & chosen
            if doubts is not None:
                if not dropped:
                    doubts.append(f"exclude {quoted(pattern)} removes nothing from the match")
                doubts += self._also_taken(pattern, hits, dropped)
            chosen -= dropped
        if doubts is not None and len(doubts) > _MAX_DOUBTS:
            doubts[_MAX_DOUBTS:] = [f"and {len(doubts) - _MAX_DOUBTS} more doubts of this kind"]
        # Each of many rules may match few of many names, so only the matches are looked at.
        things = [self._things[place] for place in sorted(map(self._place.__getitem__, chosen))]
        if rule.where == Where():
            return things
        return [thing for thing in things if not failed(rule.where, thing)]

    def _also_taken(
        self, pattern: Pattern, hits: dict[str, Thing], dropped: set[str]
    ) -> Iterator[str]:
        for thing in {one.name: one for one in hits.values() if one.name in dropped}.values():
            others = [name for name in thing.names if name not in hits]
            if others:
                shown = printable(", ".join(others))
                what = "tensor" if isinstance(thing, Param) else "module"
                yield f"exclude {quoted(pattern)} also removes {shown}: the same {what}"

    def no_match(self, rule: Rule) -> str:
        """Return why a rule selects nothing."""
        matched = list({t.name: t for p in rule.patterns for t in self.hits(p).values()}.values())
        if not matched:
            patterns = rule.patterns
            shown, more = patterns[:_FEW], len(patterns) - _FEW
            texts = ", ".join(quoted(pattern) for pattern in shown)
            texts += f" or {more} more patterns" if more > 0 else ""
            hints = dict.fromkeys(self.hint(pattern) for pattern in shown)
            return f"no {self.noun} of {self._of} matches {texts}; {'; '.join(hints)}"
        reasons = Counter(filter(None, (failed(rule.where, thing) for thing in matched)))
        plural = f"{len(matched)} {self.noun}s match"
        if not reasons:
            return f"{plural}, but `exclude` removes all of them"
        causes = ", ".join(f"`{key}` ({count})" for key, count in reasons.most_common())
        classes = ""
        if reasons["module_type"]:
            known = list(dict.fromkeys(name for thing in matched for name in thing.module_type[:1]))
            first = ", ".join(map(printable, known[:_FEW]))
            classes = f"; the classes are {first}{', ...' * (len(known) > _FEW)}"
        return f"{plural}{examples(matched)}, but `where` keeps none of them: {causes}{classes}"


def name_indexes(manifest: Manifest, owner: str = "the model") -> dict[str, NameIndex]:
    """Return the index of each target that has names before training: parameters and modules."""
    return {
        "params": NameIndex("parameter", manifest.params, owner),
        "modules": NameIndex("module", manifest.modules, owner),
    }


def failed(where: Where, thing: Thing) -> str:
    """Return the first condition that a thing fails; empty if it meets all."""
    if where.module_type is not None:
        pattern = compile_pattern(where.module_type)
        if not any(pattern.matches(name) for name in thing.module_type):
            return "module_type"
    return _failed_param(where, thing) if isinstance(thing, Param) else ""


def _failed_param(where: Where, param: Param) -> str:
    if where.ndim is not None and (param.shape is None or len(param.shape) != where.ndim):
        return "ndim"
    if where.dtype is not None and param.dtype != where.dtype.removeprefix("torch."):
        return "dtype"
    if where.requires_grad is not None and param.requires_grad != where.requires_grad:
        return "requires_grad"
    if where.numel is not None:
        low, high = where.numel.min or 0, where.numel.max
        if param.numel < low or (high is not None and param.numel > high):
            return "numel"
    return ""


def examples(things: Sequence[Thing], owners: Sequence[str] = ()) -> str:
    """Return the first names in parentheses, each behind its owner if owners are given."""
    if not things:
        return ""
    names = [thing.name for thing in things[:_EXAMPLES]]
    if owners:
        names = [f"{owner}: {name}" for owner, name in zip(owners, names, strict=False)]
    shown = ", ".join(map(printable, names))
    return f" ({shown}{', ...' if len(things) > _EXAMPLES else ''})"


def quoted(pattern: Pattern) -> str:
    return f'"{printable(pattern.text)}"'
