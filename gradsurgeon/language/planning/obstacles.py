"""Why training with a rule would end before its first step. Pure: nothing here raises."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from gradsurgeon.actions import LossRule, Rule
from gradsurgeon.common.match import MODEL
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.language.planning.manifest import Manifest, Param
from gradsurgeon.language.planning.matching import (
    Match,
    Matcher,
    NameIndex,
    Thing,
    chains_of,
    examples,
    is_for,
)
from gradsurgeon.language.planning.table import count
from gradsurgeon.language.schema import RuleSet

# Parameters of one rule that are named by a problem of their own.
_NAMED = 8
_ON_MODULES = "the form on modules (`modules`, such as the heads, with `tensor: input.grad`)"

_SPREAD = {
    "fully_shard": "autograd hands no hook what one backward pass contributes to them",
    "tensor parallel": "their norm would need the other ranks in the middle of a backward pass",
}


class Obstacle(NamedTuple):
    kind: Literal["no-match", "expect", "cannot-act"]
    at: tuple[str, ...]  # the option of the rule in its file
    text: str


class MatchedRules:
    """The rules of one set by id, in file order, with their matches in one model."""

    def __init__(self, rules: RuleSet, matcher: Matcher) -> None:
        self.rules: dict[str, Rule] = {}
        self.matches: dict[str, Match] = {}
        self.matcher = matcher
        for rule in rules.rules:
            self.rules[rule.id] = rule
            self.matches[rule.id] = matcher.match(rule)

    @cached_property
    def chains(self) -> dict[str, tuple[str, ...]]:
        names = {rule: match.names for rule, match in self.matches.items()}
        return chains_of(list(self.rules.values()), names)

    def obstacles(self, rule_id: str, *, alone: bool = True) -> Iterator[Obstacle]:
        """Yield the obstacles of one rule; without ``alone``, another model may have the missing names."""
        rule = self.rules[rule_id]
        match = self.matches[rule_id]
        if match.undecided:
            texts = [match.undecided]
        elif match.is_for and rule.target != "tensors":
            if alone:
                yield from _shortfalls(rule, match.things, self.matcher.names[rule.target])
            texts = [*_cannot_act(rule, match, self.matcher.manifest), *self._clashes(rule)]
        else:
            return
        for text in texts:
            yield Obstacle("cannot-act", ("id",), text)

    def _clashes(self, rule: Rule) -> Iterator[str]:
        """Yield complaints about gradients that an earlier rule combines too."""
        if not _combines(rule):
            return
        for other in self.rules.values():
            if other is rule:
                return
            if not _combines(other):
                continue
            taken = self.matches[other.id].members
            shared = [name for name in self.matches[rule.id].names if name in taken]
            if shared and _meet(other, rule):
                yield (
                    f"{other.id} combines the gradients of {shorten_names(shared)} already, and they can be "
                    "combined once: leave them out of one of the two by `exclude`, or give the two `steps` that do not meet"
                )


def _combines(rule: Rule) -> bool:
    return isinstance(rule, LossRule) and rule.edits


def _meet(first: Rule, second: Rule) -> bool:
    if first.target != second.target:
        return False
    # `input` is every tensor among the arguments of a module, so it includes `input[0]`.
    common = min(len(first.ref.path), len(second.ref.path))
    if first.ref.path[:common] != second.ref.path[:common]:
        return False
    return first.steps.meets(second.steps)


def complaint(rules: RuleSet, rule: Rule, obstacle: Obstacle) -> str:
    place = rules.place_to_correct(rule.id, *obstacle.at)
    text = f"{place}: rule {rule.id}: {obstacle.text}"
    if obstacle.kind == "expect":
        text += "; correct the pattern or the `expect`"
    return text  # the text of `no-match` ends with the names that may be meant


def shortfalls(rules: RuleSet, models: Mapping[str, Manifest]) -> list[str]:
    """Return complaints about rules that match too little in all the models together."""
    complaints: list[str] = []
    matchers = {title: Matcher(manifest) for title, manifest in models.items()}
    for rule in rules.rules:
        if rule.target == "tensors" or not models:
            continue
        # A rule that is for other models matches nothing.
        titles = [title for title in models if is_for(rule, models[title])] or list(models)
        things: list[Thing] = []
        for title in titles:
            things += matchers[title].match(rule).things
        # The names of one model are enough for a hint.
        names = matchers[titles[0]].names[rule.target]
        if len(models) == 1:
            titles = [MODEL]
        lacking = _shortfalls(rule, things, names, titles)
        complaints += [complaint(rules, rule, shortfall) for shortfall in lacking]
    return complaints


def _shortfalls(
    rule: Rule, matched: Sequence[Thing], names: NameIndex, models: Sequence[str] = (MODEL,)
) -> Iterator[Obstacle]:
    if not matched and not rule.optional:
        yield Obstacle("no-match", (rule.target,), names.no_match(rule, models))
    if rule.expect is not None and rule.expect.params != len(matched):
        expected = count(rule.expect.params, "parameter")
        text = f"expected {expected}, matched {len(matched)}{examples(matched)}"
        yield Obstacle("expect", ("expect", "params"), text)


def _cannot_act(rule: Rule, match: Match, manifest: Manifest) -> Iterator[str]:
    params = [thing for thing in match.things if isinstance(thing, Param)]
    lazy = [param for param in params if param.shape is None]
    sparse = [param for param in params if param.sparse]
    complex_params = [param for param in params if param.dtype.startswith("complex")]
    if lazy:
        yield (
            f"{len(lazy)} parameters have no shape yet{examples(lazy)}: rules cannot act on lazy modules; "
            "run one forward pass before applying rules"
        )
    yield from _misshapen(rule, params)
    complex_problem = rule.complex_problem()
    if complex_params and complex_problem:
        yield f"{complex_problem}{examples(complex_params)}; leave them out by `exclude` or `where`"
    if sparse and (isinstance(rule, LossRule) or not rule.keeps_zero):
        yield (
            f"the gradients of {len(sparse)} parameters are sparse{examples(sparse)}: the rule would make them "
            "dense, or has to tell losses apart there; leave them out by `exclude`, or include 0 in the bounds"
        )
    yield from _unreachable(rule, params, manifest)
    scripted = []
    if rule.target == "modules":
        scripted = [thing for thing in match.things if "ScriptModule" in thing.module_type]
    if scripted:
        yield (
            f"torch.jit runs {len(scripted)} of the matched modules{examples(scripted)}, and calls no hook there: name the "
            "module around them, leave them out by `exclude`, or train the model without torch.jit; rules on "
            "parameters (`params`) do act there"
        )


def _misshapen(rule: Rule, params: Sequence[Param]) -> Iterator[str]:
    problems = []
    for param in params:
        if param.shape is not None:
            problem = rule.param_problem(param.names, param.shape)
            if problem:
                problems.append(f"{printable(param.name)} {problem}; leave it out by `exclude`")
    yield from problems[:_NAMED]
    others = len(problems) - _NAMED
    if others > 0:
        yield f"{count(others, 'more parameter')} cannot have the rule for such reasons"


def _unreachable(rule: Rule, params: Sequence[Param], manifest: Manifest) -> Iterator[str]:
    of_losses = isinstance(rule, LossRule)
    flat = manifest.flat_params
    if flat:
        how = "rules act at `step`"
        if of_losses:
            how = f"this one acts on {_ON_MODULES}"
        yield (
            f"FullyShardedDataParallel keeps {len(flat)} parameters flat{examples(flat)}: their "
            "gradients pass no hook and have no whole norm; shard the model with "
            f"torch.distributed.fsdp.fully_shard instead, under which {how}"
        )
        return
    spread = [param for param in params if param.sharding]
    if of_losses and spread:
        yield (
            f"{len(spread)} parameters are divided by {spread[0].sharding}{examples(spread)}: the gradients of single "
            f"losses cannot be had of them; use {_ON_MODULES}, which reads features"
        )
    if of_losses or rule.point != "backward":
        return
    hint = "leave them out by `exclude`"
    later_points = [point for point in rule.points if point != "backward"]
    if later_points:
        hint = f"use `at: {later_points[0]}`"
    for kind, reason in _SPREAD.items():
        if kind != "fully_shard" and not rule.measures:
            continue
        divided = [param for param in spread if param.sharding == kind]
        if divided:
            yield f"{len(divided)} parameters are divided by {kind}{examples(divided)}: {reason}; {hint}"
