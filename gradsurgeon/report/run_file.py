"""What `run.json` says of a run, written here and read by `from_run`."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

from gradsurgeon.planning import Plan
from gradsurgeon.schema import VERSION
from gradsurgeon.store import job


def describe(plan: Plan, *, mode: str, start_step: int, torch: str) -> dict[str, Any]:
    """Return what a run directory says of its run, as plain values.

    Args:
        plan: the rules as bound to the model.
        mode: ``act`` or ``observe``.
        start_step: number of the first update.
        torch: version of torch.
    """
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
                {"name": param.name, "aliases": list(param.aliases)}
                for param in plan.manifest.params
            ],
        },
        "plan": plan.to_dict(),
        "roles": {
            rule.id: {"role": rule.role, "stats": list(getattr(rule, "stats", ()))}
            for rule in rules.rules
        },
    }
