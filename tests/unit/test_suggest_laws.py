"""Whatever was recorded: the file that is suggested passes lint, and its counts are those of loops written anew."""

from __future__ import annotations

import math
import pathlib
import random
import re
from array import array
from collections.abc import Sequence

import pytest
import yaml
from pairs import slow
from running_bounds import ZClip
from runs import meta, values

from gradsurgeon import RecordError
from gradsurgeon.match import compile_pattern, select
from gradsurgeon.review import lint
from gradsurgeon.store import Key
from gradsurgeon.store.run import open_run
from gradsurgeon.store.writer import RunWriter
from gradsurgeon.suggestion import suggest


def float32(number: float) -> float:
    return array("f", [number])[0]


def odd_history(rng: random.Random, steps: int) -> list[float | None]:
    """Return norms of any size that drift, jump, are alike, zero, missing, or not finite."""
    level, spread = 10 ** rng.uniform(-12, 30), rng.choice([0.0, 1e-3, 0.2, 1.0])
    drift, jump = rng.choice([0.0, 0.0, -2.0, 2.0]), rng.choice([1.0, 1.0, 10.0])
    rare = {rng.choice([0.0, math.nan, math.inf, 1e37, None]): rng.choice([0.0, 0.02, 0.6])}
    ceiling = level * rng.choice([1.0, math.inf])
    found: list[float | None] = []
    for step in range(steps):
        norm = level * math.exp(rng.gauss(0, spread) + drift * step / steps)
        found.append(min(norm, ceiling) * (jump if 2 * step > steps else 1))
        found[-1] = next((odd for odd, share in rare.items() if rng.random() < share), found[-1])
    return found


def bites(rule: dict[str, object], norms: Sequence[float]) -> int:
    """Count by loops of its own in how many steps a rule bites."""
    if rule["action"] == "clip-norm":
        bound = rule["max_norm"]
        assert isinstance(bound, float)
        return sum(bound / (norm + 1e-6) < 1 for norm in norms)
    assert isinstance(rule["above"], dict)
    statistic, found = ZClip(**rule["above"]), 0
    for norm in norms:
        passed = statistic.passes(norm)
        # Of a deviation that is only rounding both sides are right.
        found += passed < norm and norm - passed > 1e-12 * norm
        statistic.learn(passed)
    return found


@pytest.mark.parametrize("seed", [*range(15), *slow(*range(15, 60))])
def test_whatever_was_recorded_lint_passes_and_the_counts_are_right(
    tmp_path: pathlib.Path, seed: int
) -> None:
    rng = random.Random(seed)
    steps, every = rng.choice([60, 300, 1000]), rng.choice([1, 1, 1, 3])
    share = rng.choice([0.02, 0.05, 0.3, 0.5, 0.9, 0.99])
    histories = {name: odd_history(rng, steps) for name in "abc"}
    writer = RunWriter(tmp_path / "run", meta=meta(tuple(histories)))
    for step in range(0, steps, every):
        row = [histories[name][step] for name in histories]
        gone = frozenset(place for place, norm in enumerate(row) if norm is None)
        key = Key("norms", "l2", "step", tuple(histories))
        writer.add(key, step, values(*(norm or 0.0 for norm in row)), gone)
    writer.close()
    try:
        with open_run(tmp_path / "run") as run:
            text, _, findings = suggest(run, share)
    except RecordError as error:
        reasons = "not stationary, and|are too few for|hardly ever above 0|no threshold bites"
        if not re.search(reasons, str(error)):
            raise
        return
    (tmp_path / "rules.yaml").write_text(text, encoding="utf-8")
    assert lint(str(tmp_path / "rules.yaml")) == []
    told = [
        (int(number), int(of))
        for number, of in re.findall(
            r"would have bitten in (\d+) of (\d+) steps?\b", text.replace(",", "")
        )
    ]
    rules, covered = yaml.safe_load(text)["rules"], set[str]()
    assert len(rules) == len(told)
    for rule, counts in zip(rules, told, strict=True):
        given = rule["params"]
        patterns = given if isinstance(given, list) else [str(given)]
        names = [
            "abc"[place] for place in select([compile_pattern(one) for one in patterns], "abc")
        ]
        covered.update(names)
        rows = zip(*(histories[name][::every] for name in names), strict=True)
        present = [[float32(norm) for norm in row if norm is not None] for row in rows]
        norms = [float32(math.hypot(*row)) for row in present if row]
        finite = [norm for norm in norms if math.isfinite(norm)]
        warm = 25 if rule["action"] == "spike-trap" else 0
        assert counts == (bites(rule, finite), len([n for n in finite if n > 0 or not warm]) - warm)
        assert not warm or every == 1
    assert len(covered) + len([f for f in findings if f.startswith("no rule for")]) <= 3
