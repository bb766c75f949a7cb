"""Limits in the order of execution: what rounding carries on, and a few elements at a kink, which are no fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gradsurgeon.report.comparison.alignment import BOTH, Pairs, pair_fields
from gradsurgeon.report.comparison.limits import raise_limits
from gradsurgeon.report.comparison.reading import Kind
from gradsurgeon.report.comparison.tolerance import Tolerance

OUTPUT, BACK = Kind("output", "forward"), Kind("output.grad", "backward")
GRADIENT, WEIGHT = Kind("grad", "accumulated"), Kind("value", "updated")
KINDS = [BACK, GRADIENT, WEIGHT]
LIMIT, NUMEL = 1e-4, 10_000
NOISE = Tolerance("noise", 10.0, LIMIT, "")
ROUNDING = Tolerance("rounding", 10.0, LIMIT, "")


def pairs(*distances: Sequence[float], kinds: Sequence[Kind] = KINDS, **fields: Any) -> Pairs:
    """Return the tensors of some steps: one of each kind, with these distances."""
    cells: Any = np.zeros(len(kinds) * len(distances), pair_fields(2))
    cells["step"] = np.repeat(np.arange(len(distances)), len(kinds))
    cells["kind"] = np.tile(np.arange(len(kinds)), len(distances))
    cells["phase"] = np.tile([kind.phase for kind in kinds], len(distances))
    cells["distance"] = np.ravel(distances)
    cells["limit"], cells["numel"], cells["norm"], cells["state"] = LIMIT, NUMEL, 1.0, BOTH
    for name, value in fields.items():
        cells[name] = value
    return Pairs(list(kinds), ["relu"], cells)


def apart(found: Pairs) -> list[int]:
    return np.flatnonzero(found.apart).tolist()


FINE = (1e-6, 1e-6, 1e-6)


class TestKinksOfModules:
    @pytest.mark.parametrize("step", [0, 1, 2])
    def test_a_few_elements_in_one_step_are_rounding(self, step: int) -> None:
        found = pairs(*[(0.02, 0.05, 2e-4) if at == step else FINE for at in range(3)])
        (note,) = raise_limits(found, NOISE)
        assert note.startswith(
            f"step {step}, output gradient of relu: the distance 0.02 is that of"
        )
        assert not found.apart.any()

    def test_later_steps_begin_with_other_weights(self) -> None:
        found = pairs((0.02, 0.05, 3e-4), (2e-4, 2e-4, 2e-4), (1e-6, 1e-6, 0.9))
        assert len(raise_limits(found, NOISE)) == 1
        assert apart(found) == [8]

    def test_other_weights_move_elements_over_the_kink_as_well(self) -> None:
        # Of elements of a usual spread, a share of 1e-4 lies so near to the kink: 1% of the norm.
        kinds = [OUTPUT, BACK, GRADIENT, WEIGHT]
        steps = [(1e-6, 0.02, 0.05, 1e-5), (1e-4, 0.015, 0.02, 1e-5), (1e-4, 1e-4, 1e-4, 1e-5)]
        found = pairs(*steps, kinds=kinds)
        (note,) = raise_limits(found, NOISE)
        assert note.startswith("step 0, output gradient of relu and 1 more: the distance 0.02 is ")
        assert apart(found) == []
        fault = pairs(steps[0], (1e-6, 0.015, 0.02, 1e-5), steps[2], kinds=kinds)
        assert raise_limits(fault, NOISE) == []
        assert apart(fault)[0] == 1

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
    def test_others_are_faults(self, found: Pairs) -> None:
        border = apart(found)[0]
        assert raise_limits(found, NOISE) == []
        assert apart(found)[0] == border

    def test_what_comes_after_is_judged_by_the_size_of_the_kink(self) -> None:
        found = pairs(FINE, (0.02, 0.5, 1e-6))
        assert len(raise_limits(found, NOISE)) == 1
        assert apart(found) == [4]


class TestRounding:
    """Without noise runs, what came before says how far rounding goes."""

    kinds = (OUTPUT, BACK, GRADIENT, WEIGHT)

    def test_it_goes_on_within_a_step(self) -> None:
        found = pairs((9e-5, 8e-4, 7e-3, 6e-2), kinds=self.kinds)
        assert raise_limits(found, ROUNDING) == []
        assert apart(found) == []
        assert apart(pairs((9e-5, 8e-4, 7e-3, 6e-2), kinds=self.kinds)) == [1, 2, 3]

    @pytest.mark.parametrize("at", range(4))
    def test_what_jumps_is_a_fault(self, at: int) -> None:
        distances = [9e-5] * 4
        distances[at] = 1e-3
        found = pairs(distances, kinds=self.kinds, shift=1e-3)
        raise_limits(found, ROUNDING)
        assert apart(found) == [at]

    def test_later_steps_begin_with_the_distance_of_the_weights(self) -> None:
        later = (2e-2, 9e-5, 9e-5, 9e-5)
        found = pairs((9e-5, 9e-5, 8e-4, 3e-3), later, kinds=self.kinds)
        raise_limits(found, ROUNDING)
        assert apart(found) == []
        found = pairs((9e-5, 9e-5, 8e-4, 9e-5), later, kinds=self.kinds)
        raise_limits(found, ROUNDING)
        assert apart(found) == [4]

    def test_a_module_goes_by_its_own_weights(self) -> None:
        # All weights together are hardly apart: the bias of `fc` has a small norm.
        found = pairs((1e-6, 1e-6, 1e-3), (5e-3, 1e-6, 1e-3), kinds=[OUTPUT, WEIGHT, WEIGHT])
        found.cells["norm"] = np.tile([1.0, 100.0, 0.01], 2)
        found.cells["name"] = np.tile([0, 1, 2], 2)
        found.cells["undecided"] = found.cells["name"] == 2
        for names, parted in ((["fc", "b.w", "fc.b"], []), (["a", "b.w", "fc.b"], [3])):
            found.cells["limit"] = LIMIT
            settled = Pairs(found.kinds, names, found.cells)
            raise_limits(settled, ROUNDING)
            assert apart(settled) == parted

    def test_what_parted_allows_nothing(self) -> None:
        found = pairs((0.5, 0.5, 0.5, 0.5), kinds=self.kinds)
        raise_limits(found, ROUNDING)
        assert apart(found) == [0, 1, 2, 3]
