"""Everything that a result has, as tables: what the suite prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import (
    device_counts,
    floors,
    like_for_like,
    overhead,
    ranks,
    rule_sets,
    scaling,
    startup,
    step_alone,
    surgery,
    throughput,
)
from benchmarks.formatting import duration, number, size, spread, table
from benchmarks.machine import PEERS
from benchmarks.overhead import Row
from benchmarks.results import Result
from benchmarks.targets import Judged, judged
from benchmarks.workloads import WORKLOADS


def about_machine(result: Result) -> str:
    """Return the machine and the versions in one line."""
    machine, versions = result["machine"], result["versions"]
    threads = f"{machine['threads']} thread" if machine["kind"] == "cpu" else machine["kind"]
    return (
        f"{machine['device']} ({machine['cores']} cores, {machine['memory_gb']} GB, {threads}), "
        f"{machine['system']}, torch {versions['torch']}, Python {versions['python']}, {result['date']}"
    )


def rows_of(result: Result, group: str) -> list[Row]:
    return [row for row in result["rows"] if row["group"] == group]


def main_rows(result: Result, workload: str) -> list[Row]:
    """Return the rows of a workload without those of single actions, where there are numbers."""
    single = {title for title, _ in rule_sets.alone()}
    rows = [row for row in rows_of(result, overhead.GROUP) if row["workload"] == workload]
    return [row for row in rows if row["case"] not in single and "skipped" not in row]


def targets(result: Result) -> str:
    """Return the table of targets."""
    found = judged(result["rows"], result["machine"]["kind"])
    shown = [one for one in found if one.value is not None or one.target.only == "cuda"]
    return table(("what", "unit", "at most", "measured", ""), map(_target, shown))


def _target(one: Judged) -> tuple[str, ...]:
    target, value = one.target, one.value
    limit = number(target.limit)
    if value is not None and value.limit is not None:
        limit = f"{limit} within noise: {value.limit:.3f}"
    if value is None:
        return target.what, target.unit, limit, "", one.why or one.verdict
    measured = f"{value.median:.3g}"
    if value.low != value.high:
        measured += f" ({value.low:.3g} to {value.high:.3g})"
    return target.what, target.unit, limit, measured, f"**{one.verdict}**"


def costs(result: Result) -> str:
    """Return one table per workload: what rules and peers cost on top of its step."""
    parts = []
    for workload in WORKLOADS:
        rows = [row for row in rows_of(result, overhead.GROUP) if row["workload"] == workload.name]
        numbers = [row for row in rows if "skipped" not in row]
        if numbers:
            step = duration(numbers[0]["base_us"]["median"])
            parts.append(f"**{workload.name}**: {workload.about}; the bare step takes {step}.\n")
            parts.append(_costs(rows, waits=result["machine"]["kind"] == "cuda"))
    return "\n".join(parts)


def _costs(rows: Sequence[Row], *, waits: bool) -> str:
    head = [
        "",
        "extra",
        "mean extra",
        "x step",
        "x clip",
        "peak memory",
        "allocations",
        "host reads",
    ]
    return table([*head, "waits"] if waits else head, [_cost(row, waits=waits) for row in rows])


def _cost(row: Row, *, waits: bool) -> list[str]:
    name = row["case"] if row["kind"] != "rules" else f"**{row['case']}**"
    if "skipped" in row:
        return [name, row["skipped"], *[""] * (7 if waits else 6)]
    ratio = row["step_ratio"]
    cells = [
        name,
        duration(row["extra_us"]["median"]),
        duration(row["mean_extra_us"]),
        f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
        spread(row["clip_ratio"]),
        size(row["peak_bytes"]),
        f"{row['allocations']:,}",
        f"{row['reads']:,}",
    ]
    return [*cells, str(row["waits"])] if waits else cells


def jobs(result: Result, group: str = like_for_like.GROUP) -> str:
    """Return one table per workload: our way to do a job, beside others and the floor."""
    parts = []
    for workload in WORKLOADS:
        rows = [row for row in rows_of(result, group) if row["workload"] == workload.name]
        if rows:
            parts.append(f"**{workload.name}**: {workload.about}.\n")
            head = ("", "ours", "cheapest peer", "x peer", "floor", "x floor", "others")
            parts.append(table(head, map(_job, rows)))
    return "\n".join(parts)


def without_waits(result: Result) -> str:
    """Return what a step costs where nothing waits between steps."""
    rows = rows_of(result, throughput.GROUP)
    head = ("", "", "x step", "peak memory")
    return table(head, (
        (row["workload"], row["case"], spread(row["step_ratio"]), size(row["peak_bytes"]))
        for row in rows
    ))  # fmt: skip


def beside_floors(result: Result) -> str:
    """Return what the pack and forensics cost, beside the least that has to be done for it."""
    kinds = ("step_ratio", "floor_ratio", "beside_floor")
    rows = [
        (row["workload"], row["job"], *(spread(row[kind]) for kind in kinds))
        for row in rows_of(result, floors.GROUP)
    ]
    return table(("", "", "x step", "floor, x step", "x floor"), rows)


def _job(row: Row) -> tuple[str, ...]:
    cheapest = row["cheapest"]
    others = [f"{name} {_median(of)}" for name, of in row["peers_us"].items() if name != cheapest]
    others += [f"{name}: {why}" for name, why in row["missing"].items()]
    return (
        row["job"],
        _median(row["extra_us"]),
        f"{cheapest} {_median(row['peers_us'][cheapest])}",
        _times(row["of_peer"]),
        f"{row['floor']} {_median(row['floor_us'])}",
        _times(row["of_floor"]),
        "; ".join(others),
    )


def _median(numbers: Any) -> str:
    return duration(numbers["median"])


def _times(ratio: float | None) -> str:
    return "within noise" if ratio is None else f"**{number(ratio)}**"


def growth(result: Result) -> str:
    """Return the tables of how costs grow, each with its exponents."""
    parts = []
    rows = rows_of(result, scaling.GROUP)
    for axis in dict.fromkeys(row["axis"] for row in rows):
        own = [row for row in rows if row["axis"] == axis]
        about = own[0]["about"]
        parts.append(f"{about[0].upper()}{about[1:]}:\n")
        columns = _COLUMNS if "extra_us" in own[0] else _CALL_COLUMNS
        shown = {name: show for name, show in columns.items() if show(own[0])}
        lines = ((f"{row['at']:,}", *(show(row) for show in shown.values())) for row in own)
        parts.append(table((axis, *shown), lines))
        powers = ", ".join(f"{name} {power:.2f}" for name, power in scaling.exponents(own).items())
        if powers:
            parts.append(f"Exponent over the upper decades: {powers}.\n")
    return "\n".join(parts)


def _bytes(row: Row) -> str:
    return size(row["bytes"]) if "bytes" in row else ""  # older results have none


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "bare step": lambda row: _median(row["base_us"]),
    "extra": lambda row: _median(row["extra_us"]),
    "x clip": lambda row: spread(row["clip_ratio"]),
    "`apply`": lambda row: duration(row["apply_s"] * 1e6),
    "bytes": _bytes,
}
_CALL_COLUMNS: dict[str, Callable[[Row], str]] = {
    "time": lambda row: duration(row["seconds"] * 1e6),
    "bytes": _bytes,
}


def updates(result: Result) -> str:
    """Return one table per model: what rules add to the update where gradients are there."""
    parts = []
    rows = rows_of(result, step_alone.GROUP)
    for shape in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == shape]
        parts.append(f"**{shape}**; the bare update takes {_median(own[0]['base_us'])}.\n")
        lines = ((row["case"], _median(row["extra_us"]), spread(row["clip_ratio"])) for row in own)
        parts.append(table(("", "extra", "x clip"), lines))
    return "\n".join(parts)


def between_ranks(result: Result) -> str:
    """Return the table of collectives."""
    rows = rows_of(result, ranks.GROUP)
    head = ("ranks", "wrapper", "tensors", "", "collectives", "bytes")
    return table(head, ((
        str(row["world"]), row["wrapper"], str(row["params"]), row["case"],
        ("" if row["case"] == "bare step" else "+") + str(row["collectives"]),
        ("" if row["case"] == "bare step" else "+") + f"{row['bytes']:,}",
    ) for row in rows))  # fmt: skip


def on_a_device(result: Result) -> str:
    """Return the table of what a step asks of a device: per size the operations, and more of the largest."""
    rows = rows_of(result, device_counts.GROUP)
    sizes = list(dict.fromkeys((row["params"], row["dtypes"]) for row in rows))
    calls = {
        (row["case"], row["params"], row["dtypes"]): f"{_signed(row, 'operations')} "
        f"({row['list_operations']:,})"
        for row in rows
    }
    largest, kind = max((params, kind) for params, kind in sizes if " and " not in kind)
    head = [
        "",
        *(f"{params:,} {kind}" for params, kind in sizes),
        "read",
        "written",
        "allocations",
        "host reads",
        "copies to the host",
        "copies from it",
        "launches on CUDA",
    ]
    shown = [row for row in rows if (row["params"], row["dtypes"]) == (largest, kind)]
    return table(head, ((
        row["case"], *(calls[row["case"], *size] for size in sizes),
        *(f"{number(row[key] / row['gradient_bytes'])} x" for key in ("bytes_read", "bytes_written")),
        *(_signed(row, key) for key in ("allocations", "host_reads", "copies_to_host", "copies_from_host")),
        "not run" if row["launches"] is None else _signed(row, "launches"),
    ) for row in shown))  # fmt: skip


def _signed(row: Row, key: str) -> str:
    """Return what a case adds, and of the bare step what it has."""
    return f"{row[key]:,}" if row["case"] == device_counts.BARE else f"{row[key]:+,}"


def commands(result: Result) -> str:
    """Return the table of what does not train."""
    head = ("", "computing", "waiting")
    return table(head, ((
        row["what"], duration(row["seconds"]["median"] * 1e6), duration(row["wall"]["median"] * 1e6)
    ) for row in rows_of(result, startup.GROUP)))  # fmt: skip


_SECTIONS = (
    ("Targets", "", targets),
    ("Cost of a step", overhead.GROUP, costs),
    ("Without a wait between steps", throughput.GROUP, without_waits),
    ("The update alone", step_alone.GROUP, updates),
    ("Like for like", like_for_like.GROUP, jobs),
    ("Surgery", surgery.GROUP, partial(jobs, group=surgery.GROUP)),
    ("Beside the floor", floors.GROUP, beside_floors),
    ("Growth", scaling.GROUP, growth),
    ("On a device", device_counts.GROUP, on_a_device),
    ("Between ranks", ranks.GROUP, between_ranks),
    ("Without training", startup.GROUP, commands),
)


def report(result: Result) -> str:
    """Return everything that a result has, as Markdown."""
    versions = result["versions"]
    own = f"gradsurgeon {versions['gradsurgeon']}"
    own += f" ({versions['commit']})" if versions["commit"] else ""
    peers_used = ", ".join(f"{name} {versions[name]}" for name in PEERS if name in versions)
    mode = "quick" if result["quick"] else "full"
    head = (
        f"{about_machine(result)}; {own}; {peers_used}; {mode} run, {result['minutes']} minutes.\n"
    )
    parts = [head]
    if result.get("note"):  # by hand, where a file is not what one run of the suite wrote
        parts.append(f"**Note:** {result['note']}\n")
    for title, group, section in _SECTIONS:
        if not group or rows_of(result, group):
            parts.append(f"### {title}\n\n{section(result)}")
    return "\n".join(parts)
