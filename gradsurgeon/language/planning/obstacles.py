"""Why training with a rule would end before its first step. Pure: nothing here raises."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from gradsurgeon.actions import LossRule, Rule
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.language.planning.manifest import Manifest, ModuleEntry, Param
from gradsurgeon.language.planning.matching import (
    Match,
    Matcher,
    NameIndex,
    Thing,
    chains_of,
    examples,
    name_indexes,
)
from gradsurgeon.language.planning.table import count
from gradsurgeon.language.schema import RuleSet

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
        self.rules = {rule.id: rule for rule in rules.rules}
        self.matches = {rule.id: matcher.match(rule) for rule in rules.rules}
        self.matcher = matcher

    @cached_property
    def chains(self) -> dict[str, tuple[str, ...]]:
        names = {rule: match.names for rule, match in self.matches.items()}
        return chains_of(list(self.rules.values()), names)

    def obstacles(self, rule_id: str, *, alone: bool = True) -> Iterator[Obstacle]:
        """Yield the obstacles of one rule; without ``alone``, another model may have the missing names."""
        rule = self.rules[rule_id]
        match = self.matches[rule_id]
        texts = [*match.undecided]
        if not texts and match.is_for and rule.target != "tensors":
            if alone:
                yield from _shortfalls(rule, match.things, self.matcher.names[rule.target])
            texts = [*_cannot_act(rule, match, self.matcher.manifest), *self._clashes[rule_id]]
        yield from (Obstacle("cannot-act", ("id",), text) for text in texts)

    @cached_property
    def _clashes(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {rule: [] for rule in self.rules}
        combining = [one for one in self.rules.values() if isinstance(one, LossRule) and one.edits]
        for number, rule in enumerate(combining):
            for other in combining[:number]:
                taken = self.matches[other.id].members
                shared = [name for name in self.matches[rule.id].names if name in taken]
                if not shared or not _meet(other, rule):
                    continue
                found[rule.id].append(
                    f"{other.id} combines the gradients of {shorten_names(shared)} already, and they can be "
                    "combined once: leave them out of one of the two by `exclude`, or give the two `steps` that do not meet"
                )
        return found


def _meet(first: Rule, second: Rule) -> bool:
    # `input` is every tensor among the arguments of a module, so it includes `input[0]`.
    paths = zip(first.ref.path, second.ref.path, strict=False)
    same = first.target == second.target and all(one == other for one, other in paths)
    return same and first.steps.meets(second.steps)


def complaint(rules: RuleSet, rule: Rule, found: Obstacle) -> str:
    # The text of `no-match` ends with the names that may be meant.
    hint = "; correct the pattern or the `expect`" if found.kind == "expect" else ""
    return f"{rules.place_to_correct(rule.id, *found.at)}: rule {rule.id}: {found.text}{hint}"


def shortfalls(rules: RuleSet, models: Mapping[str, Manifest]) -> list[str]:
    complaints: list[str] = []
    matchers = {title: Matcher(one) for title, one in models.items()}
    together: dict[tuple[str, ...], dict[str, NameIndex]] = {}
    for rule in rules.rules:
        if rule.target == "tensors":
            continue
        matches = {title: matcher.match(rule) for title, matcher in matchers.items()}
        titles = tuple(title for title, match in matches.items() if match.is_for)
        if titles not in together:
            together[titles] = _together([models[title] for title in titles], titles)
        things = [thing for title in titles for thing in matches[title].things]
        owners = [title for title in titles for _ in matches[title].things]
        names = together[titles][rule.target]
        short = _shortfalls(rule, things, names, owners if len(titles) > 1 else ())
        complaints += [complaint(rules, rule, found) for found in short]
    return complaints


def _together(models: Sequence[Manifest], titles: Sequence[str]) -> dict[str, NameIndex]:
    origin = ", ".join(titles)
    whole = Manifest(
        origin=origin,
        params=tuple(param for one in models for param in one.params),
        modules=tuple(module for one in models for module in one.modules),
    )
    several = len(models) > 1
    return name_indexes(whole, f"the models {printable(origin)}" if several else "the model")


def _shortfalls(
    rule: Rule, matched: Sequence[Thing], names: NameIndex, owners: Sequence[str] = ()
) -> Iterator[Obstacle]:
    if not matched and not rule.optional:
        yield Obstacle("no-match", (rule.target,), names.no_match(rule))
    if rule.expect is not None and rule.expect.params != len(matched):
        found = f"matched {len(matched)}{examples(matched, owners)}"
        text = f"expected {count(rule.expect.params, 'parameter')}, {found}"
        yield Obstacle("expect", ("expect", "params"), text)


def _cannot_act(rule: Rule, match: Match, manifest: Manifest) -> Iterator[str]:
    params = [thing for thing in match.things if isinstance(thing, Param)]
    if lazy := [param for param in params if param.shape is None]:
        yield (
            f"{len(lazy)} parameters have no shape yet{examples(lazy)}: rules cannot act on lazy modules; "
            "run one forward pass before applying rules"
        )
    complex_ones = [param for param in params if param.dtype.startswith("complex")]
    if complex_ones and (reason := rule.complex_problem()):
        yield f"{reason}{examples(complex_ones)}; leave them out by `exclude` or `where`"
    sparse = [param for param in params if param.sparse]
    if sparse and (isinstance(rule, LossRule) or not rule.keeps_zero):
        yield (
            f"the gradients of {len(sparse)} parameters are sparse{examples(sparse)}: the rule would make them "
            "dense, or has to tell losses apart there; leave them out by `exclude`, or include 0 in the bounds"
        )
    yield from _unreachable(rule, params, manifest)
    modules = (thing for thing in match.things if isinstance(thing, ModuleEntry))
    if scripted := [module for module in modules if "ScriptModule" in module.module_type]:
        yield (
            f"torch.jit runs {len(scripted)} of the matched modules{examples(scripted)}, and calls no hook there: name the "
            "module around them, leave them out by `exclude`, or train the model without torch.jit; rules on "
            "parameters (`params`) do act there"
        )


def _unreachable(rule: Rule, params: Sequence[Param], manifest: Manifest) -> Iterator[str]:
    of_losses = isinstance(rule, LossRule)
    if flat := manifest.flat_params:
        how = f"this one acts on {_ON_MODULES}" if of_losses else "rules act at `step`"
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
    later = next((f"use `at: {point}`" for point in rule.points if point != "backward"), "")
    hint = later or "leave them out by `exclude`"
    for kind, reason in _SPREAD.items():
        found = [param for param in spread if param.sharding == kind]
        if found and (kind == "fully_shard" or rule.measures):
            yield f"{len(found)} parameters are divided by {kind}{examples(found)}: {reason}; {hint}"
