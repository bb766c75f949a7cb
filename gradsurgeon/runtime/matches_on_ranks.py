"""Rules for a part of the model that another rank has: the stages of a pipeline are models of their own.

Whether a rule matches nothing at all, the ranks say to each other through the key-value store of the
job, for a limited time: a rank that applies no rules must not be waited for longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradsurgeon import _dist
from gradsurgeon.planning import Plan, is_for, shortfalls
from gradsurgeon.runtime import session_discovery
from gradsurgeon.schema import RuleSet

Names = dict[str, list[str]]

# The names that this rank has matched so far, by the rules: a script may apply the same ones to several
# models.
_matched: dict[str, Names] = {}


def has_others() -> bool:
    return _dist.world() > 1


def lacking(
    rules: RuleSet, plans: Mapping[str, Plan], *, alone: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return what is wrong with rules that match too little on all ranks, and where what is lacking here is.

    Args:
        rules: in file order.
        plans: of the models of this rank, by what they are called.
        alone: the rules are meant for this model; one for models of another class may have none.
    """
    models = {title: plan.manifest for title, plan in plans.items()}
    if not has_others():
        return shortfalls(rules, models), {}
    mine = _publish(rules, plans)
    asked = [
        rule
        for rule in rules.rules
        if rule.expect or shortfalls(_only(rules, rule.id), models)
        if not (alone and rule.model)
        or any(is_for(str(rule.model), manifest) for manifest in models.values())
    ]
    if not asked:
        return [], {}
    prefix = _prefix(rules)
    matched: dict[int, Names] = {
        rank: session_discovery.published(prefix, rank)
        for rank in session_discovery.wait_for(prefix, range(_dist.world()))
    }
    absent = [rank for rank in range(_dist.world()) if rank not in matched]
    errors: list[str] = []
    notes: dict[str, str] = {}
    for rule in asked:
        having = [rank for rank, names in matched.items() if names.get(rule.id)]
        count = len({name for names in matched.values() for name in names.get(rule.id, ())})
        enough = bool(having) or rule.optional
        if not enough or (rule.expect is not None and rule.expect.params != count):
            heard = f"; {session_discovery.unheard(absent)}" if absent else ""
            texts = shortfalls(_only(rules, rule.id), models) or [
                f"{rules.place(rule.id)}: rule {rule.id}: matches another number of parameters than "
                "`expect` says"
            ]
            errors += [f"{text} (on all ranks together: {count}{heard})" for text in texts]
        elif having and not mine.get(rule.id):
            here = f"matches nothing on rank {_dist.rank()}"
            notes[rule.id] = f"{here}; {_dist.having(having)} it"
    return errors, notes


def _publish(rules: RuleSet, plans: Mapping[str, Plan]) -> Names:
    mine = _matched.setdefault(rules.sha256, {})
    for plan in plans.values():
        for rule in rules.rules:
            names = [binding.name for binding in plan.of(rule.id)]
            # How many there are is asked of few rules; of the others one name is enough.
            mine[rule.id] = sorted({*mine.get(rule.id, ()), *(names if rule.expect else names[:1])})
    session_discovery.publish(_prefix(rules), mine)
    return mine


def _prefix(rules: RuleSet) -> str:
    return f"gradsurgeon/matched/{rules.sha256}"


def _only(rules: RuleSet, rule_id: str) -> RuleSet:
    return replace(rules, rules=tuple(rule for rule in rules.rules if rule.id == rule_id))
