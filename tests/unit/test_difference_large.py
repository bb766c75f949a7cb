"""Differences of huge rule files: time grows with the rules, and what is left out is told."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
from ranks import Json

import gradsurgeon
from gradsurgeon.cli.review import text
from gradsurgeon.cli.review.difference import compare
from gradsurgeon.language.planning import Manifest, Param
from gradsurgeon.language.schema import RuleSet

MANY = 3_000
MANIFEST = Manifest(
    "Net",
    tuple(Param(f"layers.{at}.w", (), (2,), "float32", True, ()) for at in range(200)),
)

Make = Callable[[int], Json]


def rules(make: Make, number: int, order: int = 1) -> RuleSet:
    return gradsurgeon.load({"version": 1, "rules": [make(at) for at in range(number)][::order]})


def scale(at: int, params: str, name: str = "r", factor: float = 0.5) -> Json:
    return {"id": f"{name}-{at}", "action": "scale", "params": params, "factor": factor}


def own(at: int) -> str:
    return f"layers.{at % 200}.*"


SHAPES: dict[str, tuple[Make, Make]] = {
    "changed": (lambda at: scale(at, own(at)), lambda at: scale(at, own(at), factor=0.25)),
    "turned around": (lambda at: scale(at, "*"), lambda at: scale(at, "*")),
    "renamed and moved": (
        lambda at: scale(at, f"layers.{{0..{at % 99}}}.w"),
        lambda at: scale(at, f"layers.{{{100 + at % 99}..199}}.w", "s"),
    ),
    "astray": (lambda at: scale(at, own(at)), lambda at: scale(at, f"layer.{at}.w")),
}


def seconds(shape: str, number: int) -> float:
    """Return how long this thread takes to tell the difference of ``number`` rules.

    A heap that other tests have filled makes each collection of garbage slow: there is none.
    """
    before, after = SHAPES[shape]
    old, new = rules(before, number), rules(after, number, -1 if shape == "turned around" else 1)
    gc.disable()
    try:
        start = time.thread_time()
        found = compare(old, new, MANIFEST)
        text.markdown(found)
        text.render(found)
        return time.thread_time() - start
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("shape", SHAPES)
def test_time_grows_with_the_rules(shape: str) -> None:
    """Four times the rules take about four times as long: in quadratic time it would be sixteen."""
    few = max(seconds(shape, MANY // 4), 0.05)
    assert seconds(shape, MANY) < 8 * few
