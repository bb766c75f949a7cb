"""The command line of the suite."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import (
    check,
    device_counts,
    floors,
    like_for_like,
    overhead,
    ranks,
    readme,
    report,
    results,
    scaling,
    startup,
    step_alone,
    surgery,
    throughput,
)
from benchmarks.cases import BARE
from benchmarks.machine import describe, devices, keep_freed_memory, versions
from benchmarks.overhead import Row
from benchmarks.results import Result, ResultError
from benchmarks.workloads import WORKLOADS

Pair = tuple[str, str]
Group = Callable[..., Iterator[Row]]
GROUPS: dict[str, Group] = {
    overhead.GROUP: overhead.measured,
    throughput.GROUP: throughput.measured,
    step_alone.GROUP: step_alone.measured,
    like_for_like.GROUP: like_for_like.measured,
    surgery.GROUP: surgery.measured,
    floors.GROUP: floors.measured,
    scaling.GROUP: scaling.measured,
    device_counts.GROUP: device_counts.measured,
    ranks.GROUP: ranks.measured,
    startup.GROUP: startup.measured,
}
_NAMES = (*GROUPS, *(workload.name for workload in WORKLOADS))
# Can be measured on single workloads.
_BY_WORKLOAD = (throughput.GROUP, like_for_like.GROUP, floors.GROUP)
# These do not depend on the device: one result has them.
_ON_HOST = (ranks.GROUP, startup.GROUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; return 0, 1 where ratios are worse, 2 where it could not do its work.

    Args:
        argv: the arguments, those of the process if not given.
    """
    arguments = _parser().parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        if arguments.list:
            return _list()
        if arguments.render:
            return _render()
        if arguments.show is not None:
            return _show(arguments.show)
        if arguments.check is not None:
            return _check(arguments)
        return _merge(arguments.merge, arguments.out) if arguments.merge else _run(arguments)
    except ResultError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what gradsurgeon costs on this machine, beside what people use without it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quick", action="store_true", help="less of everything: three to five minutes"
    )
    parser.add_argument(
        "--only", action="append", choices=_NAMES, metavar="NAME",
        help="a group or a workload, as --list shows them; may be repeated: groups are measured on the named workloads",
    )  # fmt: skip
    parser.add_argument(
        "--case", metavar="TEXT",
        help="only the cases of overhead that have TEXT in their name, and the bare step",
    )  # fmt: skip
    parser.add_argument(
        "--device",
        choices=devices(),
        help="default: every kind that is present, one after the other",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="where the JSON goes; without it, a full run goes to benchmarks/results/, others nowhere",
    )  # fmt: skip
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--list", action="store_true", help="show what can be measured, and stop")
    other.add_argument(
        "--render", action="store_true", help="write the tables of the two READMEs anew, and stop"
    )
    other.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE",
        help="write the rows of several runs on one machine to the one file --out, and stop",
    )  # fmt: skip
    other.add_argument(
        "--show", nargs="?", const="", metavar="FILE",
        help="print all tables of FILE, or of the newest committed result, and stop",
    )  # fmt: skip
    other.add_argument(
        "--check", nargs="?", const="", metavar="FILE",
        help="compare the ratios of a quick run with those of FILE, or of the newest committed result; "
        "exit with 1 where they are worse",
    )  # fmt: skip
    return parser


def _list() -> int:
    for name in GROUPS:
        print(name)
    for workload, cases in overhead.planned(quick=False):
        mark = " (quick)" if workload.quick else ""
        print(f"\n{workload.name}{mark}: {workload.about}")
        for case in cases:
            print(f"  {case.name}")
    return 0


def _render() -> int:
    shown = results.shown()
    if not shown:
        raise ResultError(f"{results.FOLDER} has no full result to show")
    for path, text in readme.rendered(shown).items():
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


def _show(file: str) -> int:
    path = Path(file) if file else results.baseline(devices()[0])
    print(report.report(results.load(path)))
    return 0


def _merge(files: Sequence[Path], out: Path | None) -> int:
    if out is None:
        raise ResultError("--merge needs --out FILE")
    result = results.merged([results.load(file) for file in files])
    out.write_text(results.dumps(result), encoding="utf-8")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    chosen = [arguments.device] if arguments.device else devices()
    used, date = versions(), datetime.now(tz=UTC).date().isoformat()
    # An hour later would be too late to find that nothing can be drawn or written.
    places = [_place(arguments, device, date, several=len(chosen) > 1) for device in chosen]
    for device, path in zip(chosen, places, strict=True):
        begin = time.monotonic()
        failed: dict[str, Exception] = {}
        rows = list(_told(_rows(device, arguments, failed, host=device == chosen[0])))
        seconds = time.monotonic() - begin
        result = results.new(
            device, rows, versions=used, date=date, quick=arguments.quick, seconds=seconds
        )
        print(report.report(result))
        if path is not None:
            path.write_text(results.dumps(result), encoding="utf-8")
            print(f"written: {path}", file=sys.stderr)
        if path is not None and path.parent == results.FOLDER:
            print("`python -m benchmarks --render` puts it into the READMEs", file=sys.stderr)
        if failed:
            told = [f"{name} ({type(error).__name__}: {error})" for name, error in failed.items()]
            raise ResultError(f"not measured, all else is: {'; '.join(told)}")
    return 0


