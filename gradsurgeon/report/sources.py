"""Reports of a session and of a run directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from gradsurgeon.common._libraries import is_installed
from gradsurgeon.common.events import settled
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.layout import database_name, section
from gradsurgeon.records.store.recorded import Recorded, RecordSource
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import (
    GRADIENT,
    STAT,
    UPDATES,
    WEIGHTS,
    WHOLE,
    RuleInfo,
    base_of,
)

_RANKS = 8  # so many that lack a file are named
_KINDS = {
    "grad": GRADIENT,
    "value": WEIGHTS,
    "update": UPDATES,
    "input.grad": "input gradient",
    "output.grad": "output gradient",
}


def summary(source: RecordSource, *, newest: int | None = None) -> Report:
    """Return the report of a `Session`, running or removed, or of a `Run`, or of its `newest` rows. Waits for the device."""
    report = unread(source.recorded(), newest)
    if is_installed("numpy"):
        # The files of a run may be closed before somebody looks at the report.
        _ = (report.steps, report.losses, report.rates, report.ranks, report.progress)
        _ = (report.history.tracks, report.history.gradients, report.callouts)
    return report


from_run = summary


def unread(recorded: Recorded, newest: int | None = None) -> Report:
    """Return a report that reads rows when they are asked for."""
    meta = recorded.meta
    pending = recorded.pending
    rules = _rule_infos(section(meta, "plan").get("rules", ()), section(meta, "roles"))
    statuses = {rule: settled(status, pending) for rule, status in recorded.statuses.items()}
    names = []
    frozen = {}
    for param in section(meta, "model").get("params", ()):
        names.append(param["name"])
        if param.get("requires_grad") is False:
            # A run of an earlier version has the number of elements in the place of the shape.
            shape = param.get("shape", (param.get("numel", 0),))
            frozen[param["name"]] = 0 if shape is None else prod(shape)
    return Report(
        title=f"{section(meta, 'rules').get('file', '?')} on {model_title(meta) or '?'}",
        params=tuple(names),
        rules=rules,
        statuses=statuses,
        series=[Part(series, pending, newest) for series in recorded.series],
        dropped=recorded.dropped,
        events=tuple(recorded.events),
        notes=tuple(_notes(recorded)),
        start=meta.get("start_step"),
        end=recorded.next_step,
        observed=meta.get("mode") == "observe",
        ends=recorded.ends,
        frozen=frozen,
        are_replicas=meta.get("replicas") is True,
    )


def model_title(meta: Mapping[str, Any]) -> Any:
    """Return the name of the model of a run, nothing if it has none."""
    model = section(meta, "model")
    return model.get("title") or model.get("origin", "")


def _notes(recorded: Recorded) -> Iterator[str]:
    if recorded.meta.get("mode") == "observe":
        yield "observed only: no rule changed anything"
    if len(recorded.ends) > 1:
        yield f"{count(len(recorded.ends), 'rank')}, norms of the lowest that has them"
    missing = recorded.missing_ranks
    if missing:
        ranks = ", ".join(map(str, missing[:_RANKS]))
        if len(missing) > _RANKS:
            ranks += " ..."
        yield f"no file of rank {ranks} is here, such as {database_name(missing[0])}"


def _rule_infos(
    planned: Iterable[Mapping[str, Any]], roles: Mapping[str, Any]
) -> dict[str, RuleInfo]:
    infos = {}
    for rule in planned:
        role = section(roles, rule["id"])
        kind = _kind(rule)
        if role.get("per") == "rule":
            kind = WHOLE
        logged: tuple[str, ...] = ()
        if kind == GRADIENT and STAT in role.get("stats", ()):
            logged = (*rule.get("params", ()), *rule.get("modules", ()))
        has_all_steps = "steps" not in role
        infos[rule["id"]] = RuleInfo(
            rule["action"], role.get("role", "edit"), logged, kind, has_all_steps
        )
    return infos


def _kind(rule: Mapping[str, Any]) -> str:
    """Return what a rule measures: the same word for all rules whose numbers can be compared."""
    tensor = rule.get("tensor") or "grad"
    if rule.get("hook") == "tag":
        return "tag gradient" if tensor == "grad" else "tag"
    base = base_of(tensor)
    return _KINDS.get(base, base)
