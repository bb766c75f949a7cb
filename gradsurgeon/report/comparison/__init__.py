"""Two runs that should agree: where they part, and by how much more than rounding explains. Needs numpy, not torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from gradsurgeon.common._libraries import library
from gradsurgeon.records.store.run import StoredRun
from gradsurgeon.report.comparison.models import RunOrPath, counterparts, models_of

if TYPE_CHECKING:
    from gradsurgeon.report.comparison.comparison import Comparison


def compare(
    run: RunOrPath,
    reference: RunOrPath,
    noise: RunOrPath | Sequence[RunOrPath] = (),
    renamed: str | os.PathLike[str] | Mapping[str, str] | None = None,
) -> Comparison:
    """Return where a run parts from a reference. Needs numpy, but no torch.

    Each model of a script that trains several is compared with the model of its name.

    Args:
        run: a run directory, recorded with the rules ``gradsurgeon:fingerprint@1``.
        reference: the run that it should equal.
        noise: repetitions of the reference under ``gradsurgeon run --perturb 1e-6 --seed N``, which measure how far
            rounding alone goes: best three.
        renamed: the names that changed, from the reference to the run: a mapping, or a file with lines ``old: new``.
            A name stands for all names that begin with it.

    Raises:
        RecordError: a run cannot be read, has no fingerprints, or has no tensor or step in common with the reference.
        RuleFileError: the changed names are not those of the runs.
    """
    library("numpy", "report", "compare")
    from gradsurgeon.report.comparison.comparison import compared, of_models  # noqa: PLC0415 # needs numpy
    from gradsurgeon.report.comparison.reading import names_in, read, renaming  # noqa: PLC0415 # the same

    if isinstance(noise, str | os.PathLike | StoredRun):
        noise = [noise]
    with ExitStack() as stack:
        models, references, *noise_models = [
            models_of(source, stack) for source in (run, reference, *noise)
        ]
        rename: Callable[[str], str] = str
        if renamed is not None:
            old = names_in(references.values())
            rename = renaming(renamed, old, names_in(models.values()))
        same = counterparts(references, models)
        named = [counterparts(references, repetition) for repetition in noise_models]
        comparisons = []
        for name, model in same.items():
            of_noise = [read(noisy[name], rename) for noisy in named if name in noisy]
            comparison = compared(read(model), read(references[name], rename), of_noise)
            comparisons.append(replace(comparison, model=name))
        only_run = [name for name, model in models.items() if model not in same.values()]
        only_reference = [name for name in references if name not in same]
        return of_models(comparisons, only_run, only_reference)
