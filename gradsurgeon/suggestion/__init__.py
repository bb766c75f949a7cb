"""Rules from the records of a healthy run. Each threshold would have bitten in a share of its steps. Needs numpy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.planning.table import count
from gradsurgeon.store.layout import section
from gradsurgeon.store.memory import Key
from gradsurgeon.store.rank_file import StoredSeries
from gradsurgeon.store.run import Run
from gradsurgeon.suggestion.groups import groups_of, patterns_of
from gradsurgeon.suggestion.recorded import (
    GroupNorms,
    behaviours,
    group_norms,
    rounding_noise,
    skipped_steps,
    sources,
)
from gradsurgeon.suggestion.rule_text import doubts_of, evidence, judged, rule_id, rule_lines
from gradsurgeon.suggestion.thresholds import percent

# A suggestion begins with this. No other file is written over.
MARK = "# Suggested by `gradsurgeon suggest`"
# Reviewers read some tens of rules.
_MOST_RULES = 24
_SILENT = "no gradient: {}"
_NOISE = "no rule for {}: rounding noise, for the gradient is zero by mathematics"


class Suggestion(NamedTuple):
    """A rule file, its summary in a few words, and the findings that a reader must not overlook."""

    text: str
    summary: str
    findings: list[str]


def suggest(run: Run, share: float) -> Suggestion:
    """Return rules whose thresholds would have bitten in a share of the steps."""
    where = printable(str(run.path))
    used = sources(run)
    if not used:
        remedy = "record them with a `norm-log` rule, `at: step`"
        raise RecordError(f"{where}: has no l2 norms of parameters: {remedy}")
    if len(used) > _MOST_RULES:
        reason = f"{len(used)} optimizers share the parameters: each would need a rule of its own"
        raise RecordError(f"{where}: {reason}")
    known = _known(run)
    rules: dict[str, str] = {}
    left_out: dict[str, list[str]] = {_SILENT: [], _NOISE: []}
    params, findings, missing = 0, list[str](), list[str]()
    for series, group, norms in _groups(run, used, left_out):
        patterns = patterns_of(group, known)
        size = count(len(group), "parameter")
        edits = list(_edits_before(run, series.key, group))
        found = judged(norms, share, series.key.rule)
        if isinstance(found, str):
            named = f"{', '.join(patterns)}{f' ({size}, such as {group[0]})' * (len(group) > 1)}"
            missing.append(f"no rule for {named}: {'; '.join([found, *edits])}")
            continue
        params += len(group)
        name = rule_id("spikes" if found.drift else "clip", patterns, rules)
        doubts = [*doubts_of(found, share), *edits]
        findings += [f"{name}: {doubt}" for doubt in doubts]
        early = {"accumulated": ", before any clip of the script's own"}.get(series.key.point, "")
        source = f"{size}, by `{series.key.rule}` at {series.key.point}{early}"
        comments = [*doubts, *evidence(source, norms, found, share)]
        rules[name] = "\n".join(rule_lines(name, patterns, found, comments))
    if not rules:
        listed = "\n  ".join(missing or ["no parameter has finite norms of two steps"])
        raise RecordError(f"{where}: no parameter gets a rule\n  {listed}")
    head = [f"from {run.path}: thresholds that would have bitten in {percent(share)} of the steps"]
    for why, names in left_out.items():
        head += [why.format(", ".join(patterns_of(names, known)))] if names else []
    comment = "\n# ".join(map(printable, [*head, *missing]))
    body = "\n\n".join(rules.values())
    text = f"{MARK} {comment}\nversion: 1\nrules:\n{body}\n"
    summary = f"{count(len(rules), 'rule')} for {count(params, 'parameter')}"
    return Suggestion(text, summary, [*findings, *missing])


def _groups(
    run: Run, used: Mapping[StoredSeries, list[str]], left_out: Mapping[str, list[str]]
) -> Iterator[tuple[StoredSeries, list[str], GroupNorms]]:
    """Yield the groups with their norms; parameters without a usable gradient go to ``left_out``."""
    skipped = skipped_steps(run)
    for series, names in used.items():
        alive = behaviours(series, names)
        left_out[_SILENT] += sorted({*names} - alive.keys())
        for name in rounding_noise(alive):
            del alive[name]
            left_out[_NOISE].append(name)
        if alive:
            groups = groups_of(alive, _MOST_RULES // len(used))
            for group, norms in zip(groups, group_norms(series, groups, skipped), strict=True):
                yield series, group, norms


def _known(run: Run) -> Mapping[str, str]:
    known = {name: name for name in run.params}
    for param in section(run.meta, "model").get("params") or ():
        if isinstance(aliases := param.get("aliases"), list):
            known |= {str(alias): param["name"] for alias in aliases}
    return known


def _edits_before(run: Run, key: Key, names: Sequence[str]) -> Iterator[str]:
    """Yield a doubt if rules of the run had changed the gradients before they were measured."""
    roles, chains = section(run.meta, "roles"), section(section(run.meta, "plan"), "chains")
    points, before = {rule["id"]: rule.get("point") for rule in run.rules}, set[str]()
    for name in names:
        chain = chains.get(name)
        if isinstance(chain, list) and key.rule in chain:
            earlier = chain[: chain.index(key.rule)]
            before.update(one for one in earlier if isinstance(one, str))
    # A run that only observes edits nothing, but later rules at one point see the edited gradient.
    observed = run.meta.get("mode") == "observe"
    edits = [
        f"`{rule}`"
        for rule in sorted(before)
        if section(roles, rule).get("role") == "edit"
        and not (observed and points.get(rule) != key.point)
    ]
    if edits:
        remedy = f"record again with `{key.rule}` above them in the file, and with `--observe`"
        yield f"the gradient was edited before it was measured, by {', '.join(edits)}: {remedy}"
