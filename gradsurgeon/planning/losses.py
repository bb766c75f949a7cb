"""What a plan says of rules on the gradients of several losses, and where two of them meet. Pure."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from gradsurgeon.actions import LossRule, Rule
from gradsurgeon.errors import printable
from gradsurgeon.planning.manifest import Param
from gradsurgeon.planning.matching import Thing
from gradsurgeon.planning.plan import Plan
from gradsurgeon.planning.table import count


def clashes(
    rules: Sequence[Rule], names: Mapping[str, Collection[str]]
) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that combine what a rule above them combines, each with why it cannot.

    Args:
        rules: in file order.
        names: by the id of a rule what it matches.
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
    # `input` is every tensor of what a module takes, `input[0]` among them.
    return all(one == other for one, other in zip(first, second, strict=False))


def doubts(rule: LossRule, matched: Sequence[Thing]) -> Iterator[str]:
    if rule.target == "modules" and len(matched) == 1:
        name = printable(matched[0].name)
        yield f"{name} alone has nothing to meet: name all modules that take the tensor"


def cost(plan: Plan) -> Iterator[str]:
    """Yield what a call of `gradsurgeon.backward` takes more than a backward pass; rules share it."""
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
    """Return the size of a gradient; 0 where the dtype is not told."""
    bits = re.search(r"[0-9]+", param.dtype)
    return param.numel * int(bits[0]) // 8 if bits else 0


def _in_words(size: int) -> str:
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size} bytes"
