"""What `run.json` says of a run: its rules, the names of its model, and where it ran."""

import platform
from datetime import UTC, datetime
from typing import Any

from gradsurgeon.language.planning import manifest_file
from gradsurgeon.language.planning.plan import Plan
from gradsurgeon.language.schema import VERSION
from gradsurgeon.records.store.layout import job, job_size


def describe(
    plan: Plan, *, mode: str, start_step: int, torch: str, ranks: int = 1, replicas: bool = False
) -> dict[str, Any]:
    """Return what `run.json` says of a run, as plain values; reports read it."""
    return {
        "gradsurgeon": VERSION,
        "torch": torch,
        "python": platform.python_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": job(),
        # A process may begin before the process group does.
        "ranks": max(ranks, job_size()),
        # Whether `DistributedDataParallel` held the model, so gradients and weights are alike on all ranks.
        "replicas": replicas,
        "mode": mode,
        "start_step": start_step,
        **about(plan),
    }


def about(plan: Plan) -> dict[str, Any]:
    """Return rules and model as `run.json` has them."""
    rules = plan.rules
    roles: dict[str, dict[str, Any]] = {}
    for rule in rules.rules:
        role = rule.role
        if rule.edits:
            # A trap that cuts gradients edits them.
            role = "edit"
        roles[rule.id] = {"role": role, "stats": list(getattr(rule, "stats", ()))}
        if role == "observe" and getattr(rule, "per", "") == "rule":
            roles[rule.id]["per"] = "rule"
        if "steps" in rule.model_fields_set:
            roles[rule.id]["steps"] = "some"
    files = [{"file": file, "text": text} for file, text in rules.files]
    return {
        "rules": {
            "file": rules.file,
            "text": rules.text,
            "sha256": rules.sha256,
            "files": files,
        },
        # The content of params.json, so rules can be bound to the names of a run, and what reports call the model.
        "model": {**manifest_file.to_dict(plan.manifest), "title": plan.subject},
        "plan": plan.to_dict(),
        "roles": roles,
    }
