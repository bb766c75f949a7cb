"""What users wrote is inert in a difference, wherever it is shown: names, values, files of any text."""

from __future__ import annotations

import json
import re

import pytest
from fuzzing import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gradsurgeon
from gradsurgeon.cli.review import text
from gradsurgeon.cli.review.difference import Difference, compare
from gradsurgeon.errors import printable
from gradsurgeon.language.planning import Manifest, ModuleEntry, Param
from gradsurgeon.language.schema import RuleSet

NASTY = (
    "`",
    "``x``",
    "|",
    "\\|",
    "\\",
    "<script>alert(1)</script>",
    "</details>",
    "<!-- ",
    " -->",
    "@mention",
    "#1",
    "https://example.org",
    "::error::x",
    "::",
    "##[error]x",
    "\n",
    "\r\n| + | x |",
    "\n::error::x",
    "\x1b[31m",
    "\x1b]8;;x\x07",
    "\u202e",
    "\u2028",
    "&lt;",
    "$`x`$",
    "**bold**",
    "[x](y)",
    " ",
    "",
    "h.0.w",
    "9" * 30,
)
hostile = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=5)), max_size=4).map("".join)
names = st.lists(
    hostile.filter(lambda name: name not in {"", "."}), min_size=1, max_size=6, unique=True
)


def difference(known: list[str], file: str, pattern: str, *, turned: bool = False) -> Difference:
    """Return one in which every kind of text, and of finding, is shown."""
    manifest = Manifest(
        file,
        tuple(Param(name, (), (2,), "float32", True, ("Linear",)) for name in known),
        (ModuleEntry(".", (), ("Net",)), *(ModuleEntry(name, (), ("Linear",)) for name in known)),
        ("Net",),
        notes=(file,),
    )
    regex = "re:" + re.escape(pattern[:40] or "x")
    every = "re:(?s:.*)"
    old = [
        {"id": "lost", "action": "zero", "params": every, "exclude": regex},
        {"id": "wide", "action": "scale", "params": every, "factor": 2.0},
        {"id": "norms", "action": "norm-log", "params": every},
    ]
    new = [
        {"id": "norms", "action": "norm-log", "params": every},
        {"id": "wide", "action": "scale", "params": every, "factor": 0.5, "exclude": regex},
        {"id": "more", "action": "scale", "params": every, "factor": 0.5},
        {"id": "none", "action": "zero", "params": regex + "gone", "model": "Net"},
        {"id": "out", "action": "zero", "modules": every, "tensor": "output"},
    ]
    sides = [gradsurgeon.load({"version": 1, "rules": rules}) for rules in (old, new)]
    named = [RuleSet(one.rules, file=file) for one in sides]
    first, second = named[::-1] if turned else named
    return compare(first, second, manifest)


@settings(max_examples=examples(100))
@given(names, hostile, hostile, st.booleans())
def test_in_markdown_one_block_holds_what_users_wrote(
    known: list[str], file: str, pattern: str, turned: bool
) -> None:
    found = difference(known, file, pattern, turned=turned)
    head, blank, begin, *block, end, last = text.markdown(found).split("\n")
    assert re.fullmatch(r"[A-Za-z0-9 *:;,.>-]+", head)
    assert (blank, begin, last) == ("", f"{end}diff", "")
    assert re.fullmatch("`{3,}", end)
    for line in block:
        assert end not in line
        assert printable(line) == line
        assert not re.match(r"\s*::", line)
        assert "##[" not in line


@settings(max_examples=examples(100), deadline=None)
@example(known=[" ::error::x"], file="", pattern="", turned=False)
@given(names, hostile, hostile, st.booleans())
def test_in_a_terminal_and_a_log_nothing_acts(
    known: list[str], file: str, pattern: str, turned: bool
) -> None:
    found = difference(known, file, pattern, turned=turned)
    for line in text.render(found).split("\n"):
        assert printable(line) == line
        assert not re.match(r"\s*::", line)
        assert "##[" not in line
        assert re.match(r"diff: |warning: |note: |order: |[-+~] |tensors under| {2,}|\d|$", line)
    json.dumps(found.to_dict())


def large(count: int = 20, layers: int = 1000) -> Difference:
    """Return one of rules that all differ, on ten thousand parameters."""
    kinds = ("q", "k", "v", "o", "up", "down", "gate", "n1", "n2", "b")
    known = [f"layers.{at}.{kind}" for at in range(layers) for kind in kinds]
    manifest = Manifest("Net", tuple(Param(one, (), (2,), "float32", True, ()) for one in known))
    sides = [
        [
            {
                "id": f"{word}{at}",
                "action": "scale",
                "params": f"layers.*{at % 10}.*",
                "factor": 2.0,
            }
            | ({"at": "step"} if at % 3 else {})
            for at in range(count)
        ]
        for word in ("old-", "new-")
    ]
    for at, rule in enumerate(sides[1]):
        rule |= {"params": f"layers.{{{at * 7}..{at * 90 + 400}}}.*", "factor": 3.0}
    sides[1].append({"id": "none", "action": "zero", "params": "gone.*"})
    old, new = (gradsurgeon.load({"version": 1, "rules": one}) for one in sides)
    return compare(old, new, manifest)


@pytest.fixture(scope="module")
def found() -> Difference:
    return large()


class TestLarge:
    def test_what_stops_training_comes_first_and_stays(self, found: Difference) -> None:
        assert found.obstacles[0][1].kind == "no-match"
        assert "! warning: none: training with these rules ends" in text.markdown(found)
