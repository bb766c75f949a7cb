"""Warnings of a plan: rules that meet on the same tensors, costs of losses, and `torch.compile`. Pure."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, combinations, islice
from typing import Literal

from gradsurgeon.actions import MOMENTS, CaptureRule, LossRule, Moment, ObserverRule, Rule, in_order
from gradsurgeon.errors import printable
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning.manifest import ROOT, Param
from gradsurgeon.planning.plan import Plan
from gradsurgeon.planning.table import count

_SHOWN, _LOOKED_AT = 50, 50_000
# Containers, which a model does not call.
_HOLDERS = {"ModuleList", "ModuleDict"}
# A pair of rules gets a warning by what both do to gradients, and when. A trap has a fixed moment, and a
# freeze changes no gradient: their order surprises no reader.
_Kind = tuple[Literal["edits", "reads", ""], Moment]


def overlaps(plan: Plan) -> Iterator[str]:
    names = cache(lambda rule_id: {binding.name for binding in plan.of(rule_id)})
    rules = plan.rules.rules
    meeting: dict[tuple[str, str | None, str], list[int]] = {}
    for number, rule in enumerate(rules):
        target = rule.target
        tensor = None if target == "params" else rule.tensor
        for binding in plan.of(rule.id):
            meeting.setdefault((target, tensor, binding.name), []).append(number)
    distinct = dict.fromkeys(map(tuple, meeting.values()))
    pairs = chain.from_iterable(combinations(numbers, 2) for numbers in distinct)
    kinds = [_kind(rule) for rule in rules]
    found = sorted(
        {
            (first, second)
            for first, second in islice(pairs, _LOOKED_AT)
            if _is_worth_a_word(kinds[first], kinds[second])
        }
    )
    for number, other in found[:_SHOWN]:
        first, second = rules[number], rules[other]
        yield _warning(plan, first, second, names(first.id) & names(second.id))
    if len(found) > _SHOWN or next(pairs, None) is not None:
        yield (
            "and more pairs of rules like these: `plan --format json` lists the rules of every tensor"
        )


def _kind(rule: Rule) -> _Kind:
    if rule.edits:
        return "edits", rule.point
    return "reads" if isinstance(rule, ObserverRule | CaptureRule) else "", rule.point


def _is_worth_a_word(earlier: _Kind, later: _Kind) -> bool:
    if earlier[0] == later[0] == "edits":
        return True
    crossed = MOMENTS.index(later[1]) < MOMENTS.index(earlier[1])
    return crossed and {earlier[0], later[0]} == {"edits", "reads"}


def _warning(plan: Plan, first: Rule, second: Rule, shared: set[str]) -> str:
    noun = first.target[:-1] if first.target != "params" else "parameter"
    order = in_order((first, second))
    example = next(binding.name for binding in plan.of(first.id) if binding.name in shared)
    what = f"{count(len(shared), noun)} (e.g. {printable(example)})"
    combined = ", which sees the losses combined"
    if first.edits and second.edits:
        return (
            f"{first.id} and {second.id} both change {what}; "
            f"effective order: {order[0].id} (at {order[0].point}), "
            f"then {order[1].id} (at {order[1].point})" + combined * isinstance(order[0], LossRule)
        )
    return (
        f"{second.id} (at {second.point}) comes before {first.id} (at {first.point}) on "
        f"{what}, although it is later in the file"
    )


def curves_of_nothing(plan: Plan, patterns: Sequence[str]) -> str:
    """Return a warning about patterns of curves that match no recorded tensor; empty without such patterns.

    Records of modules and tags have names only once the model runs, so these are not judged.
    """
    rules = [rule for rule in plan.rules.rules if isinstance(rule, ObserverRule)]
    if any(rule.target != "params" for rule in rules):
        return ""
    names = [binding.name for rule in rules for binding in plan.of(rule.id)]
    astray = [text for text in patterns if not any(map(compile_pattern(text).matches, names))]
    if not astray:
        return ""
    shown = ", ".join(f'"{printable(text)}"' for text in astray)
    return f"names={shown} matches no tensor that a rule records, and gives no curve"


def outside_graphs(plan: Plan) -> tuple[int, int]:
    """Return how many modules with rules, and how many around them, cannot be called in a graph.

    These counts are no graph breaks: a module may be called several times or never, and torch gives up a
    whole function if a break would lie in a loop. The root does not count: compilation begins inside it.
    """
    ruled = {
        binding.name
        for rule in plan.rules.rules
        if rule.target == "modules"
        for binding in plan.of(rule.id)
    }
    with_rules = [one for one in plan.manifest.modules if one.name in ruled and one.name != ROOT]
    # A break in a module also breaks the graph around the module.
    parts = [name.split(".") for one in with_rules for name in one.names]
    paths = {".".join(steps[:depth]) for steps in parts for depth in range(1, len(steps))}
    around = [
        one
        for one in plan.manifest.modules
        if not paths.isdisjoint(one.names)
        and _HOLDERS.isdisjoint(one.module_type)
        and one not in with_rules
    ]
    return len(with_rules), len(around)


def breaks_of(plan: Plan) -> Iterator[str]:
    targets = {rule.target for rule in plan.rules.rules if plan.of(rule.id)}
    with_rules, around = outside_graphs(plan)
    calls = []
    if with_rules:
        calls.append(f"the {count(with_rules, 'module')} with rules")
    if around:
        calls.append(f"the {count(around, 'module')} around them")
    if "tensors" in targets:
        calls.append("gradsurgeon.tag()")
    differ = "numerics may differ"
    if plan.manifest.compiled:  # the rest matters only to those who compile
        differ += ", and `fullgraph=True` cannot be had"
    if calls:
        loops = (
            ". A loop with such a call in it, as in nn.Sequential, runs uncompiled, and so does the code "
            "around the loop"
        )
        told = f"under torch.compile no call of {' or '.join(calls)} is part of a graph: {differ}"
        yield told + loops * plan.manifest.compiled
    elif "modules" in targets:
        yield f"under torch.compile the model is compiled apart from what calls it: {differ}"


def clashes(
    rules: Sequence[Rule], names: Mapping[str, Collection[str]]
) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that combine the same gradients as a rule above them, each with a complaint.

    Args:
        rules: in file order.
        names: the matches of each rule, by its id.
    """
    combining = [rule for rule in rules if isinstance(rule, LossRule) and rule.edits]
    taken_by = {rule.id: frozenset(names.get(rule.id, ())) for rule in combining}
    for number, rule in enumerate(combining):
        for other in combining[:number]:
            if other.target != rule.target or not _may_be_one(other.ref.path, rule.ref.path):
                continue
            shared = [name for name in names.get(rule.id, ()) if name in taken_by[other.id]]
            if shared and other.steps.meets(rule.steps):
                more = f" and {count(len(shared) - 1, 'other')}" if len(shared) > 1 else ""
                yield (
                    rule,
                    f"{other.id} combines the gradients of {printable(shared[0])}{more} already, and they can be "
                    "combined once: leave them out of one of the two by `exclude`, or give the two `steps` that do not meet",
                )


