"""What `run.json` says of a run: its rules, the names of its model, and where it ran."""

import platform
from datetime import UTC, datetime
from typing import Any

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
    params = []
    for param in plan.manifest.params:
        frozen = {} if param.requires_grad else {"requires_grad": False, "numel": param.numel}
        dtype = {} if param.dtype == "float32" else {"dtype": param.dtype}
        params.append({"name": param.name, "aliases": list(param.aliases), **dtype, **frozen})
    roles = {}
    for rule in rules.rules:
        roles[rule.id] = {
            # A trap that cuts gradients edits them.
            "role": "edit" if rule.edits else rule.role,
            "stats": list(getattr(rule, "stats", ())),
        }
    return {
        "rules": {
            "file": rules.file,
            "text": rules.text,
            "sha256": rules.sha256,
            "files": [{"file": file, "text": text} for file, text in rules.files],
        },
        "model": {
            "origin": plan.manifest.origin,
            "title": plan.subject,
            "params": params,
            "aliases": {
                alias: module.name for module in plan.manifest.modules for alias in module.aliases
            },
        },
        "plan": plan.to_dict(),
        "roles": roles,
    }
