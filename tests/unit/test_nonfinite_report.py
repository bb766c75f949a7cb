"""What a trap advises, by where the border lies."""

from __future__ import annotations

import pytest

from gradsurgeon.runtime.trap_report import gradient_report
from gradsurgeon.tensors.measure import NonfiniteCount

NAMES = ["first.weight", "second.weight", "third.weight"]


@pytest.mark.parametrize(
    ("bad", "advice"),
    [
        (
            {2},
            "third.weight, the first one that backward reached, is non-finite already: look at the loss, at the "
            "operations after this layer in the forward pass, and at inputs and weights",
        ),
        (
            {0},
            "the border lies between second.weight (still finite) and first.weight (first that is not)",
        ),
    ],
)
def test_the_advice_fits_what_was_seen(bad: set[int], advice: str) -> None:
    found = {tensor: NonfiniteCount("NaN", 1) for tensor in bad}
    report = gradient_report(NAMES, "after backward", (2, 1, 0), found, {})
    assert [*report.lines, *filter(None, [report.hint])][-1] == advice
