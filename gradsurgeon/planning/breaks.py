"""What rules on modules and tags cost under `torch.compile`: the calls that leave the graph. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gradsurgeon.planning.manifest import ROOT
from gradsurgeon.planning.plan import Plan
from gradsurgeon.planning.table import count

# They hold modules and are never called themselves.
_HOLDERS = {"ModuleList", "ModuleDict"}


def outside_graphs(plan: Plan) -> tuple[int, int]:
    """Return how many modules with rules, and how many around them, cannot be called in a graph.

    These are modules, no graph breaks: one of them may be called several times or never, and torch
    gives up a whole function where a break would lie in a loop. The root is none of them: what compiles
    the model begins inside it.
    """
    ruled = {
        binding.name
        for rule in plan.rules.rules
        if rule.target == "modules"
        for binding in plan.of(rule.id)
    }
    with_rules = [one for one in plan.manifest.modules if one.name in ruled and one.name != ROOT]
    # A break in a module that would have been part of the graph around it breaks that one as well.
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
    if plan.manifest.compiled:  # the rest is of no use to who compiles nothing
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