def _may_be_one(first: Sequence[int | str], second: Sequence[int | str]) -> bool:
    # `input` is every tensor among the arguments of a module, so it includes `input[0]`.
    return all(one == other for one, other in zip(first, second, strict=False))


def cost(plan: Plan) -> Iterator[str]:
    """Yield the cost of a call of `gradsurgeon.backward` beside a backward pass; rules share it."""
    rules = [rule for rule in plan.rules.rules if isinstance(rule, LossRule) and rule.losses]
    matched = {binding.name for rule in rules for binding in plan.of(rule.id)}
    params = [param for param in plan.manifest.params if param.name in matched]
    losses = dict.fromkeys(name for rule in rules if plan.of(rule.id) for name in rule.losses or ())
    if not params:
        return
    sizes = [_bytes(param) for param in params]
    size = f" ({_in_words(sum(sizes) * len(losses))})" if all(sizes) else ""
    elements = count(sum(param.numel for param in params), "element")
    yield (
        f"gradsurgeon.backward takes one more backward pass per loss ({printable(', '.join(losses))}), and meanwhile keeps "
        f"{len(losses)} gradients of {elements}{size} and the graph"
    )


def _bytes(param: Param) -> int:
    """Return the size of a gradient; 0 if the dtype is unknown."""
    bits = re.search(r"[0-9]+", param.dtype)
    return param.numel * int(bits[0]) // 8 if bits else 0


def _in_words(size: int) -> str:
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size} bytes"
