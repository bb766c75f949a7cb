"""The order in which tensors came about, runs of several ranks, and how far noise goes: on numbers made by hand."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_cases
from ranks import Json
from runs import add, meta, values

import gradsurgeon
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report.comparison import order, tolerance
from gradsurgeon.report.comparison.pairs import Pair
from gradsurgeon.report.comparison.reading import STATS, Kind, TensorOfStep, stripped

ORDERS: Any = report_cases.read(report_cases.FOLDER.parent / "orders.yaml")


@pytest.mark.parametrize("case", ORDERS, ids=lambda case: case["is"])
def test_a_pass_in_its_order(case: Json) -> None:
    names = case["names"]
    counts = dict.fromkeys(names, 1) | case.get("calls", {})
    numbers = {}
    for event, number in case.get("numbers", {}).items():
        numbers[event[0] == "-", event[1:-1], int(event[-1])] = (float(number),)
    events = order.forward_order(order.merged(case["chains"], names), counts, numbers)
    assert sorted(events.values()) == list(range(len(events)))
    texts = []
    for is_output, name, call in sorted(events, key=events.__getitem__):
        number = call if counts[name] > 1 else ""
        texts.append(f"{'-' if is_output else '+'}{name}{number}")
    assert " ".join(texts) == case["order"]


def test_chains_that_contradict_each_other() -> None:
    assert sorted(order.merged([["a", "b"], ["b", "a"]], ["b", "a", "c"])) == ["a", "b", "c"]


def test_names_without_wrappers() -> None:
    assert stripped("module._orig_mod.h.0._checkpoint_wrapped_module.modules.q") == "h.0.modules.q"


GRADIENT, WEIGHT = Kind("grad", "accumulated"), Kind("value", "updated")


def tensors(kind: Kind, *names: str, numel: float = 4.0) -> list[Pair]:
    numbers = [1.0, 1.0, 1.0, numel]
    return [Pair(TensorOfStep(0, kind, 0, name), 0, [numbers, numbers]) for name in names]


class TestNoise:
    def test_the_root_mean_square_over_runs_and_projections(self) -> None:
        reference = np.array([[10.0, 1.0, 2.0]])
        noise = np.array([[[10.0, 1.3, 2.0], [10.0, 1.0, 2.4]]])
        assert tolerance.noise_of(noise, reference) == pytest.approx([0.025])

    def test_at_least_the_shift_of_the_norm(self) -> None:
        found = tolerance.noise_of(np.array([[[11.0, 1.0, 2.0]]]), np.array([[10.0, 1.0, 2.0]]))
        assert found == pytest.approx([0.1])

    def test_at_least_the_median(self) -> None:
        drift = np.array([1e-6, 3e-6, 2e-6, 1e-7, 1e-7, np.nan])
        found = tolerance.lifted(tensors(GRADIENT, *"abc") + tensors(WEIGHT, *"abc"), drift)
        assert found == pytest.approx([2e-6, 3e-6, 2e-6, 1e-7, 1e-7, 1e-7])

    def test_rounding_that_decides_a_gradient_decides_its_update(self) -> None:
        drift = np.array([0.5, 1e-6, 1e-7, 1e-7])
        found = tolerance.lifted(tensors(GRADIENT, *"ab") + tensors(WEIGHT, *"ab"), drift)
        assert found == pytest.approx([0.5, 0.25, 0.5, 1e-7], rel=1e-5)

    @pytest.mark.parametrize(
        ("kind", "numel", "shift", "limit"),
        [
            (WEIGHT, 32.0, 1e-4, 0.574),  # two signs of 32 take it by 0.5
            (WEIGHT, 1e6, 1e-4, 0.283),
            (WEIGHT, float("nan"), 1e-4, 0.283),
            (WEIGHT, 32.0, 0.35, 0.0),  # a factor
            (GRADIENT, 32.0, 1e-4, 0.0),
        ],
    )
    def test_signs_that_half_precision_decides(
        self, kind: Kind, numel: float, shift: float, limit: float
    ) -> None:
        (pair,) = tensors(kind, "a", numel=numel)
        pair.distance, pair.shift = 0.35, shift
        assert tolerance.of_signs(pair) == pytest.approx(limit, abs=1e-3)

    def test_distances(self) -> None:
        nan, inf = float("nan"), float("inf")
        run = np.array([[2.0, 1, 1], [0, 0, 0], [nan, nan, nan], [inf, nan, nan], [0, 0, 0]])
        other = np.array([[1.0, 1, 1], [0, 0, 0], [nan, nan, nan], [1, 1, 1], [1, 0, 1]])
        assert tolerance.distances(run, other).tolist() == [0.5, 0, 0, inf, 1]


def write(path: Path, ranks: dict[int, tuple[float, float]], of: int, first: float = 1.0) -> Path:
    """Write a run of some ranks: one value for outputs, another for gradients, of two layers."""
    rules = [
        {"id": "outputs", "tensor": "output", "point": "forward", "modules": ["a", "b"]},
        {"id": "grads", "tensor": "grad", "point": "accumulated", "params": ["a.w", "b.w"]},
    ]
    logs = [{"action": "norm-log", **rule} for rule in rules]
    about = meta(("a.w", "b.w"), ranks=of, plan={"rules": logs})
    with ExitStack() as writers:
        for rank, (output, gradient) in ranks.items():
            writer = RunWriter(path, rank=rank, meta=about)
            writers.callback(writer.close)
            for stat in STATS:
                size = float(stat == "numel") * 3
                key = Key("outputs", stat, "forward", ("a", "b"))
                add(writer, key, 0, values(size or 1.0, size or output), frozenset())
                key = Key("grads", stat, "accumulated", ("a.w", "b.w"))
                add(writer, key, 0, values(size or first, size or gradient), frozenset())
    return path


class TestRanks:
    def test_a_rank_of_its_own(self, tmp_path: Path) -> None:
        reference = write(tmp_path / "a", {0: (1.0, 2.0), 1: (1.0, 2.0)}, 2)
        run = write(tmp_path / "b", {0: (1.0, 2.0), 1: (4.0, 2.0)}, 2)
        found = gradsurgeon.compare(run, reference)
        assert found.first[0].text == "output of b (rank 1)"
        assert (len(found.first), found.steps[0].compared) == (1, 6)

    def test_other_numbers_of_ranks(self, tmp_path: Path) -> None:
        one = write(tmp_path / "a", {0: (1.0, 2.0)}, 1)
        two = write(tmp_path / "b", {0: (9.0, 2.0), 1: (9.0, 2.0)}, 2)
        found = gradsurgeon.compare(two, one)
        assert (found.alike, found.steps[0].compared) == (True, 2)
        assert "only gradients and weights are compared: other ranks, " in found.notes[0]
        assert found.tolerance.kind == "rounding"
        two = write(tmp_path / "c", {0: (1.0, 3.0), 1: (1.0, 3.0)}, 2)
        found = gradsurgeon.compare(two, one)
        assert found.first[0].text == "gradient of b.w"
        assert (
            "step 0, gradient: the gradient of a.w agrees, the gradient of b.w does not: "
            in str(found)
        )


def test_without_modules_the_furthest_gradient_comes_first(tmp_path: Path) -> None:
    one = write(tmp_path / "a", {0: (1.0, 1.0)}, 1, first=1.0)
    two = write(tmp_path / "b", {0: (1.0, 9.0), 1: (1.0, 9.0)}, 2, first=2.0)
    found = gradsurgeon.compare(two, one)
    assert [tensor.text for tensor in found.first] == ["gradient of b.w", "gradient of a.w"]
    assert "step 0, gradient: the gradient of b.w does not agree: distance" in str(found)
