"""RuleSet + names -> Plan. Pure: it reads a manifest and touches nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from gradsurgeon.actions import EditRule, LossRule, ObserverRule, Rule
from gradsurgeon.actions.clip_norm import BOTH_FORMS, BY_ITSELF, clips_by_themselves
from gradsurgeon.common import _live
from gradsurgeon.common._grouping import names_of
from gradsurgeon.common.match import compile_pattern, select
from gradsurgeon.errors import BindError, printable
from gradsurgeon.language.planning.manifest import Manifest, Param
from gradsurgeon.language.planning.matching import Match, Matcher, Thing, quoted
from gradsurgeon.language.planning.obstacles import MatchedRules, complaint
from gradsurgeon.language.planning.plan import Binding, Plan, hook_of
from gradsurgeon.language.planning.table import count
from gradsurgeon.language.schema import RuleSet

NO_MATCH = "matches nothing in this model"


@_live.uncollected()
def bind(rules: RuleSet, manifest: Manifest, *, alone: bool = True, lenient: bool = False) -> Plan:
    """Return a plan. With ``alone=False`` other models get the same rules, and may have the names that this one lacks.

    Rules that cannot act are an error; with ``lenient`` they bind nothing, and the plan lists them as ``refused``.
    """
    matcher = Matcher(manifest)
    matched = MatchedRules(rules, matcher)
    refused: dict[str, tuple[str, ...]] = {}
    for rule in rules.rules:
        obstacles = matched.obstacles(rule.id, alone=alone)
        complaints = [complaint(rules, rule, obstacle) for obstacle in obstacles]
        if complaints:
            refused[rule.id] = tuple(complaints)
    if refused and not lenient:
        raise BindError(list(chain.from_iterable(refused.values())))
    by_themselves = clips_by_themselves(rules.rules)
    bindings: list[Binding] = []
    warnings: dict[str, tuple[str, ...]] = {}
    for rule in rules.rules:
        if rule.id not in refused:
            match = matched.matches[rule.id]
            bindings += _bindings(rule, match)
            warnings[rule.id] = tuple(_warnings_on(rule, match, matcher))
            if match.things and rule in by_themselves:
                warnings[rule.id] += (f"{BY_ITSELF}: {BOTH_FORMS}",)
    plan = Plan(rules, manifest, tuple(bindings), warnings, refused=refused)
    notes = map(printable, manifest.notes)
    return replace(plan, warnings=(*_cost(plan), *_graph_breaks(plan), *notes))


def _bindings(rule: Rule, match: Match) -> Iterator[Binding]:
    """Yield the bindings of a rule. There can be thousands, so shared facts are computed once."""
    rule_id = rule.id
    tensor = str(rule.ref)
    point = rule.point
    hook = hook_of(rule)
    if rule.target == "tensors":
        for text in match.names:
            yield Binding(rule_id, text, (), tensor, point, hook)
    for thing in match.things:
        numel = 0
        dormant = False
        if isinstance(thing, Param):
            numel = thing.numel
            dormant = not thing.requires_grad
        yield Binding(rule_id, thing.name, thing.aliases, tensor, point, hook, numel, dormant)


def _warnings_on(rule: Rule, match: Match, matcher: Matcher) -> Iterator[str]:
    if not match.is_for:
        yield f"is for a model of the class {rule.model}, this one is {matcher.manifest.origin}"
    elif rule.judges_losses:
        yield "judges the losses of updates that have such a name; each rank judges its own"
    elif rule.target == "tensors":
        yield from rule.notes
        yield "takes effect when the script tags a tensor with such a name"
    else:
        for _, doubt in matcher.names[rule.target].doubts(rule):
            yield doubt
        if match.things:
            yield from _remarks(rule, match.things)
            # The notes describe an effect, and a rule without a match has none.
            yield from rule.notes
        else:
            yield "matches nothing (optional)" if rule.optional else NO_MATCH


def _remarks(rule: Rule, matched: Sequence[Thing]) -> Iterator[str]:
    params = [thing for thing in matched if isinstance(thing, Param)]
    if params and not isinstance(rule, ObserverRule) and rule.tensor == "update":
        size = sum(param.numel for param in params)
        yield f"keeps a copy of the matched weights during each update, {count(size, 'element')} in all"
    if params and not any(param.requires_grad for param in params):
        yield "all matched parameters have `requires_grad` off: the rule acts once it is on"
    if rule.target != "modules":
        return
    if rule.ref.grad and rule.ref.side == "input":
        yield "the view that separates this module's share can regroup a sum in its last bit"
    if not rule.ref.grad and isinstance(rule, EditRule) and rule.when is None:
        yield "acts in every forward call, also in evaluation; `when: train` limits it to training"


def _graph_breaks(plan: Plan) -> Iterator[str]:
    rules = [rule for rule in plan.rules.rules if not rule.judges_losses]
    if any(rule.target != "params" and plan.of(rule.id) for rule in rules):
        yield (
            "under torch.compile no call of gradsurgeon.tag(), of a module with rules, or around one, is part "
            "of a graph: numerics may differ"
        )


def _cost(plan: Plan) -> Iterator[str]:
    # The number of elements of each parameter.
    matched: dict[str, int] = {}
    losses: set[str] = set()
    for rule in plan.rules.rules:
        bound = plan.of(rule.id)
        if isinstance(rule, LossRule) and rule.losses and bound:
            matched.update([(binding.name, binding.numel) for binding in bound])
            losses.update(rule.losses)
    if matched:
        elements = count(sum(matched.values()), "element")
        yield (
            f"gradsurgeon.backward takes one more backward pass per loss, and meanwhile keeps {len(losses)} "
            f"gradients of {elements} and the graph"
        )


def curves_of_nothing(plan: Plan, patterns: Sequence[str]) -> str:
    """Return a warning about patterns of curves that match no recorded tensor."""
    rules = [rule for rule in plan.rules.rules if isinstance(rule, ObserverRule)]
    # Tensors of modules and of tags have names that only the training knows.
    if any(rule.target != "params" for rule in rules):
        return ""
    names: list[str] = []
    for rule in rules:
        names += names_of(plan.of(rule.id))
    unmatched = [text for text in patterns if not select([compile_pattern(text)], names)]
    if not unmatched:
        return ""
    shown = ", ".join(map(quoted, unmatched))
    return f"names={shown} matches no tensor that a rule records, and gives no curve"
