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
from runs import meta, values

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
            target.add(key, step, numbers, absent)


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
    shown = shown_of(records_of(series, newest))
    groups: dict[tuple[object, ...], list[tuple[Sequence[Row], list[str]]]] = {}
    for key, every in series:
        rows = every[-newest:] if newest is not None else every
        names = [
            name
            for name in key.names
            if shown.get(("gradient", name), ("", "", "", ""))[1:3] == (key.rule, key.point)
            and KINDS[key.rule] == "gradient"
        ]
        if names:
            groups.setdefault((key.point, *(step for step, _ in rows)), []).append((rows, names))
    for group in groups.values():
        steps, sums = [], []
        for rows in zip(*(rows for rows, _ in group), strict=True):
            norms = [
                row[1][name]
                for row, (_, names) in zip(rows, group, strict=True)
                for name in names
                if name in row[1]
            ]
            if norms:
                is_finite = all(map(math.isfinite, norms))
                steps.append(rows[0][0])
                sums.append(math.sqrt(sum(value**2 for value in norms)) if is_finite else NAN)
        yield {name for _, names in group for name in names}, steps, sums


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


STEPS, FEW = 4000, 8


def calm(seed: int) -> list[float | None]:
    rng = random.Random(seed)
    return [float(np.float32(rng.lognormvariate(0.0, 0.3))) for _ in range(STEPS)]


def with_some(history: Sequence[float | None], **at: float | None) -> list[float | None]:
    changed = {int(step.removeprefix("s")): value for step, value in at.items()}
    return [changed.get(step, value) for step, value in enumerate(history)]


def long_histories() -> dict[str, list[float | None]]:
    return {
        "calm": calm(1),
        "spike at an edge": with_some(calm(3), s1024=1e3),
        "spike among zeros": with_some(calm(6), s700=0.0, s2000=0.0, s2050=1e3, s3000=0.0),
        "spike where others rest": [
            value if step % 3 or step == 2049 else None
            for step, value in enumerate(with_some(calm(7), s2049=1e3))
        ],
        "broken": with_some(calm(8), s1234=NAN, s1300=INF, s3333=NAN),
        "late": [*[None] * 1500, *calm(10)[1500:]],
        "early": calm(11)[:1500] + [None] * 2500,
        "died at an edge": calm(12)[:2560] + [0.0] * (STEPS - 2560),
        "died late": calm(14)[: STEPS - 40] + [0.0] * 40,
        # As an expert that is rarely chosen, within a cell and over several of them.
        "often at rest": [
            *(1.0 if step % 60 == 0 else 0.0 for step in range(STEPS - 50)),
            *[0.0] * 50,
        ],
        "never": [None] * STEPS,
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 480 * FEW + 1, STEPS])
def test_a_long_run_has_the_numbers_of_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    histories = {name: values[:number] for name, values in long_histories().items()}
    names = tuple(histories)
    rows: list[Row] = [
        (step, {name: norms[step] for name, norms in histories.items() if norms[step] is not None})  # type: ignore[misc]
        for step in range(number)
    ]
    # Before the first update nobody knows the optimizers, each of which has a series of its own.
    key, before = (Key("norms", "l2", "accumulated", (*names, *more)) for more in ((), ("x",)))
    half = number // 2
    on_disk(tmp_path, [(before, rows[:half]), (key, rows[half:])])
    # The last pass waits for its update.
    seen = [(before, rows[:half]), (key, rows[half:-1])]
    expected = records_of(seen)
    monkeypatch.setattr("gradsurgeon.report.history.MOST_VALUES", number * len(names) // FEW)
    with open_run(tmp_path) as run:
        waiting = {names[0]: number - 1}
        parts = [(Part(one, waiting), repeated) for one, repeated in of_lowest_ranks(run)]
        history = History(parts, KINDS, names)
        tracks = {track.name: track for track in history.tracks}
        wholes = history.gradients
    assert history.rows_of_a_column > 1
    assert list(tracks) == [
        name for name in names if ("gradient", "norms", "accumulated", name) in expected
    ]
    for name, track in tracks.items():
        facts = facts_of(expected["gradient", "norms", "accumulated", name])
        few = history.rows_of_a_column
        if "rest" not in name and name != "died late":
            assert (track.zero_since is None) == (facts.zero_since is None), name
        if track.zero_since is not None and facts.zero_since is not None:
            # The report says so: steps are exact to a few rows.
            assert 0 <= track.zero_since - facts.zero_since < few, name
        if track.spike is not None and facts.spike is not None:
            assert 0 <= facts.spike[0] - track.spike.step < few, name
            assert same(track.spike.value, facts.spike[1]), name
        broken = facts.nonfinite_steps
        assert len(broken) / few <= len(track.nonfinite_steps) <= len(broken), name
        for at in (0, -1) if broken else ():
            assert 0 <= broken[at] - track.nonfinite_steps[at] < few, name
        assert same(track.largest, facts.largest), name
        if name.startswith("spike") and facts.spike is not None:
            assert track.spike is not None, name
        # The largest of a few norms.
        assert not track.median < facts.median * (1 - 1e-6), name
    exact = [norm for _, _, norms in wholes_of(seen) for norm in norms if not math.isnan(norm)]
    bound = max(exact, default=0.0) / (1 + 1e-6)
    # The largest norms of a few steps together are no smaller than the norm of each of these steps.
    tops = np.concatenate([whole.norms for whole in wholes])
    assert bound <= np.max(tops, where=np.isfinite(tops), initial=0.0) <= 2 * bound
