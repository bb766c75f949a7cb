"""What gradsurgeon wants to cost at most, and whether it does: one row per target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from benchmarks import (
    device_counts,
    floors,
    like_for_like,
    overhead,
    rule_sets,
    scaling,
    startup,
    step_alone,
)
from benchmarks.cases import BARE
from benchmarks.overhead import Row

Verdict = Literal["met", "missed", "not measured"]
Find = Callable[[Sequence[Row]], "Value | None"]
_IDLE_US = 20.0


@dataclass(frozen=True, slots=True)
class Value:
    """A measured number with its quartiles; ``limit`` where noise decides what is allowed."""

    median: float
    low: float
    high: float
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Something promised.

    Attributes:
        what: is measured.
        unit: of the number.
        limit: that the median must not exceed.
        find: takes it from the rows.
        only: kind of device that it is about; any where empty.
    """

    what: str
    unit: str
    limit: float
    find: Find
    only: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """A target and what became of it."""

    target: Target
    value: Value | None
    verdict: Verdict
    why: str = ""


def _value(numbers: Any) -> Value:
    return Value(numbers["median"], numbers["low"], numbers["high"])


def row_of(rows: Iterable[Row], **wanted: object) -> Row | None:
    """Return the row that has these values."""
    return next((row for row in rows if wanted.items() <= row.items()), None)


def _overhead(workload: str, case: str, key: str) -> Find:
    def find(rows: Sequence[Row]) -> Value | None:
        row = row_of(rows, group=overhead.GROUP, workload=workload, case=case)
        return None if row is None or key not in row else _value(row[key])

    return find


def _seconds(what: str) -> Find:
    def find(rows: Sequence[Row]) -> Value | None:
        row = row_of(rows, group=startup.GROUP, what=what)
        return None if row is None else _value(row["seconds"])

    return find


def _idle(workload: str) -> Find:
    """Return a finder of the share of a step that an idle rule costs, with the noise as its limit."""

    def find(rows: Sequence[Row]) -> Value | None:
        noise = row_of(rows, group=overhead.GROUP, workload=workload, case=BARE.name)
        found = _overhead(workload, rule_sets.IDLE, "step_ratio")(rows)
        if noise is None or found is None:
            return None
        return Value(found.median, found.low, found.high, limit=noise_limit(noise))

    return find


def noise_limit(noise: Row) -> float:
    """Return up to where the median of a ratio of steps is 1.00 within noise.

    That is how far the median of the bare step against itself is from 1, and twice the error of such a
    median: the distance between the quartiles over the root of the number of rounds.

    Args:
        noise: the row of the bare step.
    """
    ratio = noise["step_ratio"]
    return 1.0 + abs(float(ratio["median"]) - 1.0) + _error(ratio)


def _waits(rows: Sequence[Row]) -> Value | None:
    """Return the most waits for the device that logs and edits have: there must be none."""
    known = {
        title for title, rule in rule_sets.alone() if rule["action"] not in ("nan-trap", "capture")
    }
    found = [
        row["waits"]
        for row in rows
        if row["group"] == overhead.GROUP and row["case"] in known and row.get("waits") is not None
    ]
    return Value(max(found), min(found), max(found)) if found else None


def _asked(case: str, params: int, key: str) -> Callable[[Sequence[Row]], int | None]:
    """Return a finder of what a case asks of a device, beyond the bare step."""
    wanted = {"group": device_counts.GROUP, "case": case, "params": params, "dtypes": "float32"}

    def find(rows: Sequence[Row]) -> int | None:
        row = row_of(rows, **wanted)
        return None if row is None else int(row[key])

    return find


def _difference(
    more: Callable[[Sequence[Row]], int | None], less: Callable[[Sequence[Row]], int | None]
) -> Find:
    def find(rows: Sequence[Row]) -> Value | None:
        first, second = more(rows), less(rows)
        return None if first is None or second is None else _exactly(first - second)

    return find


def _exactly(count: int) -> Value:
    return Value(count, count, count)


def _host_reads(rows: Sequence[Row]) -> Value | None:
    count = _asked(rule_sets.CLIP_BITES, 100, "host_reads")(rows)
    return None if count is None else _exactly(count)


