"""The norms of a run as the report reads them, against a reading in plain Python, one record at a time."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from pairs import slow
from runs import add, meta, values

from gradsurgeon.records.store import Key, Part, Records
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report.history import History, WholeNorm
from gradsurgeon.report.sheets import NO_NORM
from gradsurgeon.report.spikes import LEAST_PAST, PAST, TIMES
from gradsurgeon.report.track import Track

NAN, INF = math.nan, math.inf
KINDS = {"norms": "gradient", "late": "gradient", "raw": "gradient", "acts": "output"}
POINTS = ["accumulated", "step", "backward", "forward"]
ORDER = tuple(f"p{number}" for number in range(6))

Row = tuple[int, dict[str, float]]  # a step, and what it has of each tensor
Recorded = Sequence[tuple[Key, Sequence[Row]]]
Place = tuple[str, str, str, str]  # kind, rule, point, name


def recorded(seed: int) -> list[tuple[Key, list[Row]]]:
    """Return series as sessions write them: tensors move, rules see the same ones, and steps have several records."""
    rng = random.Random(seed)
    steps = rng.randrange(3, 90)
    half = rng.randrange(1, steps)
    every, calls = rng.choice((1, 1, 3)), rng.choice((1, 2))
    series: list[tuple[str, str, tuple[str, ...], list[int]]] = [
        ("norms", "accumulated", ORDER[:4], list(range(0, half + 1, every))),
        # Another optimizer has claimed these; the step of the change is in both series.
        ("norms", "accumulated", ("p0",), list(range(half, steps, every))),
        ("norms", "accumulated", ("p1", "p2"), list(range(half, steps, every))),
        ("late", "step", ("p4", "p2"), list(range(steps))),
        ("raw", "backward", ("p4", "p5"), sorted([*range(steps)] * calls)),
        ("acts", "forward", ("m0", "m1"), sorted([*range(steps)] * calls)),
    ]
    dies = {name for name in (*ORDER, "m0", "m1") if rng.random() < 0.3}
    found = []
    for rule, point, names, at in series:
        rows: list[Row] = []
        for step in at:
            rows.append((step, {}))
            for name in names:
                if rng.random() < 0.85:
                    value = rng.lognormvariate(0.0, 0.3)
                    value *= 300.0 if rng.random() < 0.02 else 1.0
                    value = 0.0 if rng.random() < 0.05 or (name in dies and step > half) else value
                    value = rng.choice((NAN, INF)) if rng.random() < 0.03 else value
                    rows[-1][1][name] = float(np.float32(value))
        found.append((Key(rule, "l2", point, names), rows))
    return found


def add_to(target: Records | RunWriter, series: Recorded) -> None:
    for key, rows in series:
        for step, norms in rows:
            numbers = values(*(norms.get(name, 0.0) for name in key.names))
            absent = frozenset(i for i, name in enumerate(key.names) if name not in norms)
            add(target, key, step, numbers, absent)


def in_memory(series: Recorded) -> list[tuple[Part, frozenset[int]]]:
    records = Records(2**40)
    add_to(records, series)
    return [(Part(one, {}), frozenset()) for one in records]


def on_disk(path: Path, series: Recorded) -> None:
    writer = RunWriter(path, meta=meta())
    add_to(writer, series)
    writer.close()


# ---- the same in plain Python


def records_of(
    series: Recorded, newest: int | None = None
) -> dict[Place, list[tuple[int, float | None]]]:
    """Return every record of each tensor by kind, rule, point and name; `None` stands for no gradient."""
    rows: dict[Place, list[tuple[int, float | None]]] = {}
    for key, every in series:
        for name in key.names:
            seen = every[-newest:] if newest is not None else every
            if any(name in norms for _, norms in seen):
                place = (KINDS[key.rule], key.rule, key.point, name)
                rows.setdefault(place, []).extend((step, norms.get(name)) for step, norms in seen)
    found: dict[Place, list[tuple[int, float | None]]] = {}
    for place, records in rows.items():
        by_step: dict[int, list[float | None]] = {}
        for step, value in sorted(records, key=lambda one: one[0]):
            by_step.setdefault(step, []).append(value)
        found[place] = []
        for step, some in by_step.items():
            there = [value for value in some if value is not None] or some
            if place[2] in ("accumulated", "step"):
                there = there[-1:]
            found[place] += [(step, value) for value in there]
    return found


def shown_of(found: Mapping[Place, object]) -> dict[tuple[str, str], Place]:
    best: dict[tuple[str, str], Place] = {}
    for place in sorted(found, key=lambda one: (POINTS.index(one[2]), list(KINDS).index(one[1]))):
        best.setdefault((place[0], place[3]), place)
    return best


class Facts(NamedTuple):
    first: float
    median: float
    largest: float
    last: float
    nonfinite_steps: list[int]
    zero_since: int | None
    spike: tuple[int, float, float] | None


def facts_of(records: Sequence[tuple[int, float | None]]) -> Facts:
    there = [(step, value) for step, value in records if value is not None]
    finite = [(step, value) for step, value in there if math.isfinite(value)]
    numbers = [value for _, value in finite]
    bad = [step for step, value in there if not math.isfinite(value)]
    return Facts(
        there[0][1],
        statistics.median(numbers) if numbers else NAN,
        max(numbers, default=NAN),
        there[-1][1],
        bad,
        zero_since(there),
        spike_of(finite),
    )


def zero_since(there: Sequence[tuple[int, float]]) -> int | None:
    alive = [place for place, (_, value) in enumerate(there) if value != 0]
    if not alive:
        return None
    pause = max(b - a for a, b in zip([-1, *alive], alive, strict=False))
    rest = there[alive[-1] + 1 :]
    return rest[0][0] if len(rest) >= max(8, 3 * pause) else None


def spike_of(finite: Sequence[tuple[int, float]]) -> tuple[int, float, float] | None:
    numbers = [value for _, value in finite]
    best: tuple[int, float, float] | None = None
    for place in range(LEAST_PAST, len(numbers)):
        past, peak = numbers[max(0, place - PAST) : place], numbers[place]
        usual = statistics.median(past)
        if usual <= 0 or peak <= TIMES * usual:
            continue
        near = numbers[place + 1 : place + 9]
        if len(near) < 3:
            falls = peak > TIMES * max(past[-8:])
        else:
            falls = peak > 3 * statistics.median(near)
        if falls and stands_out(past, peak) and (best is None or peak / usual > best[2]):
            best = finite[place][0], peak, peak / usual
    return best


def stands_out(past: Sequence[float], peak: float) -> bool:
    """Return whether a norm is six deviations above the median of the norms before it, and three times all of them."""
    middle = math.log(statistics.median(past))
    apart = [abs(math.log(value) - middle) for value in past if value]
    above = math.log(peak) - middle
    return above > 6 * 1.4826 * statistics.median(apart) and peak > 3 * max(past)


def wholes_of(
    series: Recorded, newest: int | None = None
) -> Iterator[tuple[set[str], list[int], list[float]]]:
    """Yield the names, steps and values of each whole norm of gradients."""
    found = records_of(series, newest)
    groups: dict[tuple[object, ...], dict[str, list[tuple[int, float | None]]]] = {}
    for (kind, name), place in shown_of(found).items():
        if kind == "gradient":
            key = (place[2], *(step for step, _ in found[place]))
            groups.setdefault(key, {})[name] = found[place]
    for group in groups.values():
        steps, sums = [], []
        for records in zip(*group.values(), strict=True):
            norms = [value for _, value in records if value is not None]
            if norms:
                is_finite = all(map(math.isfinite, norms))
                steps.append(records[0][0])
                sums.append(math.sqrt(sum(value**2 for value in norms)) if is_finite else NAN)
        yield set(group), steps, sums


# ---- comparisons


def same(one: float, other: float) -> bool:
    return one == pytest.approx(other, rel=1e-6, nan_ok=True)


def hold(track: Track, records: Sequence[tuple[int, float | None]]) -> None:
    facts, found = facts_of(records), track.spike
    for field in ("first", "median", "largest", "last"):
        assert same(getattr(track, field), getattr(facts, field)), (track.name, field, facts)
    assert track.nonfinite_steps.tolist() == facts.nonfinite_steps
    assert track.zero_since == facts.zero_since
    assert (found is None) == (facts.spike is None), (track.name, found, facts.spike)
    if found is not None and facts.spike is not None:
        assert found.step == facts.spike[0]
        assert same(found.value, facts.spike[1])
        assert same(found.times, facts.spike[2])
    assert [step for step, _ in records] == track.steps.tolist()
    for norm, (_, value) in zip(track.norms.tolist(), records, strict=True):
        if value is None:
            assert norm == NO_NORM
        else:
            assert same(norm, value)


def hold_wholes(
    found: Sequence[WholeNorm], expected: Sequence[tuple[set[str], list[int], list[float]]]
) -> None:
    def order(one: tuple[set[str], list[int], list[float]]) -> str:
        return f"{sorted(one[0])} {one[1]}"

    plain = [(set(one.names), one.steps.tolist(), one.norms.tolist()) for one in found]
    for one, other in zip(sorted(plain, key=order), sorted(expected, key=order), strict=True):
        assert one[:2] == other[:2]
        assert all(map(same, np.nan_to_num(one[2], posinf=NAN, nan=NAN), other[2]))


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 30))])
@pytest.mark.parametrize("newest", [None, 20])
def test_every_number_is_that_of_the_records(tmp_path: Path, seed: int, newest: int | None) -> None:
    series = recorded(seed)
    expected = records_of(series, newest)
    shown = shown_of(expected)
    on_disk(tmp_path, series)
    with open_run(tmp_path) as run:
        sources: list[list[tuple[Part, frozenset[int]]]] = [
            [(Part(one, {}, newest), repeated) for one, repeated in of_lowest_ranks(run)]
        ]
        # A session in memory shows all its rows.
        sources += [in_memory(series)] * (newest is None)
        for source in sources:
            history = History(source, KINDS, ORDER)
            assert history.rows_of_a_column == 1
            assert {
                pair: (pair[0], one.rule, one.point, pair[1]) for pair, one in history.shown.items()
            } == shown
            names = [track.name for track in history.tracks_of("gradient")]
            assert names == [name for name in ORDER if name in names]
            for track in history.tracks:
                hold(track, expected[shown[track.origin.kind, track.name]])
            hold_wholes(history.gradients, list(wholes_of(series, newest)))
