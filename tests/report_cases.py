"""Runs as data: a file under ``cases/reports`` says what was recorded, and what report, screen, JSON and page tell of it.

`of` gives the norms of each tensor, step by step: ``1x3 (2 4)x2 nan -`` is three ones, 2 4 2 4, NaN and a step without a
gradient. A name such as ``p{0..7}`` stands for several. Of `json` and `page`, a key such as ``kinds.0.map.names`` is a place inside.
"""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from ranks import Json
from runs import add, meta, values

from gradsurgeon.common.events import Event, RuleStatus
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter

FOLDER = Path(__file__).parent / "cases" / "reports"
FILES = sorted(FOLDER.glob("*.yaml"))
# Local time, as it is shown: rank 0 wrote last at noon, each further rank a minute earlier.
NOON = datetime(2030, 1, 1, 12).astimezone().timestamp()


def read(file: Path) -> Json:
    case: Json = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return case


def history(text: object) -> list[float | None]:
    """Return the norms that a text says, ``None`` where there is no gradient."""
    flat = re.sub(r"\(([^)]*)\)x(\d+)", lambda one: f"{one[1]} " * int(one[2]), str(text))
    found: list[float | None] = []
    for word in flat.split():
        value, _, times = word.partition("x")
        number = None if value == "-" else float(value)
        found += [number] * int(times or 1)
    return found


def histories(of: Json) -> dict[str, list[float | None]]:
    found = {}
    for name, text in of.items():
        numbers = re.search(r"\{(\d+)\.\.(\d+)\}", name)
        if numbers is None:
            found[name] = history(text)
            continue
        for number in range(int(numbers[1]), int(numbers[2]) + 1):
            found[name.replace(numbers[0], str(number))] = history(text)
    return found


def add_series(writer: RunWriter, one: Json) -> None:
    columns = histories(one["of"])
    point = one.get("point", "accumulated")
    key = Key(one.get("rule", "norms"), one.get("stat", "l2"), point, tuple(columns))
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        step = one["steps"][number] if "steps" in one else one.get("from", 0) + number
        absent = frozenset(place for place, value in enumerate(row) if value is None)
        add(writer, key, step, values(*(value or 0.0 for value in row)), absent)


def add_events(writer: RunWriter, one: Json) -> None:
    """Write an event, or one in each of several steps, whose number stands for ``{n}``."""
    given = {"rule": "", "step": 0, "rank": writer.rank, "name": "", "message": "", **one}
    first, times = given["step"], given.pop("times", 1)
    for step in range(first, first + times):
        texts = {word: given[word].replace("{n}", str(step)) for word in ("name", "message")}
        writer.event(Event(**{**given, **texts, "step": step}))


def record(path: Path, case: Json) -> list[RunWriter]:
    """Write the run of a case; return the writers, which are closed unless it goes on."""
    series = case.get("series", [])
    known = dict.fromkeys(name for one in series for name in histories(one["of"]))
    about = meta(case.get("params", list(known)), **case.get("meta", {}))
    writers = [RunWriter(path, rank=rank, meta=about) for rank in range(case.get("ranks", 1))]
    for one in series:
        add_series(writers[one.get("rank", 0)], one)
    statuses = {rule: RuleStatus(*given) for rule, given in case.get("statuses", {}).items()}
    writers[0].statuses(statuses)
    for one in case.get("events", []):
        add_events(writers[one.get("rank", 0)], one)
    for writer in writers:
        writer.commit()
        end = case.get("ends", {}).get(writer.rank, {})
        if end != "running":
            writer.close(end)
            os.utime(path / f"rank-{writer.rank}.db", (NOON, NOON - 60 * writer.rank))
    return writers


def inside(whole: Any, place: str) -> Any:
    """Return a part of values that JSON has."""
    for word in place.split("."):
        whole = whole[int(word) if word.isdigit() else word]
    return whole


def parts(whole: Any, wanted: Json) -> Json:
    """Return of values that JSON has the parts that a case names."""
    plain = json.loads(json.dumps(whole, allow_nan=False))
    return {place: inside(plain, place) for place in wanted}