def _alone(shape: str, case: str, key: str) -> Find:
    def find(rows: Sequence[Row]) -> Value | None:
        row = row_of(rows, group=step_alone.GROUP, workload=shape, case=case)
        return None if row is None else _value(row[key])

    return find


_ON_DEVICE = f"on a device, {rule_sets.CLIP_BITES}"
_OPERATIONS = partial(_asked, rule_sets.CLIP_BITES, key="operations")


def _dearest(job: str, of: Literal["of_peer", "of_floor"]) -> Find:
    """Return a finder of the most that a job costs in units of its cheapest peer or of its floor, over all workloads."""

    def find(rows: Sequence[Row]) -> Value | None:
        # What lies within noise of nothing is no unit.
        ratios = [
            row[of]
            for row in rows
            if row["group"] == like_for_like.GROUP and row["job"] == job
            if row[of] is not None and (of == "of_peer" or row["floor_us"]["low"] > 0)
        ]
        return Value(max(ratios), min(ratios), max(ratios)) if ratios else None

    return find


def _beside_floor(group: str, job: str, workload: str) -> Find:
    """Return a finder of what a job costs in units of its floor."""

    def find(rows: Sequence[Row]) -> Value | None:
        row = row_of(rows, group=group, workload=workload, job=job)
        found = None if row is None else row.get("beside_floor")
        return None if found is None else _value(found)

    return find


def _beside_floors() -> Iterator[Target]:
    alike = like_for_like.GROUP
    for job in ("clamp", "zero", "scale"):
        for workload, limit in (("tiny", 2.0), ("wide", 1.2)):
            what = f"{job} at `step`, {workload}"
            yield Target(what, FLOOR, limit, _beside_floor(alike, job, workload), only="cpu")
    for of, limit in (("output", 2.0), ("output gradient", 2.5)):
        job = f"norm of every module's {of}"
        yield Target(f"{job}, mlp", FLOOR, limit, _beside_floor(alike, job, "mlp"), only="cpu")


def _steepest(rows: Sequence[Row]) -> Value | None:
    """Return the largest exponent of all curves."""
    axes: dict[str, list[Row]] = {}
    for row in rows:
        if row["group"] == scaling.GROUP:
            axes.setdefault(row["axis"], []).append(row)
    powers = [power for own in axes.values() for power in scaling.exponents(own).values()]
    return Value(max(powers), min(powers), max(powers)) if powers else None


def _step_alone() -> Iterator[Target]:
    limits = {
        "observe everything": (rule_sets.OBSERVE, 0.7, 0.65),
        "observe everything and global `clip-norm`, does not bite": (rule_sets.CLIP_IDLE, 0.8, 0.7),
        "observe everything and global `clip-norm`, bites": (rule_sets.CLIP_BITES, 1.2, 1.2),
    }
    for what, (case, *most) in limits.items():
        for shape, limit in zip((step_alone.TINY, step_alone.WIDE), most, strict=True):
            find = _alone(shape, case, "clip_ratio")
            yield Target(f"the update alone: {what}, {shape}", CLIP, limit, find, only="cpu")
    for shape in (step_alone.TINY, step_alone.WIDE):
        what = f"the update alone: an idle rule, {shape}"
        yield Target(what, "us", _IDLE_US, _idle_alone(shape), only="cpu")


def _idle_alone(shape: str) -> Find:
    """Return a finder whose limit allows for the error of the median: microseconds drown in an update of milliseconds."""

    def find(rows: Sequence[Row]) -> Value | None:
        row = row_of(rows, group=step_alone.GROUP, workload=shape, case=rule_sets.IDLE)
        if row is None:
            return None
        return replace(_value(row["extra_us"]), limit=_IDLE_US + _error(row["extra_us"]))

    return find


def _error(numbers: Any) -> float:
    """Return twice the error of a median: the distance between the quartiles over the root of the number of rounds."""
    return 2.0 * float(numbers["high"] - numbers["low"]) / math.sqrt(numbers["count"])


