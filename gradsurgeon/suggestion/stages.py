"""The stages of a suggestion: norms, groups, patterns, thresholds, and the text of a rule file."""

import math
from collections.abc import Iterable, Iterator, Sequence

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.planning.table import count
from gradsurgeon.store.layout import RUN_FILE, section
from gradsurgeon.store.memory import Key
from gradsurgeon.store.run import Run
from gradsurgeon.suggestion.groups import groups_of, patterns_of
from gradsurgeon.suggestion.recorded import (
    GroupNorms,
    behaviours,
    group_norms,
    skipped_steps,
    sources,
)
from gradsurgeon.suggestion.result import MARK, Suggestion
from gradsurgeon.suggestion.rule_file import SuggestedRule, percent, rule_id
from gradsurgeon.suggestion.thresholds import (
    ENOUGH_BITES,
    WARMUP,
    Threshold,
    least_steps,
    threshold,
)

# Reviewers read some tens of rules.
_MOST_RULES = 24


def suggest(run: Run, share: float) -> Suggestion:
    where = printable(str(run.path))
    used = sources(run)
    if not used:
        remedy = "record them with a `norm-log` rule, `at: step`"
        raise RecordError(f"{where}: has no l2 norms of parameters: {remedy}")
    if len(used) > _MOST_RULES:
        reason = f"{len(used)} optimizers share the parameters: each would need a rule of its own"
        raise RecordError(f"{where}: {reason}")
    known, skipped = _known(run, used.values()), skipped_steps(run)
    rules: dict[str, SuggestedRule] = {}
    without: dict[str, list[str]] = {}  # groups that get no rule, by reason
    silent: list[str] = []
    for series, names in used.items():
        alive = behaviours(series, names)
        silent += sorted({*names} - {one.name for one in alive})
        groups = groups_of(alive, _MOST_RULES // len(used))
        for group, norms in zip(groups, group_norms(series, groups, skipped), strict=True):
            patterns = patterns_of(group, known)
            found = _threshold(norms, share, series.key.rule)
            edited = tuple(_edited_before(run, series.key, group))
            if isinstance(found, str):
                members = (
                    f" ({len(group)} parameters, such as {group[0]})" if len(group) > 1 else ""
                )
                groups_without = without.setdefault("; ".join((found, *edited)), [])
                groups_without.append(f"{', '.join(patterns)}{members}")
                continue
            name = rule_id("spikes" if found.drift else "clip", patterns, rules)
            doubts = (*_doubts(found, share), *edited)
            rules[name] = SuggestedRule(
                name, patterns, len(group), series.key, norms, found, share, doubts
            )
    reasons = [f"{', '.join(named)}: {reason}" for reason, named in without.items()]
    if not rules:
        if not reasons:
            raise RecordError(f"{where}: no parameter has finite norms of two steps")
        listed = "\n".join(f"  {text}" for text in reasons)
        raise RecordError(f"{where}: no group of parameters gets a rule\n{listed}")
    missing = [f"no rule for {text}" for text in reasons]
    notes = [f"no gradient: {', '.join(patterns_of(silent, known))}"] if silent else []
    return _written(run, share, list(rules.values()), missing, notes)


def _written(
    run: Run,
    share: float,
    rules: Sequence[SuggestedRule],
    without: Sequence[str],
    notes: Sequence[str],
) -> Suggestion:
    said = f"from {run.path}: thresholds that would have bitten in {percent(share)} of the steps"
    if (ranks := len(run.ranks)) > 1:
        notes = (f"{ranks} ranks: of each parameter the norms of the lowest that has it", *notes)
    head = [f"{MARK} {said}", *(f"# {text}" for text in (*notes, *without))]
    body = ("\n".join(rule.lines()) for rule in rules)
    text = "\n".join([*map(printable, head), "version: 1", "rules:", "\n\n".join(body), ""])
    params = sum(rule.params for rule in rules)
    findings = [f"{rule.id}: {doubt}" for rule in rules for doubt in rule.doubts]
    summary = f"{count(len(rules), 'rule')} for {count(params, 'parameter')}"
    return Suggestion(text, summary, [*findings, *without])


def _known(run: Run, used: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return the canonical name of each parameter by each of its names.

    Raises:
        RecordError: a used name is not listed, so no pattern could be tried on all names.
    """
    known = {name: name for name in run.params}
    for param in section(run.meta, "model").get("params") or ():
        if isinstance(aliases := param.get("aliases"), list):
            known |= {str(alias): param["name"] for alias in aliases}
    if missing := sorted({name for names in used for name in names} - known.keys()):
        raise RecordError(
            f"{printable(str(run.path / RUN_FILE))}: is damaged, or of another run: it does not list "
            f"{printable(missing[0][:80])}, of which there are norms; restore it, or record the run again"
        )
    return known


def _threshold(norms: GroupNorms, share: float, rule: str) -> Threshold | str:
    """Return a threshold, or why there is none."""
    if reason := _why_too_few(norms, share):
        return reason
    found = threshold(norms.norms, share)
    if found.drift and norms.every > 1:
        # Nothing makes up for the steps between. A statistic that forgets as much from one record to the next
        # would bite up to ten times too rarely, and norms filled in between make a slope of a jump.
        return (
            "not stationary, and the statistic of a `spike-trap` moves in every step, but only one step in "
            f"{norms.every:,} was recorded: record again without `every: {norms.every}` in `{rule}`"
        )
    if found.drift and found.steps < least_steps(share) - WARMUP:
        positive = count(found.steps + WARMUP, "step")
        return f"not stationary, and the norm is above 0 in only {positive}: record more"
    if found.value is not None:
        return found
    if found.drift:
        return (
            f"not stationary, and no `spike-trap` that tells large norms from others bites in {percent(share)} of the "
            f"steps (closest: {found.bitten}): try another --bites"
        )
    return (
        f"no threshold bites in {percent(share)} of the steps (closest: {found.bitten}): the norms are alike, "
        "probably because they were clipped already"
    )


def _why_too_few(norms: GroupNorms, share: float) -> str:
    steps, least = len(norms.norms), least_steps(share)
    if steps < least:
        return (
            f"{count(steps, 'step')} are too few for a share of {percent(share)}: it takes {least:,}, and "
            f"{math.ceil(ENOUGH_BITES / share):,} for a threshold to count on; record more, or pass a larger --bites"
        )
    silent = (norms.norms == 0).sum() >= steps * (1 - share) - 1
    return "the norm is hardly ever above 0" if silent else ""


def _doubts(found: Threshold, share: float) -> Iterator[str]:
    if drift := found.drift:
        (first, second), (in_second, in_first) = drift.quantiles, map(percent, drift.crossed)
        yield (
            f"not stationary: the {percent(1 - drift.share)} quantile of the first half, {first:.4g}, would have "
            f"bitten in {in_second} of the second half, and the quantile of the second half, {second:.4g}, in "
            f"{in_first} of the first half"
        )
    asked = share * found.steps
    if asked < ENOUGH_BITES:
        enough = math.ceil(ENOUGH_BITES / share)
        yield f"too few steps: by chance alone it may bite half as often or twice as often; {enough:,} steps would do"


def _edited_before(run: Run, key: Key, names: Sequence[str]) -> Iterator[str]:
    """Yield a doubt if rules of the run had changed the gradients before they were measured.

    In a run that only observes, later rules at the same point see the edited gradient, and nothing else does.
    """
    roles, chains = section(run.meta, "roles"), section(section(run.meta, "plan"), "chains")
    points = {rule["id"]: rule.get("point") for rule in run.rules}
    edits = {rule for rule in roles if section(roles, rule).get("role") == "edit"}
    before = set[str]()
    for name in names:
        chain = chains.get(name)
        if isinstance(chain, list) and key.rule in chain:
            earlier = chain[: chain.index(key.rule)]
            before |= {rule for rule in edits if rule in earlier}
    here = {rule for rule in before if points.get(rule) == key.point}
    told = "the gradient was edited before it was measured, by"
    if here:
        yield f"{told} {_listed(here)}: put `{key.rule}` above it and record again, because `--observe` does not help"
    if before - here and run.meta.get("mode") != "observe":
        yield f"{told} {_listed(before - here)}: record with `--observe` to measure unedited gradients"


def _listed(rules: Iterable[str]) -> str:
    return ", ".join(f"`{rule}`" for rule in sorted(rules))
