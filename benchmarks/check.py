"""Whether costs have become worse: ratios of a fresh run beside those of an earlier one.

Milliseconds of two machines cannot be compared, ratios can, roughly. A ratio is worse when its median
lies above the earlier median by more than the sum of

* half of the distance between the quartiles, of both runs,
* what a bare step showed against itself in the fresh run,
* a tenth of the earlier median, because of what differs between runs though no line has changed: the
  order of blocks in memory, the clock of the processor, what else runs.

What looks worse is measured again, and counts only if it looks worse again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import overhead
from benchmarks.cases import BARE
from benchmarks.formatting import table
from benchmarks.overhead import Row
from benchmarks.targets import row_of
from benchmarks.workloads import WORKLOADS

_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Compared:
    """One ratio, then and now.

    Attributes:
        workload: it was measured on.
        case: the rules.
        ratio: key of the ratio.
        before: its median in the baseline.
        now: its median in the fresh run.
        allowed: the most that the fresh median may be.
    """

    workload: str
    case: str
    ratio: str
    before: float
    now: float
    allowed: float

    @property
    def worse(self) -> bool:
        """Whether it is more than noise."""
        return self.now > self.allowed


def compared(baseline: Sequence[Row], fresh: Sequence[Row]) -> Iterator[Compared]:
    """Yield the ratios of rules that both runs have.

    Args:
        baseline: rows of the earlier run.
        fresh: rows of this one.
    """
    keys = {workload.name: ratio_of(workload.name) for workload in WORKLOADS}
    for row in fresh:
        if row["group"] != overhead.GROUP or row["kind"] != "rules":
            continue
        place = {key: row[key] for key in ("group", "workload", "case")}
        before = row_of(baseline, **place)
        if before is None or before["kind"] != "rules":
            continue
        key = keys[row["workload"]]
        allowed = before[key]["median"] + _noise(before[key], row[key], _bare(fresh, row, key))
        yield Compared(
            row["workload"], row["case"], key, before[key]["median"], row[key]["median"], allowed
        )


def suspects(found: Iterable[Compared]) -> set[tuple[str, str]]:
    """Return what has to be measured again, with the bare steps that tell its noise."""
    worse = {(one.workload, one.case) for one in found if one.worse}
    return worse | {(workload, BARE.name) for workload, _ in worse}


def again(
    baseline: Sequence[Row],
    found: Sequence[Compared],
    measure: Callable[[set[tuple[str, str]]], Iterable[Row]],
) -> set[tuple[str, str]]:
    """Return what is worse in a second measurement as well.

    Args:
        baseline: rows of the earlier run.
        found: the first comparison.
        measure: makes rows of some workloads and cases anew.
    """
    doubtful = suspects(found)
    second = list(measure(doubtful)) if doubtful else []
    return {(one.workload, one.case) for one in compared(baseline, second) if one.worse}


def text_of(found: Sequence[Compared], confirmed: Collection[tuple[str, str]]) -> str:
    """Return a table of the comparison, and what it comes to."""
    rows = (
        (
            f"{one.workload}: {one.case}",
            one.ratio.replace("_ratio", ""),
            f"{one.before:.3f}",
            f"{one.now:.3f}",
            f"{one.allowed:.3f}",
            "WORSE" if (one.workload, one.case) in confirmed else "once" if one.worse else "",
        )
        for one in found
    )
    head = ("rules", "x", "baseline", "now", "allowed", "")
    return f"{table(head, rows)}\n{len(confirmed)} of {len(found)} ratios are worse.\n"


def ratio_of(workload: str) -> str:
    """Return the ratio that says most on a workload: of steps only where there is a real step."""
    forward = next(one.forward for one in WORKLOADS if one.name == workload)
    return "step_ratio" if forward else "clip_ratio"


def _bare(rows: Sequence[Row], row: Row, key: str) -> float:
    """Return what the same step showed against itself, in the units of a ratio."""
    noise = row_of(rows, workload=row["workload"], case=BARE.name)
    if noise is None:
        return 0.0
    none = 1.0 if key == "step_ratio" else 0.0
    return max(abs(float(noise[key][end]) - none) for end in ("low", "high"))


def _noise(before: Any, now: Any, bare: float) -> float:
    halves = sum((ratio["high"] - ratio["low"]) / 2 for ratio in (before, now))
    return float(halves + bare + _SHARE * abs(before["median"]))