CLIP, STEP = "x `clip_grad_norm_`", "x step"
READS = "x one read of the bytes, tensor by tensor"
FLOOR = "x its floor"
TARGETS = (
    *_step_alone(),
    Target(
        "norms of every parameter, 12 M parameters", READS, 1.3,
        _overhead("wide", "norm-log at accumulated", "reads_ratio"), only="cpu",
    ),
    Target(
        "observe everything, 12 M parameters", READS, 2.5,
        _overhead("wide", rule_sets.OBSERVE, "reads_ratio"), only="cpu",
    ),
    Target(
        "observe everything, 200 tiny tensors", CLIP, 1.0,
        _overhead("tiny", rule_sets.OBSERVE, "clip_ratio"), only="cpu",
    ),
    Target("rule outside its `steps`, 200 tiny tensors", STEP, 1.0, _idle("tiny")),
    Target("rule outside its `steps`, small MLP", STEP, 1.0, _idle("mlp")),
    Target("rule outside its `steps`, GPT-2 124M", STEP, 1.0, _idle("gpt2")),
    Target(rule_sets.CHECKS, READS, 0.1, _overhead("wide", rule_sets.CHECKS, "reads_ratio"), only="cpu"),
    *(
        Target(f"{rule_sets.PACK}, {name}", FLOOR, limit, _beside_floor(floors.GROUP, rule_sets.PACK, name))
        for name, limit in (("mlp", 3.0), ("embedding", 1.5), ("gpt2", 2.0), ("resnet", 2.0))
    ),
    Target(f"{floors.FORENSICS}, mlp", FLOOR, 4.0, _beside_floor(floors.GROUP, floors.FORENSICS, "mlp")),
    Target("stop at a NaN, the dearest workload", "x its cheapest peer", 1.0, _dearest("stop at a NaN", "of_peer")),
    *(
        Target(f"{job}, the dearest workload", FLOOR, 2.0, _dearest(job, "of_floor"))
        for job in ("norm of every gradient", "clip that bites")
    ),
    *_beside_floors(),
    Target("growth: the steepest curve of all", "exponent", 1.1, _steepest),
    Target("waits for the device outside flush and trap", "per step", 0, _waits, only="cuda"),
    Target(
        "observe everything, GPT-2 124M in bfloat16", STEP, 1.01,
        _overhead("gpt2", rule_sets.OBSERVE, "step_ratio"), only="cuda",
    ),
    Target(
        f"{_ON_DEVICE}, beyond `{device_counts.CLIP}`", "operations", 8,
        _difference(_OPERATIONS(100), _asked(device_counts.CLIP, 100, "operations")),
    ),
    Target(
        f"{_ON_DEVICE}, with 100 parameters more than with 10", "operations", 0,
        _difference(_OPERATIONS(100), _OPERATIONS(10)),
    ),
    Target(f"{_ON_DEVICE}", "host reads", 1, _host_reads),
    Target("`gradsurgeon lint` of 100 rules, whole process", "s", 0.5, _seconds(startup.LINT)),
    Target("reading 1,000 rules", "s", 0.1, _seconds(startup.PARSE)),
    Target("binding 20 rules to a model of 10,000 parameters", "s", 0.2, _seconds(startup.BIND)),
    Target("binding 20 rules to `params.json` of the same", "s", 0.2, _seconds(startup.BIND_FILE)),
    Target("`gradsurgeon diff`, 10,000 parameters, whole process", "s", 1.0, _seconds(startup.DIFF)),
    Target("`import gradsurgeon`, extra", "s", 0.15, _seconds(startup.IMPORT)),
    Target("`gradsurgeon run` on a script without torch, extra", "s", 0.15, _seconds(startup.LAUNCH)),
)  # fmt: skip


def judged(rows: Sequence[Row], device: str) -> list[Judged]:
    """Return what became of each target.

    Args:
        rows: all that was measured.
        device: kind of device that it was measured on.
    """
    return [_judge(target, rows, device) for target in TARGETS]


def _judge(target: Target, rows: Sequence[Row], device: str) -> Judged:
    if target.only not in ("", device):
        return Judged(target, None, "not measured", f"a target for {target.only.upper()}")
    value = target.find(rows)
    if value is None:
        return Judged(target, None, "not measured")
    limit = target.limit if value.limit is None else value.limit
    return Judged(target, value, "met" if value.median <= limit else "missed")
