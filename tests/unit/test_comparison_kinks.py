"""A few elements that rounding moves over a kink are no fault; what looks like them in more than one step is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradsurgeon.comparison.alignment import _PAIR, BOTH, Pairs
from gradsurgeon.comparison.findings import allow_kinks as allow
from gradsurgeon.comparison.reading import Kind

KINDS = [Kind("output.grad", "backward"), Kind("grad", "accumulated"), Kind("value", "updated")]
LIMIT, NUMEL = 1e-4, 10_000


def pairs(*distances: tuple[float, float, float], shift: float = 0.0, numel: int = NUMEL) -> Pairs:
    """Return an output gradient, a gradient and a weight of each step, with these distances."""
    cells: Any = np.zeros(3 * len(distances), _PAIR)
    cells["step"] = np.repeat(np.arange(len(distances)), 3)
    cells["kind"] = np.tile(np.arange(3), len(distances))
    cells["distance"] = np.ravel(distances)
    cells["limit"], cells["numel"], cells["state"] = LIMIT, numel, BOTH
    cells["shift"][cells["kind"] == 0] = shift
    return Pairs(KINDS, ["relu"], cells)


FINE = (1e-6, 1e-6, 1e-6)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_few_elements_in_one_step_are_rounding(step: int) -> None:
    found = pairs(*[(0.02, 0.05, 2e-4) if at == step else FINE for at in range(3)])
    (note,) = allow(found, 10.0)
    assert note.startswith(f"step {step}, output gradient of relu: the distance 0.02 is that of a")
    assert not found.apart.any()


def test_later_steps_begin_with_other_weights() -> None:
    found = pairs((0.02, 0.05, 3e-4), (2e-4, 2e-4, 2e-4), (1e-6, 1e-6, 4e-4))
    assert len([*allow(found, 10.0)]) == 1
    assert np.flatnonzero(found.apart).tolist() == [8]


@pytest.mark.parametrize(
    "found",
    [
        pairs((0.02, 1e-6, 1e-6), (0.02, 1e-6, 1e-6)),  # in each step
        pairs(FINE, *[(0.02, 1e-6, 1e-6)] * 3),  # in each step from one on
        pairs(FINE, (0.02, 1e-6, 1e-6), shift=0.02),  # a factor
        pairs(FINE, (0.2, 1e-6, 1e-6)),  # too large for a few of so many elements
        pairs(FINE, (0.2, 1e-6, 1e-6), numel=1024),  # as if one sample of 16 were missing
        pairs((0.02, 1e-6, 1e-6)),  # no other step
        pairs(FINE, (1e-6, 0.02, 1e-6)),  # a gradient of a parameter
        pairs(FINE, (float("inf"), 1e-6, 1e-6)),
    ],
    ids=["again", "from one on", "factor", "large", "sample", "alone", "parameter", "infinite"],
)
def test_others_are_faults(found: Pairs) -> None:
    border = int(np.argmax(found.apart))
    assert [*allow(found, 10.0)] == []
    assert int(np.argmax(found.apart)) == border
    assert found.apart.any()


def test_what_comes_after_is_judged_by_the_size_of_the_kink() -> None:
    found = pairs(FINE, (0.02, 0.5, 1e-6))
    assert len([*allow(found, 10.0)]) == 1
    assert np.flatnonzero(found.apart).tolist() == [4]
