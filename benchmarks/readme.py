"""The parts of two READMEs that are made of results: what a reader of them compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    formatting,
    like_for_like,
    overhead,
    rule_sets,
    scaling,
    step_alone,
    throughput,
)
from benchmarks.cases import BARE
from benchmarks.formatting import duration, number, spread, table
from benchmarks.machine import ROOT
from benchmarks.overhead import Row
from benchmarks.report import (
    about_machine,
    commands,
    main_rows,
    rows_of,
    targets,
    without_waits,
)
from benchmarks.results import Result
from benchmarks.targets import judged
from benchmarks.workloads import WORKLOADS

BEGIN = "<!-- benchmarks: begin; `python -m benchmarks --render` writes this -->\n"
END = "<!-- benchmarks: end -->\n"
PAGE, FRONT = ROOT / "benchmarks" / "README.md", ROOT / "README.md"
# What the front page shows: observing, a clip as well, and what people turn on in trouble.
_FRONT = (rule_sets.OBSERVE, rule_sets.CLIP_BITES, "detect_anomaly")


def _by_workload(
    head: str, rows: Sequence[Row], key: str, show: Callable[[Row], str], *, by: str = "workload"
) -> str:
    """Return a table with a line per value of ``key`` and a column per workload."""
    columns = list(dict.fromkeys(row[by] for row in rows))
    cells = {(row[key], row[by]): show(row) for row in rows}
    names = dict.fromkeys(row[key] for row in rows)
    lines = ([name, *(cells.get((name, column), "") for column in columns)] for name in names)
    return table([head, *columns], lines)


def _steps(result: Result) -> str:
    rows = [row for one in WORKLOADS for row in main_rows(result, one.name)]
    made = _by_workload(
        "x bare step", rows, "case", lambda row: number(row["step_ratio"]["median"])
    )
    skipped = [row for row in rows_of(result, overhead.GROUP) if "skipped" in row]
    told = dict.fromkeys(f"* {row['case']}: {row['skipped']}\n" for row in skipped)
    return made + ("\nNot measured:\n\n" + "".join(told)) * bool(told)


def _updates(result: Result) -> str:
    rows = rows_of(result, step_alone.GROUP)
    return _by_workload("x `clip_grad_norm_`", rows, "case", lambda row: spread(row["clip_ratio"]))


def _beside_others(result: Result) -> str:
    def show(row: Row) -> str:
        of_peer, of_floor = (_times(row[key]) for key in ("of_peer", "of_floor"))
        return f"{of_peer}, {of_floor}"

    rows = rows_of(result, like_for_like.GROUP)
    peers_of = {row["job"]: f"{row['cheapest']}; {row['floor']}" for row in rows}
    told = "".join(f"* {job}: {ways}\n" for job, ways in peers_of.items())
    made = _by_workload("x cheapest peer, x floor", rows, "job", show)
    return f"{made}\nThe peer and the floor of each:\n\n{told}"


def _times(ratio: float | None) -> str:
    return "noise" if ratio is None else number(ratio)


def _growth(result: Result) -> str:
    rows = rows_of(result, scaling.GROUP)
    lines = []
    for axis in dict.fromkeys(row["axis"] for row in rows):
        own = [row for row in rows if row["axis"] == axis]
        powers = scaling.exponents(own)
        told = ", ".join(f"{name} {power:.2f}" for name, power in powers.items())
        last = own[-1]
        cost = last["extra_us"]["median"] if "extra_us" in last else last["seconds"] * 1e6
        at = [f"{row['at']:,}" for row in own]
        lines.append((own[0]["about"], f"{at[0]} to {at[-1]} {axis}", duration(cost), told))
    return table(("", "range", "extra time at the end", "exponents"), lines)


_SECTIONS: tuple[tuple[str, str, Callable[[Result], str]], ...] = (
    ("Targets", "", targets),
    ("A step under rules and under others", overhead.GROUP, _steps),
    ("Without a wait between steps", throughput.GROUP, without_waits),
    ("The update alone", step_alone.GROUP, _updates),
    ("The same work by others", like_for_like.GROUP, _beside_others),
    ("How it grows", scaling.GROUP, _growth),
    ("Without training", "startup", commands),
)


def page(shown: Sequence[tuple[Path, Result]]) -> str:
    """Return the generated part of `benchmarks/README.md`."""
    return "\n".join(_device(path, result) for path, result in shown)


def _device(path: Path, result: Result) -> str:
    note = f"\n**Note:** {result['note']}\n" if result.get("note") else ""
    parts = [
        f"## {result['machine']['device']}\n\nFrom [{path.name}](results/{path.name}); "
        f"`python -m benchmarks --show` prints all that is in it.\n\n"
        f"{about_machine(result)}.\n{note}"
    ]
    parts += [
        f"### {title}\n\n{section(result)}"
        for title, group, section in _SECTIONS
        if not group or rows_of(result, group)
    ]
    return "\n".join(parts)


def front(shown: Sequence[tuple[Path, Result]]) -> str:
    """Return the generated part of the front page: steps with rules beside steps with peers."""
    of_kind = {result["machine"]["kind"]: result for _, result in shown}
    return _front(of_kind["cpu"], of_kind.get("cuda"))


def _front(result: Result, cuda: Result | None) -> str:
    names = [one.name for one in WORKLOADS if one.forward and main_rows(result, one.name)]
    ratios = {
        (row["case"], name): f"{row['step_ratio']['median']:.2f}"
        for name in names
        for row in main_rows(result, name)
    }
    cases = [case for case in _FRONT if (case, names[0]) in ratios]
    noise = sorted(ratios[BARE.name, name] for name in names)
    on_cuda = dict.fromkeys(cases, "not run")
    if cuda is not None:
        for row in main_rows(cuda, "gpt2"):
            on_cuda[row["case"]] = f"{row['step_ratio']['median']:.2f}"
    rows = (
        [case, *(ratios.get((case, name), "") for name in names), on_cuda[case]] for case in cases
    )
    found = judged(result["rows"], result["machine"]["kind"])
    met = sum(one.verdict == "met" for one in found)
    known = sum(one.value is not None for one in found)
    head = f"Relative step time (1.00 = no instrumentation) on {about_machine(result)}:\n\n"
    tail = f"\nThe step without anything, measured again, takes {noise[0]} to {noise[-1]}. "
    tail += f"{met} of the {known} targets measured there are met."
    if cuda is not None:
        tail += f" CUDA: gpt2 in bfloat16 on {about_machine(cuda)}."
    return f"{head}{table(['', *names, 'CUDA'], rows)}{tail}\n"


def filled(text: str, made: str) -> str:
    """Return a page with its generated part replaced.

    Raises:
        ValueError: it has no place for one.
    """
    lacking = f"the page lacks the lines {BEGIN!r} and {END!r}"
    return formatting.filled(text, BEGIN, made, END, lacking)


def rendered(shown: Sequence[tuple[Path, Result]]) -> dict[Path, str]:
    """Return the two pages as they should be, by path."""
    made = {PAGE: page(shown), FRONT: front(shown)}
    return {path: filled(path.read_text(encoding="utf-8"), text) for path, text in made.items()}
