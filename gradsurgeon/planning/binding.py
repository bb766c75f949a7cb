"""RuleSet + names -> Plan. Pure: it reads a manifest and touches nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from gradsurgeon import _live
from gradsurgeon.actions import EditRule, LossRule, Rule
from gradsurgeon.errors import BindError, printable
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning.manifest import Fact, Manifest, Module, Param, calls_no_hook
from gradsurgeon.planning.matching import NameIndex, Thing, examples, name_indexes
from gradsurgeon.planning.plan import Binding, Plan, hook_of
from gradsurgeon.planning.plan_warnings import breaks_of, clashes, cost
from gradsurgeon.schema import RuleSet

_ON_MODULES = "the form on modules (`modules`, such as the heads, with `tensor: input.grad`)"
NO_MATCH = "matches nothing in this model"
# No reader needs more, and each hint takes time.
_MAX_COMPLAINTS = 100


@_live.uncollected()
def bind(rules: RuleSet, manifest: Manifest, *, alone: bool = True) -> Plan:
    """Return the plan of rules on one model, or raise `BindError` with all problems at once.

    With ``alone=False`` a rule may match nothing here, because another model may have its names:
    `shortfalls` checks the rules once all models are known.
    """
    names = name_indexes(manifest)
    complaints: list[str] = []
    bindings: list[Binding] = []
    warnings: dict[str, tuple[str, ...]] = {}
    for rule in rules.rules:
        if len(complaints) > _MAX_COMPLAINTS:
            complaints.append(f"{rules.place(rule.id)}: the rules from here on are not checked")
            break
        if texts := undecided(rule, manifest):
            complaints += [_complaint(rules, rule, text) for text in texts]
            continue
        if rule.model is not None and not is_for(rule.model, manifest):
            text = f"is for a model of the class {rule.model}, this one is {manifest.origin}"
            warnings[rule.id] = (text,)
            continue
        if rule.target == "tensors":
            bindings += _bindings(rule, ())
            warnings[rule.id] = (
                *rule.notes,
                "takes effect when the script tags a tensor with such a name",
            )
            continue
        known = names[rule.target]
        doubts: list[str] = []
        matched = known.select(rule, doubts)
        if alone:
            complaints += _shortfalls_of(rules, rule, matched, known)
        complaints += [_complaint(rules, rule, text) for text in obstacles(rule, matched, manifest)]
        remarks: tuple[str, ...] = (NO_MATCH,)
        if matched:
            remarks = (*_warnings_on(rule, matched), *rule.notes)
        elif rule.optional:
            remarks = ("matches nothing (optional)",)
        # The notes describe an effect, and a rule without a match has none.
        warnings[rule.id] = (*doubts, *remarks)
        bindings += _bindings(rule, matched)
    plan = Plan(rules, manifest, tuple(bindings), warnings)
    matched_names = {rule.id: [one.name for one in plan.of(rule.id)] for rule in rules.rules}
    complaints += [
        _complaint(rules, rule, text) for rule, text in clashes(rules.rules, matched_names)
    ]
    if complaints:
        raise BindError(complaints)
    notes = tuple(printable(note) for note in manifest.notes)
    return replace(plan, warnings=(*cost(plan), *breaks_of(plan), *notes))


def shortfalls(rules: RuleSet, models: Mapping[str, Manifest]) -> list[str]:
    """Return the complaints about rules that match too little over several models together."""
    complaints: list[str] = []
    named = {title: name_indexes(one) for title, one in models.items()}
    together = cache(lambda titles: _together([models[title] for title in titles], titles))
    for rule in rules.rules:
        if rule.target == "tensors":
            continue
        if len(complaints) > _MAX_COMPLAINTS:
            complaints.append(f"{rules.place(rule.id)}: the rules from here on are not checked")
            break
        titles = [
            title for title, one in models.items() if rule.model is None or is_for(rule.model, one)
        ]
        known = together(tuple(titles))
        matched = [
            (title, thing) for title in titles for thing in named[title][rule.target].select(rule)
        ]
        owners = [title for title, _ in matched] if len(titles) > 1 else []
        things = [thing for _, thing in matched]
        complaints += _shortfalls_of(rules, rule, things, known[rule.target], owners)
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


def undecided(rule: Rule, manifest: Manifest) -> list[str]:
    """Return complaints about conditions on facts that the source of the names lacks."""
    on_params = rule.target == "params" and bool(manifest.params)
    owners: Fact = "classes of parameters" if on_params else "classes of modules"
    where = rule.where
    conditions: Sequence[tuple[str, object, Fact]] = (
        ("model", rule.model, "class of the root"),
        ("where: module_type", where.module_type, owners),
        ("where: requires_grad", where.requires_grad, "classes of parameters"),
    )
    return [
        f"`{condition}` cannot be decided: {printable(manifest.origin)} lacks these facts; plan with "
        "`--model`, or with the params.json that `gradsurgeon params` writes"
        for condition, wanted, fact in conditions
        if wanted is not None and fact in manifest.untold
    ]


def is_for(model: str, manifest: Manifest) -> bool:
    pattern = compile_pattern(model)
    return any(pattern.matches(name) for name in manifest.model_type or (manifest.origin,))


def _bindings(rule: Rule, matched: Sequence[Thing]) -> Iterator[Binding]:
    """Yield the bindings of a rule. There can be thousands, so shared facts are computed once."""
    rule_id, tensor, point, hook = rule.id, str(rule.ref), rule.point, hook_of(rule)
    if rule.target == "tensors":
        for pattern in rule.patterns:
            yield Binding(rule_id, pattern.text, (), tensor, point, hook)
    for thing in matched:
        numel, dormant = (
            (0, False) if isinstance(thing, Module) else (thing.numel, not thing.requires_grad)
        )
        yield Binding(rule_id, thing.name, thing.aliases, tensor, point, hook, numel, dormant)


def _warnings_on(rule: Rule, matched: Sequence[Thing]) -> Iterator[str]:
    params = [thing for thing in matched if isinstance(thing, Param)]
    if params and not any(param.requires_grad for param in params):
        yield "all matched parameters have `requires_grad` off: the rule acts once it is on"
    if rule.target != "modules":
        return
    if isinstance(rule, LossRule):
        if len(matched) == 1:
            name = printable(matched[0].name)
            yield f"{name} alone meets no other gradient: name all modules with the same input tensor"
        yield from _apart(matched)
    if rule.ref.grad and rule.ref.side == "input":
        yield "the view that separates this module's share can regroup a sum in its last bit"
        inplace = [thing for thing in matched if isinstance(thing, Module) and thing.inplace]
        if inplace:
            yield (
                f"works in place{examples(inplace)}: the gradient belongs to the tensor before the "
                "module, and includes the contributions of its earlier consumers"
            )
    if not rule.ref.grad and isinstance(rule, EditRule) and rule.when is None:
        yield "acts in every forward call, also in evaluation; `when: train` limits it to training"


def _apart(matched: Sequence[Thing]) -> Iterator[str]:
    """Yield the matched modules that lie inside other matched modules: their gradients never meet."""
    names = {thing.name for thing in matched}
    for name in sorted(names):
        around = name
        while "." in around:
            around = around.rpartition(".")[0]
            if around in names:
                yield (
                    f"{printable(name)} is a part of {printable(around)}, and each has its own view of the input: "
                    "their gradients do not meet; leave one of them out by `exclude`"
                )
                break


def _complaint(rules: RuleSet, rule: Rule, text: str, *path: str | int) -> str:
    return f"{rules.place_to_correct(rule.id, *path)}: rule {rule.id}: {text}"


def _shortfalls_of(
    rules: RuleSet,
    rule: Rule,
    matched: Sequence[Thing],
    names: NameIndex,
    owners: Sequence[str] = (),
) -> Iterator[str]:
    if not matched and not rule.optional:
        yield _complaint(rules, rule, names.no_match(rule), rule.target)
    if rule.expect is not None and rule.expect.params != len(matched):
        text = (
            f"expected {rule.expect.params} parameters, matched {len(matched)}"
            f"{examples(matched, owners)}; correct the pattern or the `expect`"
        )
        yield _complaint(rules, rule, text, "expect", "params")


def _cannot_act(rule: Rule, params: Sequence[Param]) -> Iterator[str]:
    lazy = [param for param in params if param.shape is None]
    if lazy:
        yield (
            f"{len(lazy)} parameters have no shape yet{examples(lazy)}: rules cannot act on lazy modules; "
            "run one forward pass before applying rules"
        )
    complex_ones = [param for param in params if param.dtype.startswith("complex")]
    if complex_ones and (reason := rule.complex_problem()):
        yield f"{reason}{examples(complex_ones)}; leave them out by `exclude` or `where`"
    sparse = [param for param in params if param.sparse]
    if sparse and isinstance(rule, LossRule):
        yield (
            f"the gradients of {len(sparse)} parameters are sparse{examples(sparse)}: the gradients of single losses "
            "cannot be told apart there; leave them out by `exclude`"
        )
    elif sparse and not rule.keeps_zero:
        yield (
            f"the gradients of {len(sparse)} parameters are sparse{examples(sparse)}, and the bounds "
            "exclude 0, so the result would be dense; include 0 in the bounds, or exclude them"
        )


def _unreachable(rule: Rule, params: Sequence[Param], manifest: Manifest) -> Iterator[str]:
    if flat := manifest.flat_params:
        how = (
            f"this one acts on {_ON_MODULES}"
            if isinstance(rule, LossRule)
            else "rules act at `step`"
        )
        yield (
            f"FullyShardedDataParallel keeps {len(flat)} parameters flat{examples(flat)}: their "
            "gradients pass no hook and have no whole norm; shard the model with "
            f"torch.distributed.fsdp.fully_shard instead, under which {how}"
        )
        return
    if isinstance(rule, LossRule):
        if divided := [param for param in params if param.sharding]:
            yield (
                f"{len(divided)} parameters are divided by {divided[0].sharding}{examples(divided)}: the gradients of single "
                f"losses cannot be had of them; use {_ON_MODULES}, which reads features"
            )
        return
    if rule.point != "backward":
        return
    later = next((f"`at: {point}`" for point in rule.points if point != "backward"), "")
    hint = f"use {later}" if later else "leave them out by `exclude`"
    sharded = [param for param in params if param.sharding == "fully_shard"]
    if sharded:
        yield (
            f"{len(sharded)} parameters are sharded by fully_shard{examples(sharded)}: autograd hands "
            f"no hook what one backward pass contributes to them; {hint}"
        )
    divided = [param for param in params if param.sharding == "tensor parallel"]
    if divided and rule.measures:
        yield (
            f"{len(divided)} parameters are divided by tensor parallelism{examples(divided)}: their "
            "norm would need the other ranks in the middle of a backward pass; "
            f"{hint}"
        )


def obstacles(rule: Rule, matched: Sequence[Thing], manifest: Manifest) -> list[str]:
    """Return why a rule cannot act on its matches; `bind` raises these texts."""
    params = [thing for thing in matched if isinstance(thing, Param)]
    scripted = [
        thing for thing in matched if isinstance(thing, Module) and calls_no_hook(thing, manifest)
    ]
    return [*_cannot_act(rule, params), *_unreachable(rule, params, manifest), *_unseen(scripted)]


def _unseen(scripted: Sequence[Module]) -> Iterator[str]:
    if scripted:
        yield (
            f"torch.jit runs {len(scripted)} of the matched modules{examples(scripted)}, and calls no hook there: name the "
            "module around them, leave them out by `exclude`, or train the model without torch.jit; rules on "
            "parameters (`params`) do act there"
        )
