"""The models of a script that trains several: each is a run inside the run of the first."""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from gradsurgeon.records.store.layout import runs_inside
from gradsurgeon.records.store.run import StoredRun
from gradsurgeon.report.run import open_run
from gradsurgeon.report.sources import model_title

RunOrPath = str | os.PathLike[str] | StoredRun
_PROCESS = re.compile(r"process-[0-9]+")


def models_of(source: RunOrPath, stack: ExitStack) -> dict[str, StoredRun]:
    """Return the runs of all models of a script by name, the first model first; the stack closes what it opens.

    Further models without records were never used.
    """
    run = source if isinstance(source, StoredRun) else stack.enter_context(open_run(source))
    models = {_title(run): run}
    for folder in runs_inside(run.path):
        inner = stack.enter_context(open_run(folder))
        name = _name_inside(folder.relative_to(run.path), _title(inner))
        has_records = any(inner)
        if name and has_records:
            models[name] = inner
    return models


def _title(run: StoredRun) -> str:
    return str(model_title(run.meta))


def _name_inside(place: Path, title: str) -> str:
    """Return the name of a further model, or of one of another process; none for a folder that a person named."""
    processes = list(place.parts)
    if processes[-1] == title:
        processes.pop()
    if all(map(_PROCESS.fullmatch, processes)):
        return "/".join([*processes, title])
    return ""


def counterparts(
    models: Mapping[str, StoredRun], others: Mapping[str, StoredRun]
) -> dict[str, StoredRun]:
    """Return the models of other runs by the same names; the first models go together if they have none."""
    same = {name: others[name] for name in models if name in others}
    first = next(iter(models))
    other = next(iter(others))
    if first not in same and other not in same:
        same[first] = others[other]
    return same
