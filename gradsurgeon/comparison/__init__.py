"""Two runs that should agree: where they part, and by how much more than rounding explains. Needs numpy, not torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gradsurgeon._libraries import library
from gradsurgeon.report.run import open_run
from gradsurgeon.store.run import Run

if TYPE_CHECKING:
    from gradsurgeon.comparison.comparison import Comparison

Source = str | os.PathLike[str] | Run


def compare(
    run: Source,
    reference: Source,
    noise: Source | Sequence[Source] = (),
    renamed: str | os.PathLike[str] | Mapping[str, str] | None = None,
) -> Comparison:
    """Return where a run parts from a reference. Needs numpy, but no torch.

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
    from gradsurgeon.comparison.comparison import compared  # noqa: PLC0415 # needs numpy
    from gradsurgeon.comparison.reading import Words, read, renaming  # noqa: PLC0415 # the same

    sources = [noise] if isinstance(noise, str | os.PathLike | Run) else list(noise)
    with ExitStack() as stack:
        a, b, *more = (
            source if isinstance(source, Run) else stack.enter_context(open_run(source))
            for source in (run, reference, *sources)
        )
        words = Words()
        rename: Callable[[str], str] = str
        if renamed is not None:
            old, new = Words(), Words()
            read(b, old, str), read(a, new, str)
            rename = renaming(renamed, old.names, new.names)
        # The reference comes first: its names make the order.
        of_reference = read(b, words, rename)
        of_run = read(a, words, str)
        return compared(of_run, of_reference, [read(one, words, rename) for one in more], words)
