"""The order in which tensors came about, runs of several ranks, and how far noise goes: on numbers made by hand."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import meta, values

import gradsurgeon
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report.comparison import order, tolerance
from gradsurgeon.report.comparison.reading import STATS, stripped


def shown(chains: Any, names: Any, calls: Any = None, numbers: Any = None) -> list[str]:
    """Return the events of a pass in order, such as `+a` for the input and `-a` for the output of a module."""
    counts = dict.fromkeys(names, 1) | (calls or {})
    events = order.forward_order(order.merged(chains, names), counts, numbers or {})
    assert sorted(events.values()) == list(range(len(events)))
    texts = {
        event: f"{'-' if event[0] else '+'}{event[1]}{event[2] if counts[event[1]] > 1 else ''}"
        for event in events
    }
    return [texts[event] for event in sorted(events, key=events.__getitem__)]


class TestOrder:
    def test_an_output_comes_after_everything_inside(self) -> None:
        names = ["b", "b.x", "a"]
        assert shown([["a", "b", "b.x"]], names) == ["+a", "-a", "+b", "+b.x", "-b.x", "-b"]

    def test_chains_are_merged_and_the_model_breaks_ties(self) -> None:
        names = ["a", "b", "c", "d"]
        assert order.merged([["c", "b"], ["b", "d"]], names) == ["a", "c", "b", "d"]

    def test_chains_that_contradict_each_other(self) -> None:
        assert sorted(order.merged([["a", "b"], ["b", "a"]], ["b", "a", "c"])) == ["a", "b", "c"]

    def test_a_shared_activation_follows_what_it_reads(self) -> None:
        # b -> act -> a -> act, where the model defines act first.
        numbers = {
            (True, "b", 0): (1.0,), (False, "act", 0): (1.0,), (True, "act", 0): (2.0,),
            (False, "a", 0): (2.0,), (True, "a", 0): (3.0,), (False, "act", 1): (3.0,),
        }  # fmt: skip
        found = shown([["b", "a"]], ["act", "b", "a"], {"act": 2}, numbers)
        assert found == ["+b", "-b", "+act0", "-act0", "+a", "-a", "+act1", "-act1"]

    def test_a_call_whose_input_is_a_sum_comes_before_what_reads_it(self) -> None:
        numbers = {
            (True, "n.bn1", 0): (1.0,), (False, "n.relu", 0): (1.0,),
            (True, "n.relu", 1): (5.0,), (True, "n", 0): (5.0,),
        }  # fmt: skip
        names = ["n", "n.bn1", "n.relu", "n.bn2"]
        found = shown([["n", "n.bn1", "n.bn2"]], names, {"n.relu": 2}, numbers)
        middle = ["+n.relu0", "-n.relu0", "+n.bn2", "-n.bn2", "+n.relu1", "-n.relu1"]
        assert found == ["+n", "+n.bn1", "-n.bn1", *middle, "-n"]

    def test_a_block_that_runs_twice_keeps_its_inside(self) -> None:
        numbers = {
            (True, "e", 0): (1.0,),
            (False, "s", 0): (1.0,),
            (True, "s", 0): (2.0,),
            (False, "s", 1): (2.0,),
        }
        found = shown([["e"], ["s", "s.x"]], ["e", "s", "s.x", "h"], {"s": 2, "s.x": 2}, numbers)
        calls = [f"{event}{call}" for call in (0, 1) for event in ("+s", "+s.x", "-s.x", "-s")]
        assert found == ["+e", "-e", *calls, "+h", "-h"]

    def test_without_numbers_there_is_an_order_too(self) -> None:
        found = shown([], ["a", "act", "b"], {"act": 2})
        assert found == ["+a", "-a", "+act0", "-act0", "+b", "-b", "+act1", "-act1"]


def test_names_without_wrappers() -> None:
    assert stripped("module._orig_mod.h.0._checkpoint_wrapped_module.modules.q") == "h.0.modules.q"


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
        groups, tensors = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])
        gradient = groups == 0
        found = tolerance.lifted(drift, groups, tensors, gradient, ~gradient)
        assert found == pytest.approx([2e-6, 3e-6, 2e-6, 1e-7, 1e-7, 1e-7])

    def test_rounding_that_decides_a_gradient_decides_its_update(self) -> None:
        drift, tensors = np.array([0.5, 1e-6, 1e-7, 1e-7]), np.array([0, 1, 0, 1])
        gradient = np.array([True, True, False, False])
        found = tolerance.lifted(drift, np.arange(4), tensors, gradient, ~gradient)
        assert found == pytest.approx([0.5, 1e-6, 0.5, 1e-7])

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
                writer.add(key, 0, values(size or 1.0, size or output), frozenset())
                key = Key("grads", stat, "accumulated", ("a.w", "b.w"))
                writer.add(key, 0, values(size or first, size or gradient), frozenset())
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
