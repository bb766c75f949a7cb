"""Rules from the records of a healthy run. Each threshold would have bitten in a share of its steps."""

from gradsurgeon._libraries import library
from gradsurgeon.store.run import Run
from gradsurgeon.suggestion.result import MARK, Suggestion

__all__ = ["MARK", "Suggestion", "suggest"]


def suggest(run: Run, share: float) -> Suggestion:
    """Return rules whose thresholds would have bitten in a share of the steps of a run.

    Raises:
        GradSurgeonError: numpy is missing.
        RecordError: the run has no norms of parameters, or too few.
    """
    library("numpy", "report", "suggest")
    from gradsurgeon.suggestion import stages  # noqa: PLC0415 # needs numpy

    return stages.suggest(run, share)
