"""What is certain of two patterns, or of two schedules, without any names: checked against all short names."""

from __future__ import annotations

import itertools
import random

import pytest

from gradsurgeon.actions import Steps
from gradsurgeon.common.match import PatternError, compile_pattern, contains


@pytest.mark.no_cover  # thousands of inputs, the same few lines
class TestPatterns:
    PIECES = (
        "a",
        "1",
        "2",
        ".",
        "*",
        "?",
        "[1-2]",
        "[!a]",
        "{a,1}",
        "{a.,*1}",
        "{1..2}",
        "{0..12}",
    )
    NAMES = tuple(
        "".join(chars) for size in range(5) for chars in itertools.product("a12.", repeat=size)
    )

    def patterns(self) -> list[str]:
        chosen = random.Random(0)
        found: list[str] = []
        while len(found) < 80:
            text = "".join(chosen.choices(self.PIECES, k=chosen.randint(1, 5)))
            try:
                compile_pattern(text)
            except PatternError:
                continue
            found.append(text)
        return [*found, "*", *self.NAMES[1:21]]

    def test_nothing_is_certain_that_is_wrong(self) -> None:
        patterns = self.patterns()
        matched = {
            text: {name for name in self.NAMES if compile_pattern(text).matches(name)}
            for text in patterns
        }
        contained = 0
        for one, other in itertools.product(patterns, patterns):
            if contains(one, other):
                contained += one != other
                assert matched[other] <= matched[one], (one, other)
        assert contained > 100

    @pytest.mark.parametrize(
        ("wide", "narrow"),
        [
            ("*", "re:x"),
            ("*", "h.*"),
            ("h.{0..11}.*", "h.3.attn.weight"),
            ("*.{weight,bias}", "fc1.bias"),
            ("re:h\\.\\d", "h.1"),
        ],
    )
    def test_what_is_contained(self, wide: str, narrow: str) -> None:
        assert contains(wide, narrow)
        assert not contains(narrow, wide)

    def test_only_its_own_pattern_matches_the_root(self) -> None:
        assert contains(".", ".")
        assert not contains("*", ".")

    @pytest.mark.parametrize(
        ("one", "other"), [("h.*", "h.{0..5}.*"), ("*.bias", "*.weight"), ("re:a", "re:b")]
    )
    def test_of_two_patterns_with_wildcards_nothing_is_certain(self, one: str, other: str) -> None:
        assert not contains(one, other)


@pytest.mark.no_cover
def test_schedules_that_share_a_step() -> None:
    chosen = random.Random(0)
    for _ in range(2000):
        one, other = (
            Steps.model_validate(
                {"from": (start := chosen.randint(0, 9)), "every": chosen.randint(1, 6)}
                | ({"to": start + chosen.randint(1, 20)} if chosen.random() < 0.7 else {})
            )
            for _ in range(2)
        )
        due, also = ({step for step in range(100) if it.includes(step)} for it in (one, other))
        assert one.meets(other) == bool(due & also), (one, other)
