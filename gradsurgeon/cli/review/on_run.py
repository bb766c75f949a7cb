"""`--on RUN` of `plan` and `diff`: what rules would have done in a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gradsurgeon.language.planning import MatchedRules

if TYPE_CHECKING:
    from gradsurgeon.report.evidence.run_norms import RunNorms
    from gradsurgeon.report.evidence.told import Told


def run_at(path: str | None) -> RunNorms | None:
    """Return the norms of the run that was named, if one was."""
    if path is None:
        return None
    from gradsurgeon.report.evidence import norms_file, run_norms  # noqa: PLC0415 # needs numpy

    place = Path(path)
    if place.is_file():
        return norms_file.read(place)
    return run_norms.read(path)


def tried(
    rules: MatchedRules, run: RunNorms | None, open_bounds: frozenset[str] | None = None
) -> dict[str, Told]:
    """Return by rule what it would have done on the parameters that it matches; nothing without a run.

    With ``open_bounds``, the rules without a bound yet, also thresholds.
    """
    if run is None:
        return {}
    from gradsurgeon.report.evidence.trial import Trial  # noqa: PLC0415 # needs numpy

    return Trial(rules, run, open_bounds).told()