def _place(arguments: argparse.Namespace, device: str, date: str, *, several: bool) -> Path | None:
    """Return where the JSON goes, ``None`` if nowhere.

    Args:
        arguments: of the command line.
        device: kind of device.
        date: of the run.
        several: there is one file per kind of device.
    """
    path: Path | None = arguments.out
    if path is not None and several:
        path = path.with_stem(f"{path.stem}-{device}")
    whole = not arguments.quick and arguments.only is None and arguments.case is None
    if path is None and whole:
        path = results.place(device, date)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.exists()
            path.touch()
            if not there:
                path.unlink()  # an empty file would be read as a damaged one
        except OSError as error:
            raise ResultError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _rows(
    device: str, arguments: argparse.Namespace, failed: dict[str, Exception], *, host: bool
) -> Iterator[Row]:
    """Yield what is wanted, one row after the other; a group that raises goes to ``failed``, and the next begins."""
    quick: bool = arguments.quick
    pairs = _pairs(arguments, quick=quick)
    named = arguments.only or ()
    groups = [name for name in GROUPS if name in named]
    if pairs is not None and (not groups or overhead.GROUP in groups):
        yield from overhead.measured(device, quick=quick, only=pairs)
    whole = arguments.only is None and arguments.case is None
    for name, group in GROUPS.items():
        wanted = whole or (name in groups and not (pairs and name == overhead.GROUP))
        workloads = {"only": set(named) - set(groups)} if name in _BY_WORKLOAD else {}
        if wanted and (host or name not in _ON_HOST):
            try:
                yield from group(device, quick=quick, **workloads)
            except Exception as error:  # noqa: BLE001 # an hour of other groups must not be lost
                failed[name] = error


def _pairs(arguments: argparse.Namespace, *, quick: bool) -> set[Pair] | None:
    """Return the workloads and cases that are named, the bare step with each; ``None`` if none are."""
    names = arguments.only or ()
    named = [workload.name for workload in WORKLOADS if workload.name in names]
    if arguments.case is None and not named:
        return None
    text = arguments.case or ""
    return {
        (workload.name, case.name)
        for workload, cases in overhead.planned(quick=quick and not named)
        for case in cases
        if (workload.name in named or not named) and (text in case.name or case is BARE)
    }


def _told(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows, telling of each: a full run takes its time."""
    begin = time.monotonic()
    for row in rows:
        words = " | ".join(str(row[key]) for key in results.NAMING if key in row)
        print(f"{time.monotonic() - begin:7.1f} s  {words}", file=sys.stderr, flush=True)
        yield row


def _check(arguments: argparse.Namespace) -> int:
    device = arguments.device or devices()[0]
    path = Path(arguments.check) if arguments.check else results.baseline(device)
    known = results.load(path)
    _warn_of_differences(known, device)

    def measure(only: Collection[Pair]) -> Iterator[Row]:
        return _told(overhead.measured(device, quick=True, only=only))

    named = _pairs(arguments, quick=True)
    wanted = {
        (workload.name, case.name)
        for workload, cases in overhead.planned(quick=named is None)
        for case in cases
        if case.kind != "peer" and (named is None or (workload.name, case.name) in named)
    }
    found = list(check.compared(known["rows"], list(measure(wanted))))
    if not found:
        raise ResultError(
            f"{path}: it has none of what was measured now, so nothing can be compared"
        )
    confirmed = check.again(known["rows"], found, measure)
    print(check.text_of(found, confirmed))
    return 1 if confirmed else 0


def _warn_of_differences(known: Result, device: str) -> None:
    used, machine = versions(), describe(device)
    pairs = (
        ("device", known["machine"].get("device"), machine["device"]),
        ("torch", known["versions"].get("torch"), used["torch"]),
        ("python", known["versions"].get("python"), used["python"]),
    )
    for what, before, now in pairs:
        if before != now:
            text = f"note: the baseline has {what} {before}, this is {now}: that alone moves ratios"
            print(text, file=sys.stderr)
