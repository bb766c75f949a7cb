"""How what surrounds training grows: reading rules, binding them, printing plans, keeping records."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradsurgeon
from benchmarks.measure import rounded
from gradsurgeon.common.match import compile_pattern
from gradsurgeon.language.planning import Manifest, Param
from gradsurgeon.language.schema import RuleSet
from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.memory import RecordedRow
from gradsurgeon.records.store.writer import RunWriter

Row = dict[str, Any]
Call = Callable[[], object]

# More rounds of what takes long would not make it more certain.
_ROUNDS, _ENOUGH_S = 5, 1.0
_TENSORS = 4
_KEY = Key("norms", "l2", "accumulated", tuple(f"layers.{number}.weight" for number in range(4)))
_ROW = bytes(4 * _TENSORS)


@dataclass(frozen=True, slots=True)
class Curve:
    """A call that is made on more and more of something.

    Attributes:
        name: what grows.
        about: what is called, and what stays as it is.
        places: where it is measured.
        quick: where in the quick mode.
        prepare: makes the call for a place.
        stored: from the place to the bytes that stay, where they say something.
    """

    name: str
    about: str
    places: tuple[int, ...]
    quick: tuple[int, ...]
    prepare: Callable[[int], Call]
    stored: Callable[[int], int] | None = None


def names(count: int) -> Manifest:
    """Return as many parameters, two in each layer."""
    params = (
        Param(f"model.layers.{layer}.mlp.{leaf}", (), (64,), "float32", True, ("Linear", "Module"))
        for layer in range(count // 2)
        for leaf in ("weight", "bias")
    )
    return Manifest("Model", tuple(params))


def sharing(count: int, layers: int) -> RuleSet:
    """Return rules that share layers between them; where there are too few, several take the same."""
    width = max(1, layers // count)
    starts = (number * width % layers for number in range(count))
    rules = [
        {
            "id": f"rule-{number}",
            "action": "scale",
            "params": f"model.layers.{{{start}..{start + width - 1}}}.*",
            "factor": 0.5,
        }
        for number, start in enumerate(starts)
    ]
    return gradsurgeon.load({"version": 1, "rules": rules})


def text(count: int) -> str:
    """Return a rule file with as many rules in the fewest words."""
    lines = (
        f'  - {{id: rule-{number}, action: norm-log, params: "model.layers.{number}.*"}}\n'
        for number in range(count)
    )
    return "version: 1\nrules:\n" + "".join(lines)


def _planning(params: int, rules: int) -> Call:
    manifest, chosen = names(params), sharing(rules, params // 2)
    return lambda: gradsurgeon.plan(manifest, chosen)


def _printing(params: int) -> Call:
    manifest, chosen = names(params), sharing(20, params // 2)
    # A plan keeps its chains once they have been asked for.
    return lambda: str(gradsurgeon.plan(manifest, chosen))


def _reading(rules: int) -> Call:
    file = text(rules)

    def read() -> RuleSet:
        # A process reads a file once: its patterns are not known from the round before.
        compile_pattern.cache_clear()
        return gradsurgeon.load(file)

    return read


def remembered(steps: int) -> Records:
    """Return the records in memory after so many steps, with one norm per tensor and step."""
    records = Records()
    for step in range(steps):
        records.add_row(RecordedRow(_KEY, step, bytes(bytearray(_ROW)), replace=True))
    return records


def in_memory(steps: int) -> int:
    """Return how many bytes the records in memory take after so many steps."""
    tracemalloc.start()
    try:
        records = remembered(steps)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    del records
    return taken


def on_disk(steps: int) -> int:
    """Return how many bytes a run directory takes that was written over so many steps."""
    with tempfile.TemporaryDirectory(prefix="gradsurgeon-benchmark-") as folder:
        path = Path(folder) / "run"
        writer = RunWriter(path)
        for step in range(steps):
            writer.add_row(RecordedRow(_KEY, step, _ROW, replace=True))
            if step % 1000 == 0:  # as many steps as a fast script makes in a second
                writer.commit()
        writer.close()
        return sum(file.stat().st_size for file in path.iterdir())


CURVES = (
    Curve(
        "parameters that are planned",
        "`plan`, 20 rules that share the parameters between them",
        (100, 1_000, 10_000, 100_000),
        (100, 1_000, 10_000),
        lambda place: _planning(place, 20),
    ),
    Curve(
        "rules that are planned",
        "`plan`, 100,000 parameters that the rules share between them",
        (1, 10, 100, 1_000, 10_000),
        (10, 1_000),
        lambda place: _planning(100_000, place),
    ),
    Curve(
        "parameters that are printed",
        "`plan` and the text of it, 20 rules",
        (100, 1_000, 10_000, 100_000),
        (100, 1_000, 10_000),
        _printing,
    ),
    Curve(
        "rules that are read",
        "`load` of a text, one short line per rule",
        (10, 100, 1_000, 10_000),
        (10, 100, 1_000),
        _reading,
    ),
    Curve(
        "steps in memory",
        f"records without a run directory, one norm of {_TENSORS} tensors per step",
        (1_000, 10_000, 100_000, 1_000_000),
        (1_000, 10_000),
        lambda place: partial(remembered, place),
        in_memory,
    ),
    Curve(
        "steps on disk",
        f"records in a run directory, one norm of {_TENSORS} tensors per step",
        (1_000, 10_000, 100_000, 1_000_000),
        (1_000, 10_000),
        lambda place: partial(on_disk, place),
    ),
)


def measured(curve: Curve, place: int) -> Row:
    """Return the seconds that a call computes at one place of a curve, and the bytes that stay."""
    call = curve.prepare(place)
    seconds: list[float] = []
    made: object = None
    while len(seconds) < _ROUNDS and sum(seconds) < _ENOUGH_S:
        begin = time.process_time()
        made = call()
        seconds.append(time.process_time() - begin)
    row: Row = {"seconds": rounded(statistics.median(seconds))}
    if isinstance(made, int):  # the size of what it wrote
        return row | {"bytes": made}
    return row if curve.stored is None else row | {"bytes": curve.stored(place)}


def rows(*, quick: bool) -> Iterator[Row]:
    """Yield one row per curve and place."""
    for curve in CURVES:
        for place in curve.quick if quick else curve.places:
            row = {"axis": curve.name, "about": curve.about, "at": place}
            yield row | measured(curve, place)
            gc.collect()
