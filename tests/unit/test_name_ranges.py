"""Names that differ in numbers only, written as one."""

from __future__ import annotations

import pytest

from gradsurgeon.language.planning.table import fold_names


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], {}),
        (["head"], {"head": 1}),
        ([f"h.{at}.w" for at in range(12)], {"h.{0..11}.w": 12}),
        (["h.0.w", "h.2.w", "h.3.w"], {"h.{0,2,3}.w": 3}),
        (["h.7.w", "h.1.w"], {"h.{1,7}.w": 2}),
        ([f"h.{a}.{b}" for a in range(3) for b in range(4)], {"h.{0..2}.{0..3}": 12}),
        (["h.0.1", "h.1.0"], {"h.0.1": 1, "h.1.0": 1}),
        (["h.0.0", "h.0.1", "h.1.0"], {"h.{0..1}.0": 2, "h.0.1": 1}),
        (["h.1", "h.01"], {"h.{1,01}": 2}),
        (["h." + "9" * 5000], {"h." + "9" * 5000: 1}),
        (
            [f"h.{at}" for at in range(0, 40, 2)],
            {"h.{0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,32,34,36,38}": 20},
        ),
    ],
)
def test_fold_names(names: list[str], folded: dict[str, int]) -> None:
    found = fold_names(names)
    assert {text: len(members) for text, members in found.items()} == folded
    assert sorted(name for members in found.values() for name in members) == sorted(names)
