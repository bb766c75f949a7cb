"""Two losses over one trunk, of which one drowns the other, and what helps: ``python -m benchmarks.two_tasks``.

The network, the data and the loop are those of ``rules/stories/two_tasks.py``, with other rules, weights and seeds. A
seed decides about the first weights, the order of the batches and which images are there to test with.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

import torch

from benchmarks import two_tasks_page
from benchmarks.machine import ROOT

SEEDS = range(10)
EVERY = 50
SCRIPT = ROOT / "rules" / "stories" / "two_tasks.py"
SUM = "the plain sum"
# A rule file without rules is refused; this one changes nothing.
_LOOK: Mapping[str, Any] = {"id": "look", "action": "norm-log", "params": "digit.bias"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Attributes:
        name: what the table calls it.
        method: of `combine`; none where empty.
        weights: of the two losses.
        standardised: the ink is in units of its standard deviation, and has a mean of 0.
    """

    name: str
    method: str = ""
    weights: tuple[float, float] = (1.0, 1.0)
    standardised: bool = False


VARIANTS = (
    Variant("the digits alone", weights=(1.0, 0.0)),
    Variant("the ink alone", weights=(0.0, 1.0)),
    Variant(SUM),
    *(
        Variant(f"weight of the ink {weight:g}", weights=(1.0, weight))
        for weight in (0.1, 0.01, 0.001, 0.0001, 0.00001)
    ),
    Variant("ink standardised, the plain sum", standardised=True),
    *(Variant(f"`method: {name}`", name) for name in ("pcgrad", "upgrad", "aligned-mtl", "imtl-g")),
)


def script() -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def rules(method: str) -> dict[str, Any]:
    """Return what makes one gradient of both in the trunk; what only looks where no method is given."""
    both = {"id": "surgery", "action": "combine", "losses": ["digit", "ink"], "params": "trunk.*"}
    return {"version": 1, "rules": [both | {"method": method} if method else _LOOK]}


def trained(story: Any, variant: Variant, seeds: Sequence[int]) -> dict[str, Any]:
    """Train once per seed, and return what is said of the runs."""
    begin, runs, pairs = time.process_time(), [], []
    for seed in seeds:
        given: dict[str, Any] = {"rules": rules(variant.method)}
        if variant.name == SUM:
            # The rules of the story only look: bit by bit it is the plain sum.
            given = {"mode": "observe"}
        figures, session = story.train(
            seed=seed,
            weights=variant.weights,
            standardised=variant.standardised,
            every=EVERY,
            **given,
        )
        runs.append(figures)
        if variant.name == SUM:
            pairs.append(conflict(story, session))
    seconds = (time.process_time() - begin) / len(seeds)
    ends = [run[-1] for run in runs]
    row: dict[str, Any] = {"name": variant.name, "seconds": round(seconds, 2)}
    for place, what in enumerate(("digits", "ink")):
        values = [100 * end[place] for end in ends]
        means = (fmean(run[at][place] for run in runs) for at in range(len(runs[0])))
        row[what] = {
            "mean": round(fmean(values), 2),
            "sd": round(stdev(values), 2),
            "all": [round(value, 1) for value in values],
            "by_step": [round(100 * mean, 1) for mean in means],
        }
    if pairs:
        row["conflict"] = {key: round(fmean(one[key] for one in pairs), 3) for key in pairs[0]}
    return row


def conflict(story: Any, session: Any) -> dict[str, float]:
    """Return what `conflict` has recorded: how often the two point apart, how far, and how unequal they are."""
    cosines, ratios = story.pair(session, "cosine"), story.pair(session, "ratio")
    return {
        "opposed": fmean(cosine < 0 for cosine in cosines),
        "cosine": median(cosines),
        "times_smaller": 1 / median(ratios),
    }


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Run all variants, one after the other, and return what is said of them."""
    torch.set_num_threads(1)
    story, rows = script(), []
    for variant in VARIANTS:
        rows.append(trained(story, variant, seeds))
        short = {key: rows[-1][key] for key in ("name", "seconds")}
        ends = {what: (rows[-1][what]["mean"], rows[-1][what]["sd"]) for what in ("digits", "ink")}
        print(short | ends, file=sys.stderr, flush=True)
    head = {"torch": str(torch.__version__), "seeds": len(seeds), "steps": story.STEPS}
    return head | {"every": EVERY, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or only draw what is committed; write the results, the picture, and the table of the guide."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_tasks", description=__doc__)
    parser.add_argument(
        "--render", action="store_true", help="only draw and write anew from the committed results"
    )
    if not parser.parse_args(argv).render:
        text = two_tasks_page.dumps(measure())
        two_tasks_page.RESULTS.parent.mkdir(exist_ok=True)
        two_tasks_page.RESULTS.write_text(text, encoding="utf-8")
    found = json.loads(two_tasks_page.RESULTS.read_text(encoding="utf-8"))
    two_tasks_page.draw(found, two_tasks_page.PICTURE)
    guide = two_tasks_page.GUIDE.read_text(encoding="utf-8")
    two_tasks_page.GUIDE.write_text(two_tasks_page.with_table(guide, found), encoding="utf-8")
    print(two_tasks_page.table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
