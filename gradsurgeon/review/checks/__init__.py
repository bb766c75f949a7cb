"""The checks of `gradsurgeon lint` on what rules mean: one file each, found by looking into this folder."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from gradsurgeon.review.checks._base import Check, Finding

__all__ = ["CHECKS", "Check", "Finding"]


def _discover() -> dict[str, Check]:
    checks: dict[str, Check] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        module = import_module(f"{__name__}.{info.name}")
        class_name = "".join(word.capitalize() for word in info.name.split("_"))
        check: Check = getattr(module, class_name)()
        checks[check.id] = check
    return checks


CHECKS: dict[str, Check] = _discover()
