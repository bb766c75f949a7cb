"""Warnings of a plan: losses that are combined twice, costs of losses, and `torch.compile`. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from gradsurgeon.actions import LossRule, ObserverRule, Rule
from gradsurgeon.errors import printable
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning.manifest import ROOT
from gradsurgeon.planning.plan import Plan
from gradsurgeon.planning.table import count


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


def breaks_of(plan: Plan) -> Iterator[str]:
    """Yield what `torch.compile` leaves out of its graphs because of rules on modules and tags."""
    bound = {(rule.target, one.name) for rule in plan.rules.rules for one in plan.of(rule.id)}
    targets = {target for target, _ in bound}
    calls = []
    # A break in a module also breaks the graph around the module; compilation begins inside the root.
    if any(target == "modules" and name != ROOT for target, name in bound):
        calls.append("a module with rules, or around one,")
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
    elements = count(sum(param.numel for param in params), "element")
    yield (
        f"gradsurgeon.backward takes one more backward pass per loss ({printable(', '.join(losses))}), and meanwhile keeps "
        f"{len(losses)} gradients of {elements} and the graph"
    )
