"""The format of a run directory: file names, tables, and the layout of values; the job that a run is of.

`run.json` describes the run. Each rank has one SQLite file, and `state-RANK.pt` to resume from. A row of measurements is one blob of
little-endian float32 over all tensors of its series. The id of a row is ``series << 32 | number``, so
rows are clustered by series: reading one series does not touch the others, and needs no index.
"""

import json
import math
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

FORMAT = 3
APPLICATION = 0x67737267  # "gsrg", in the header of every file
RUN_FILE = "run.json"
# Processes and models of one script make two levels, and people sort their runs into folders.
_DEEPEST = 6
SERIES_BITS = 32
# A row of 500 parameters fills the default pages of 4 kB badly, and a row of 600 wastes half of them.
PAGE = 16384
# JSON has no numbers for these. Protocol Buffers spell them so.
_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}
# Lists of names in the entries of rules and parameters in `run.json`.
_NAME_LISTS = ("aliases", "params", "modules", "stats")

TABLES = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "series": (
        "CREATE TABLE series (id INTEGER PRIMARY KEY, rule TEXT NOT NULL, stat TEXT NOT NULL, "
        "point TEXT NOT NULL, names TEXT NOT NULL)"
    ),
    "rows": (
        "CREATE TABLE rows (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, floats BLOB NOT NULL, "
        "absent BLOB)"
    ),
    "events": (
        "CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, "
        "rule TEXT NOT NULL, step INTEGER NOT NULL, rank INTEGER NOT NULL, name TEXT NOT NULL, "
        "message TEXT NOT NULL, more TEXT)"
    ),
    "statuses": "CREATE TABLE statuses (rule TEXT PRIMARY KEY, state TEXT NOT NULL)",
}
# The table of events of earlier versions has no column for further keys.
EVENTS_WITHOUT_MORE = TABLES["events"].replace(", more TEXT)", ")")


def database_name(rank: int) -> str:
    return f"rank-{rank}.db"


def state_name(rank: int | str) -> str:
    return f"state-{rank}.pt"


def row_id(series: int, number: int) -> int:
    return (series << SERIES_BITS) + number


def pack_absent(absent: Collection[int], width: int) -> bytes | None:
    """Return a bit mask of the columns without a value, ``None`` if all columns have one."""
    if not absent:
        return None
    bits = sum(1 << column for column in absent)
    return bits.to_bytes(absent_size(width), "little")


def is_present(absent: bytes | None, column: int) -> bool:
    return absent is None or not absent[column >> 3] >> (column & 7) & 1


def absent_size(width: int) -> int:
    return (width + 7) // 8


Stored = tuple[int, bytes, bytes | None]  # step, values, absent columns


def clean(text: str) -> str:
    """Return a text that SQLite accepts: lone surrogates, as in odd file names, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def section(meta: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a mapping inside a mapping that was read from a file, empty if there is none."""
    return dict(meta.get(key, {}))


def has_types(meta: Mapping[str, Any]) -> bool:
    """Tell whether the entries of `run.json` that readers look into have their types."""
    try:
        model = section(meta, "model")
        params = model.get("params", []) + model.get("modules", [])
        rules = section(meta, "plan").get("rules", [])
        entries = params + rules + [*section(meta, "roles").values()]
        names = [entry["name"] for entry in params]
        for entry in entries:
            for key in _NAME_LISTS:
                names += entry.get(key, [])
        are_named = all({"id", "action"} <= rule.keys() for rule in rules)
        return are_named and all(isinstance(name, str) for name in names)
    except (AttributeError, KeyError, TypeError):
        return False


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return strict JSON of printable ASCII. Control characters are escapes."""
    return json.dumps(value, indent=indent, allow_nan=False)


def json_number(value: float) -> float | str:
    """Return a number for JSON. NaN and infinity become texts."""
    if math.isfinite(value):
        return float(digits(value))
    return _NAMES.get(value, "NaN")


def digits(value: float) -> str:
    """Return nine digits, enough to tell every float32 from the next."""
    return f"{value:.9g}"


def job() -> dict[str, str]:
    """Return what identifies this start of ranks, nothing if there are no ranks."""
    if "RANK" not in os.environ:
        return {}
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return {
        "host": platform.node(),
        "parent": str(os.getppid()),
        "launch": "/".join(os.environ.get(name, "") for name in names),
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    }


def job_size() -> int:
    """Return the number of ranks that were started together, 1 of a process that was started alone."""
    number = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and number.isdecimal():
        return int(number)
    return 1


def is_taken(folder: Path) -> bool:
    """Return whether a directory holds a run of another job."""
    ours = job()
    if not ours:
        return (folder / RUN_FILE).exists()
    # A later attempt is a restart of this job.
    return ours["attempt"] == "0" and is_of_another_start(folder)


def is_of_another_start(folder: Path) -> bool:
    """Return whether a directory holds a run of an earlier start of ranks."""
    file = folder / RUN_FILE
    ours = job()
    if not ours or not file.exists():
        return False
    try:
        theirs = dict(json.loads(file.read_bytes())["job"])
    except (OSError, ValueError, TypeError, KeyError):
        theirs = {}  # a run of a single process, or one that is being removed
    start = "launch"
    if theirs.get("host") == ours["host"]:
        start = "parent"
    return any(theirs.get(key) != ours[key] for key in ("attempt", start))


def runs_inside(folder: Path) -> list[Path]:
    """Return the runs in the folders below; a link leads elsewhere and is not followed."""
    runs = []
    for name, below, files in os.walk(folder):
        place = Path(name)
        if RUN_FILE in files and place != folder:
            runs.append(place)
        if len(place.parts) - len(folder.parts) == _DEEPEST:
            below.clear()
    return sorted(runs)
