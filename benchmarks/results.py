"""Files of results: what is in them, where they lie, which of them the tables show."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

Result = dict[str, Any]

FOLDER = Path(__file__).with_name("results")
FORMAT = 1
# What tells a row from others.
NAMING = ("group", "workload", "case", "job", "axis", "at", "params", "dtypes", "world", "wrapper", "what")  # fmt: skip


class ResultError(Exception):
    """A file that is no result of this suite."""


def new(
    device: str,
    rows: list[dict[str, Any]],
    *,
    versions: dict[str, str],
    date: str,
    quick: bool,
    seconds: float,
) -> Result:
    """Return a result.

    Args:
        device: kind of device.
        rows: what was measured.
        versions: of all that took part, as they were when it began.
        date: of the run, as ``2026-01-31``.
        quick: it was the quick mode.
        seconds: how long it took.
    """
    return {
        "format": FORMAT,
        "date": date,
        "quick": quick,
        "minutes": round(seconds / 60, 1),
        "machine": machine.describe(device),
        "versions": versions,
        "rows": rows,
    }


def merged(results: Sequence[Result]) -> Result:
    """Return one result of several runs on one machine; a later row replaces that of the same thing.

    Raises:
        ResultError: they are of several machines or versions.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        if any(result[key] != results[0][key] for key in ("machine", "versions")):
            raise ResultError("the files are of several machines or versions")
        rows |= {tuple(row.get(key) for key in NAMING): row for row in result["rows"]}
    minutes = sum(result["minutes"] for result in results)
    return results[0] | {"minutes": round(minutes, 1), "rows": [*rows.values()]}


def place(device: str, date: str) -> Path:
    """Return where a result lies by default: by date and name of the device."""
    name = machine.describe(device)["device"]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return FOLDER / f"{date}-{slug or device}.json"


def dumps(result: Result) -> str:
    """Return the text of a file: one line per row, so that a change of one is a change of one line."""
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    text = json.dumps(head, indent=1).removesuffix("\n}")
    return f'{text},\n "rows": [\n  {rows}\n ]\n}}\n'


def load(path: Path) -> Result:
    """Read a file.

    Raises:
        ResultError: it cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: no results can be read from it: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ResultError(
            f"{path}: this is no file of results in format {FORMAT}; `python -m benchmarks --out FILE` "
            "writes one"
        )
    return found


def shown(folder: Path = FOLDER) -> list[tuple[Path, Result]]:
    """Return the newest full result of each kind of device, which is what the tables are made from."""
    found: dict[str, tuple[Path, Result]] = {}
    for path in sorted(folder.glob("*.json")):  # the date comes first
        result = load(path)
        if not result["quick"]:
            found[result["machine"]["kind"]] = (path, result)
    return [found[kind] for kind in sorted(found)]


def baseline(device: str, folder: Path = FOLDER) -> Path:
    """Return the file that is shown for a kind of device, and compared with.

    Raises:
        ResultError: there is none.
    """
    for path, result in shown(folder):
        if result["machine"]["kind"] == device:
            return path
    raise ResultError(
        f"{folder} has no full result for {device}: name a file, such as --check FILE"
    )
