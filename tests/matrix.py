"""The scripts of `tests/scripts`: how each is called, and what training it does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from launching import Case, Trained
from pairs import slow

TABLE = Path(__file__).parent / "cases" / "scripts.yaml"

# The scripts of the quick suite, of which the first one starts a process.
QUICK = (
    "plain loop",
    "package",
    "gan",
    "LBFGS",
    "distillation",
    "scaler",
    "exception",
    "SIGTERM",
)


def scripts(names: Iterable[str]) -> list[Any]:
    """Return scripts as parameters of a test: those of the quick suite, and the rest as slow ones."""
    known = list(names)
    quick = [name for name in QUICK if name in known]
    return [*quick, *slow(*(name for name in known if name not in quick))]


def _case(words: list[str], models: list[list[Any]], **more: Any) -> Case:
    return Case(tuple(words), tuple(Trained(*model) for model in models), **more)


CASES = {name: _case(**entry) for name, entry in yaml.safe_load(TABLE.read_text()).items()}
