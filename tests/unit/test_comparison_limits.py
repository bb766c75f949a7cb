"""Limits in the order of execution without noise runs: what rounding carries on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gradsurgeon.report.comparison.limits import carry_on
from gradsurgeon.report.comparison.pairs import Pair
from gradsurgeon.report.comparison.reading import Kind, TensorOfStep
from gradsurgeon.report.comparison.tolerance import Tolerance

OUTPUT, BACK = Kind("output", "forward"), Kind("output.grad", "backward")
GRADIENT, WEIGHT = Kind("grad", "accumulated"), Kind("value", "updated")
KINDS = (OUTPUT, BACK, GRADIENT, WEIGHT)
LIMIT = 1e-4
ROUNDING = Tolerance("rounding", 10.0, LIMIT, "")


def pairs(
    *steps: Sequence[float],
    kinds: Sequence[Kind] = KINDS,
    names: Sequence[str] = ("relu",) * 4,
    norms: Sequence[float] = (1.0,) * 4,
) -> list[Pair]:
    """Return the tensors of some steps: one of each kind, with these distances."""
    made = []
    for step, distances in enumerate(steps):
        for kind, name, norm, distance in zip(kinds, names, norms, distances, strict=False):
            numbers = [norm, 1.0, 1.0, 100.0]
            tensor = TensorOfStep(step, kind, 0, name)
            made.append(Pair(tensor, 0, [numbers, numbers], distance=distance, tolerance=LIMIT))
    return made


def apart(found: Sequence[Pair]) -> list[int]:
    return [place for place, pair in enumerate(found) if pair.is_apart]


class TestRounding:
    """Without noise runs, what came before says how far rounding goes."""

    def test_it_goes_on_within_a_step(self) -> None:
        found = pairs((9e-5, 8e-4, 7e-3, 6e-2))
        carry_on(found, ROUNDING)
        assert apart(found) == []
        assert apart(pairs((9e-5, 8e-4, 7e-3, 6e-2))) == [1, 2, 3]

    @pytest.mark.parametrize("at", range(4))
    def test_what_jumps_is_a_fault(self, at: int) -> None:
        distances = [9e-5] * 4
        distances[at] = 1e-3
        found = pairs(distances)
        carry_on(found, ROUNDING)
        assert apart(found) == [at]

    def test_later_steps_begin_with_the_distance_of_the_weights(self) -> None:
        later = (2e-2, 9e-5, 9e-5, 9e-5)
        found = pairs((9e-5, 9e-5, 8e-4, 3e-3), later)
        carry_on(found, ROUNDING)
        assert apart(found) == []
        found = pairs((9e-5, 9e-5, 8e-4, 9e-5), later)
        carry_on(found, ROUNDING)
        assert apart(found) == [4]

    def test_a_module_goes_by_its_own_weights(self) -> None:
        # All weights together are hardly apart: the bias of `fc` has a small norm.
        kinds, norms = [OUTPUT, WEIGHT, WEIGHT], [1.0, 100.0, 0.01]
        steps = (1e-6, 1e-6, 1e-3), (5e-3, 1e-6, 1e-3)
        for names, parted in ((["fc", "b.w", "fc.b"], []), (["a", "b.w", "fc.b"], [3])):
            found = pairs(*steps, kinds=kinds, names=names, norms=norms)
            for pair in found:
                pair.is_undecided = pair.name == "fc.b"
            carry_on(found, ROUNDING)
            assert apart(found) == parted

    def test_what_parted_allows_nothing(self) -> None:
        found = pairs((0.5, 0.5, 0.5, 0.5))
        carry_on(found, ROUNDING)
        assert apart(found) == [0, 1, 2, 3]
