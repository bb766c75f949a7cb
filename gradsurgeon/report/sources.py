"""Reports of a session and of a run directory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradsurgeon.common._libraries import is_installed
from gradsurgeon.common.events import settled
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.run_json import about
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.layout import database_name, section
from gradsurgeon.report.ending import ending_of
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import GRADIENT, STAT, UPDATES, WEIGHTS, RuleInfo, edits_of

if TYPE_CHECKING:
    from gradsurgeon.records.store.run import Run

_RANKS = 8  # so many that lack a file are named
# Where in a tensor of several parts: `output[0].grad`, `output.logits`.
_PART = re.compile(r"^(input|output)[^ ]*?(\.grad)?$")


def summary(session: Any) -> Report:
    """Return the report of a `Session`, running or removed, or of a `Run`. Waits for the device."""
    if hasattr(session, "ranks"):
        return from_run(session)
    plan = session.plan
    attachment = session._attachment  # noqa: SLF001 # what a report needs is nothing for users
    described, pending = about(plan), attachment.pending_steps()
    series = [Part(one, pending) for one in attachment.records]
    return Report(
        title=_title(described),
        params=tuple(param.name for param in plan.manifest.params),
        rules=_rule_infos(described["plan"]["rules"], described["roles"]),
        statuses={rule: settled(one, pending) for rule, one in session.status().items()},
        series=[(one, frozenset()) for one in series],
        of_all_ranks=series,
        dropped=attachment.records.dropped,
        events=tuple(session.events),
        start=attachment.context.counters.start,
        end=session.step,
        observed=attachment.options.mode == "observe",
        frozen=dict(_frozen(described)),
    )


def from_run(run: Run, *, newest: int | None = None) -> Report:
    """Return the report of an open run, finished or still being written, or of its `newest` rows. Reads all it needs."""
    report = unread(run, newest)
    if is_installed("numpy"):
        if len(run.ranks) > 1:
            from gradsurgeon.report.norms import ranks_that_differ  # noqa: PLC0415 # needs numpy

            kinds = {rule: info.kind for rule, info in report.rules.items()}
            report = replace(report, ranks=ranks_that_differ(run, kinds, newest))
        # The files may be closed before somebody looks at the report.
        _ = report.steps, report.history.tracks, report.history.gradients, report.losses
    return report


def unread(run: Run, newest: int | None = None) -> Report:
    """Return the report of an open run that reads rows when they are asked for, and compares no ranks."""
    from gradsurgeon.records.store.captures import captures  # noqa: PLC0415 # it needs SQLite
    from gradsurgeon.records.store.run import missing_ranks, of_lowest_ranks  # noqa: PLC0415 # it needs SQLite

    captured, problem = captures(run)
    rules = _rule_infos(run.rules, section(run.meta, "roles"))
    observed, pending = run.meta.get("mode") == "observe", run.pending
    # A rank that is still writing may add a series between the two.
    lowest = list(of_lowest_ranks(run))
    parts = {one: Part(one, pending, newest) for one in run}
    kept = []
    for one in captured:
        tensors = count(len(one["tensors"]) + one["more"], "tensor")
        kept.append(f"captures kept by {printable(one['rule'])}: {tensors}; `--html` shows them")
    return Report(
        title=_title(run.meta),
        params=run.params,
        rules=rules,
        statuses={rule: settled(one, pending) for rule, one in run.status().items()},
        series=[(parts[one], repeated) for one, repeated in lowest],
        of_all_ranks=[*parts.values()],
        events=tuple(run.events),
        notes=(*_notes(run, missing_ranks(run), observed=observed), *filter(None, [problem])),
        start=run.meta.get("start_step"),
        captures=tuple(kept),
        observed=observed,
        ended=ending_of(run, edits_of(rules)),
        frozen=dict(_frozen(run.meta)),
    )


def _title(meta: Mapping[str, Any]) -> str:
    rules, model = section(meta, "rules"), section(meta, "model")
    return f"{rules.get('file', '?')} on {model.get('title') or model.get('origin', '?')}"


def _notes(run: Run, missing: Sequence[int], *, observed: bool) -> Iterator[str]:
    if observed:
        yield "observed only: no rule changed anything"
    if len(run.ranks) > 1:
        yield f"{len(run.ranks)} ranks, norms of the lowest that has them"
    if missing:
        more = " ..." * (len(missing) > _RANKS)
        ranks = ", ".join(map(str, missing[:_RANKS])) + more
        yield f"no file of rank {ranks} is here, such as {database_name(missing[0])}"


def _frozen(meta: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for param in section(meta, "model").get("params", ()):
        if param.get("requires_grad") is False:
            yield param["name"], param["numel"]


def _rule_infos(
    planned: Iterable[Mapping[str, Any]], roles: Mapping[str, Any]
) -> dict[str, RuleInfo]:
    found = {}
    for rule in planned:
        role = section(roles, rule["id"])
        names = (*rule.get("params", ()), *rule.get("modules", ()))
        kind = _kind(rule.get("tensor") or "grad", is_tag=rule.get("hook") == "tag")
        is_logged = STAT in role.get("stats", ()) and kind == GRADIENT
        found[rule["id"]] = RuleInfo(
            action=rule["action"],
            role=role.get("role", "edit"),
            logged=names if is_logged else (),
            kind=kind,
        )
    return found


def _kind(tensor: str, *, is_tag: bool) -> str:
    """Return what a rule measures: the same word for all rules whose numbers can be compared."""
    if is_tag:
        return "tag gradient" if tensor == "grad" else "tag"
    if (match := _PART.match(tensor)) is not None:
        return match[1] + " gradient" * bool(match[2])
    return {"grad": GRADIENT, "value": WEIGHTS, "update": UPDATES}.get(tensor, tensor)
