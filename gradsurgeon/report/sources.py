"""Reports of a session and of a run directory, and what `run.json` says of a run."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from gradsurgeon._libraries import is_installed
from gradsurgeon.actions import Rule
from gradsurgeon.errors import printable
from gradsurgeon.planning import Plan
from gradsurgeon.planning.table import count
from gradsurgeon.report.ending import ending_of
from gradsurgeon.report.names import Session
from gradsurgeon.report.report import Report
from gradsurgeon.report.rules_and_events import GRADIENT, LOSS_STATS, STAT, RuleInfo
from gradsurgeon.schema import VERSION
from gradsurgeon.store import job
from gradsurgeon.store.layout import section

if TYPE_CHECKING:
    from gradsurgeon.store.captures import CapturedByRule
    from gradsurgeon.store.run import Run

# Where in a tensor of several parts: `output[0].grad`, `output.logits`.
_PART = re.compile(r"^(input|output)[^ ]*?(\.grad)?$")


def summary(session: Session | Run) -> Report:
    """Return the report of a session, running or removed, or of a run. Waits for the device."""
    if hasattr(session, "ranks"):
        return from_run(cast("Run", session))
    plan = session.plan
    attachment = session._attachment  # noqa: SLF001 # what a report needs is nothing for users
    rules = {
        rule.id: RuleInfo(
            action=rule.action,
            role=_role(rule),
            logged=tuple(binding.name for binding in plan.of(rule.id))
            if rule.target == "params" and STAT in getattr(rule, "stats", ())
            else (),
            losses=_losses(rule, plan),
            kind=_kind(rule.target == "tensors", getattr(rule, "tensor", None) or "grad"),
        )
        for rule in plan.rules.rules
    }
    frozen = {param.name: param.numel for param in plan.manifest.params if not param.requires_grad}
    return Report(
        title=f"{plan.rules.file} on {plan.subject}",
        params=tuple(param.name for param in plan.manifest.params),
        rules=rules,
        statuses=session.status(),
        records=attachment.records,
        events=tuple(session.events),
        start=attachment.options.start_step,
        end=session.step,
        observed=attachment.options.mode == "observe",
        frozen=frozen,
        pending=attachment.pending_steps(),
    )


def _kind(is_tag: bool, tensor: str) -> str:  # noqa: FBT001 # one of two
    """Return what a rule measures: the same word for all rules whose numbers can be compared."""
    if is_tag:
        return "tag gradient" if tensor == "grad" else "tag"
    if (match := _PART.match(tensor)) is not None:
        return match[1] + " gradient" * bool(match[2])
    return {"grad": GRADIENT, "value": "weight"}.get(tensor, tensor)


def _losses(rule: Rule, plan: Plan) -> tuple[str, ...]:
    """Return what the numbers of a rule are between: losses, or the modules that send gradients back."""
    if not LOSS_STATS.intersection(getattr(rule, "stats", ())):
        return ()
    return getattr(rule, "losses", None) or tuple(binding.name for binding in plan.of(rule.id))


def _role(rule: Rule) -> str:
    """Return what a rule is to a reader: a trap that cuts gradients edits them."""
    return "edit" if rule.edits else rule.role


def from_run(run: Run, *, newest: int | None = None) -> Report:
    """Return the report of a run directory, finished or still being written. Reads all that it needs.

    Args:
        run: open.
        newest: read only so many of the newest rows of each series.
    """
    report = unread(run, newest)
    report = replace(report, ranks=_ranks(run, report.rules, newest))
    if is_installed("numpy"):
        # The files may be closed before somebody looks at the report.
        _ = report.steps, report.history.tracks, report.losses
    return report


def unread(run: Run, newest: int | None = None) -> Report:
    """Return the report of an open run that reads rows when they are asked for, and compares no ranks."""
    from gradsurgeon.store.captures import captures  # noqa: PLC0415 # it needs SQLite
    from gradsurgeon.store.run import of_lowest_ranks  # noqa: PLC0415 # it needs SQLite

    start = run.meta.get("start_step")
    captured, problem = captures(run)
    rules = rule_infos(run)
    return Report(
        title=title_of(run),
        params=run.params,
        rules=rules,
        statuses=run.status(),
        stored=list(of_lowest_ranks(run)),
        events=tuple(run.events),
        notes=(*_notes(run), *([problem] if problem else [])),
        start=start if isinstance(start, int) else None,
        captures=tuple(_capture_lines(captured)),
        observed=run.meta.get("mode") == "observe",
        ended=ending_of(run),
        frozen=dict(_frozen(run)),
        pending=run.pending,
        newest=newest,
    )


def _frozen(run: Run) -> Iterator[tuple[str, int]]:
    for param in _list(section(run.meta, "model").get("params")):
        if isinstance(param, dict) and param.get("requires_grad") is False:
            numel = param.get("numel")
            yield str(param.get("name")), numel if isinstance(numel, int) else 0


def _ranks(run: Run, rules: Mapping[str, RuleInfo], newest: int | None) -> str:
    if len(run.ranks) == 1 or not is_installed("numpy"):
        return ""
    from gradsurgeon.report.ranks import ranks_that_differ  # noqa: PLC0415 # needs numpy

    return ranks_that_differ(run, {rule: info.kind for rule, info in rules.items()}, newest)


def _capture_lines(captured: Sequence[CapturedByRule]) -> Iterator[str]:
    for one in captured:
        steps = sorted({tensor.step for tensor in one.tensors})
        of = f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]}..{steps[-1]}"
        tensors = count(len(one.tensors) + one.more, "tensor")
        yield f"captures kept by {printable(one.rule)}: {tensors} of {of}; `--html` shows them"


def rule_infos(run: Run) -> dict[str, RuleInfo]:
    roles, stats = section(run.meta, "roles"), run.stats
    return {
        rule["id"]: RuleInfo(
            action=rule["action"],
            role=str(section(roles, rule["id"]).get("role", "edit")),
            logged=run.names_of(rule["id"]) if STAT in stats.get(rule["id"], ()) else (),
            losses=_losses_in(section(roles, rule["id"]), run.names_of(rule["id"])),
            kind=_kind(rule.get("hook") == "tag", str(rule.get("tensor") or "grad")),
        )
        for rule in run.rules
    }


def _losses_in(role: Mapping[str, Any], bound: Sequence[str]) -> tuple[str, ...]:
    if LOSS_STATS.isdisjoint(map(str, _list(role.get("stats")))):
        return ()
    return tuple(map(str, _list(role.get("losses")) or bound))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def title_of(run: Run) -> str:
    rules, model = section(run.meta, "rules"), section(run.meta, "model")
    return f"{rules.get('file', '?')} on {model.get('title') or model.get('origin', '?')}"


def _notes(run: Run) -> tuple[str, ...]:
    notes = []
    if run.meta.get("mode") == "observe":
        notes.append("observed only: no rule changed anything")
    if len(run.ranks) > 1:
        notes.append(f"{len(run.ranks)} ranks, norms of the lowest that has them")
    return tuple(notes)


def describe(plan: Plan, *, mode: str, start_step: int, torch: str) -> dict[str, Any]:
    """Return what `run.json` says of a run, as plain values; `from_run` reads it."""
    rules = plan.rules
    return {
        "gradsurgeon": VERSION,
        "torch": torch,
        "python": platform.python_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": job.current(),
        "mode": mode,
        "start_step": start_step,
        "rules": {
            "file": rules.file,
            "text": rules.text,
            "sha256": rules.sha256,
            "files": [{"file": file, "text": text} for file, text in rules.files],
        },
        "model": {
            "origin": plan.manifest.origin,
            "title": plan.subject,
            "params": [
                {
                    "name": param.name,
                    "aliases": list(param.aliases),
                    **(
                        {}
                        if param.requires_grad
                        else {"requires_grad": False, "numel": param.numel}
                    ),
                }
                for param in plan.manifest.params
            ],
            "aliases": {
                alias: module.name for module in plan.manifest.modules for alias in module.aliases
            },
        },
        "plan": plan.to_dict(),
        "roles": {
            rule.id: {
                "role": _role(rule),
                "stats": list(getattr(rule, "stats", ())),
                **({"losses": list(losses)} if (losses := getattr(rule, "losses", None)) else {}),
            }
            for rule in rules.rules
        },
    }
