"""What a report remarks on real trainings: each known fault with its name, step and number, and no fault of a healthy one.

`trainings.py` says what each of them is, and why a remark must or must not come.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import pytest
import torch
from laws import trainings
from laws.bypass_worker import BYPASSED
from laws.trainings import Training
from pairs import slow
from ranks import Json, run_ranks
from runs import meta
from small import rule_file
from torch import Tensor

import gradsurgeon
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter

pytestmark = pytest.mark.slow


def remarks(training: Training, path: Path) -> list[str]:
    """Train with records in memory and on disk; return the remarks, which are the same of both."""
    rules = rule_file(*training.rules)
    with gradsurgeon.apply(
        training.model, rules, optimizer=training.optimizers, record=path
    ) as session:
        training.loop()
    assert all(status.fired for status in session.status().values())
    said = stored(path)
    assert list(gradsurgeon.report.summary(session).remarks) == said
    return said


def stored(path: Path) -> list[str]:
    with gradsurgeon.open_run(path) as run:
        return list(gradsurgeon.report.from_run(run).remarks)


def only(said: Sequence[str], *words: str) -> list[str]:
    """Return for each word the one remark that begins with it. There are no others."""
    found = [[remark for remark in said if remark.startswith(word)] for word in words]
    assert ([1] * len(words), len(words)) == (list(map(len, found)), len(said)), "\n".join(said)
    return [remark for (remark,) in found]


def names(remark: str, of: Training) -> set[str]:
    """Return the parameters and modules that a remark names."""
    known = [name for name, _ in (*of.model.named_parameters(), *of.model.named_modules()) if name]
    return {
        name for name in known if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w]|\.\w)", remark)
    }


def numbers(remark: str) -> list[float]:
    found = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", remark)
    return [float(number.replace(",", "")) for number in found]


def tells(remark: str, *values: float, within: float = 0.01) -> bool:
    """Return whether a remark has all these numbers in it, to a share of each."""
    told = numbers(remark)
    return all(any(math.isclose(value, one, rel_tol=within) for one in told) for value in values)


def tells_of_one(
    remark: str,
    of: Training,
    called: Iterable[str],
    values: Callable[[list[float]], Sequence[float]],
) -> bool:
    """Return whether a remark has the numbers of one of some parameters."""
    return any(tells(remark, *values(of.of(name))) for name in called)


def test_layers_that_vanish_are_named_and_the_head_is_not(tmp_path: Path) -> None:
    training = trainings.deep_sigmoids()
    weights, backwards = only(remarks(training, tmp_path), "vanishing:", "vanishing (")
    lowest = {f"layer{layer}.{part}" for layer in range(5) for part in ("weight", "bias")}
    assert {"layer0.weight", "layer0.bias"} <= names(weights, training) <= lowest
    assert tells_of_one(weights, training, lowest, lambda norms: [median(norms)])
    modules = {f"{kind}{layer}" for layer in range(6) for kind in ("layer", "sigmoid")}
    assert "layer0" in names(backwards, training) <= modules


def test_a_divergence_is_told_with_both_its_ends(tmp_path: Path) -> None:
    training = trainings.diverging(40)
    (remark,) = only(remarks(training, tmp_path), "exploding")
    assert names(remark, training) == {"lengths.weight", "lengths.bias"}
    assert tells_of_one(
        remark, training, names(remark, training), lambda norms: [norms[0], norms[-1]]
    )


def first_nonfinite(norms: Sequence[float]) -> int:
    return next(step for step, norm in enumerate(norms) if not math.isfinite(norm))


def test_a_divergence_that_ends_in_nan_has_grown_before(tmp_path: Path) -> None:
    training = trainings.diverging(130)
    grown, nonfinite = only(remarks(training, tmp_path), "exploding", "non-finite")
    both = {"lengths.weight", "lengths.bias"}
    assert names(grown, training) == both
    assert names(nonfinite, training) <= both
    step = min(first_nonfinite(training.of(name)) for name in both)
    assert 80 < step < 125
    assert step in numbers(nonfinite)

    def ends(norms: list[float]) -> list[float]:
        return [norms[0], norms[first_nonfinite(norms) - 1]]

    assert tells_of_one(grown, training, both, ends)


def test_a_training_that_blows_up_within_a_few_steps_has_grown_before(tmp_path: Path) -> None:
    training = trainings.blown_up()
    grown, nonfinite = only(remarks(training, tmp_path), "exploding", "non-finite")
    step = first_nonfinite(training.whole())
    assert 101 < step < 110
    assert step in numbers(nonfinite)
    assert max(numbers(grown)) > 1e3


@pytest.mark.slow
def test_a_branch_that_dies_is_named_with_its_last_step(tmp_path: Path) -> None:
    training = trainings.dead_branch()
    (remark,) = only(remarks(training, tmp_path), "norm exactly 0")
    assert names(remark, training) == {"block1.up.weight", "block1.up.bias", "block1.down.weight"}
    assert 120 in numbers(remark)


def test_a_bad_batch_is_the_largest_spike(tmp_path: Path) -> None:
    training = trainings.bad_batch()
    (remark,) = only(remarks(training, tmp_path), "largest spike")
    assert 177 in numbers(remark)
    assert tells(remark, training.whole()[177]) or tells_of_one(
        remark, training, names(remark, training), lambda norms: [norms[177]]
    )


def hundred_thousand(path: Path, bad: int | None) -> Tensor:
    """Write and return norms of eight tensors that fall and vary; in a bad step all are 200 times as large."""
    called = tuple(f"layers.{place}.weight" for place in range(8))
    norms = torch.randn(100_000, 8, generator=torch.Generator().manual_seed(0)).mul(0.3).exp()
    norms *= (1 + torch.arange(100_000) / 1000)[:, None].rsqrt()
    if bad is not None:
        norms[bad] *= 200
    writer = RunWriter(path, rank=0, meta=meta(called))
    key = Key("norms", "l2", "accumulated", called)
    for step, row in enumerate(norms.numpy()):
        writer.add(key, step, row.tobytes())
    writer.close()
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("bad", [61_803, 99_999])
def test_a_bad_batch_in_a_hundred_thousand_steps_is_found(tmp_path: Path, bad: int) -> None:
    norms = hundred_thousand(tmp_path / "run", bad)
    (remark,) = only(stored(tmp_path / "run"), "largest spike")
    assert bad in numbers(remark)
    usual = float(norms[bad - 64 : bad].square().sum(1).sqrt().median())
    assert tells(remark, float(norms[bad].norm()), float(norms[bad].norm()) / usual)


@pytest.mark.slow
def test_a_hundred_thousand_steps_without_a_bad_batch_have_no_remark(tmp_path: Path) -> None:
    hundred_thousand(tmp_path / "run", None)
    assert stored(tmp_path / "run") == []


def test_a_nan_that_goes_away_is_told_with_its_first_and_last_step(tmp_path: Path) -> None:
    (remark,) = only(remarks(trainings.nan_for_a_while(), tmp_path), "non-finite")
    assert {60, 79} <= set(numbers(remark))
    assert "again" in remark


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Json]]:
    """Return where two ranks have written their runs, and the norms that each of them saw."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("bypass_worker.py")
    words = [str(folder / "healthy"), str(folder / "bypassed")]
    return folder, run_ranks(worker, folder / "seen", words=words)


@pytest.mark.slow
def test_ranks_that_part_are_told_with_the_step_and_the_tensor(
    ranks: tuple[Path, list[Json]],
) -> None:
    folder, seen = ranks
    (remark,) = [one for one in stored(folder / "bypassed") if "ranks differ" in one]
    assert BYPASSED in numbers(remark)
    norms = [rank["bypassed"][BYPASSED] for rank in seen]
    named = [name for name in norms[0] if re.search(rf"(?<![\w.]){re.escape(name)}\b", remark)]
    assert len(named) == 1
    assert tells(remark, *(rank[named[0]] for rank in norms))


@pytest.mark.slow
def test_ranks_that_average_have_no_remark(ranks: tuple[Path, list[Json]]) -> None:
    folder, _ = ranks
    assert stored(folder / "healthy") == []


@pytest.mark.parametrize(
    "healthy",
    [
        trainings.overfitting,
        trainings.lazy_penalty,
        *slow(
            trainings.accumulation,
            trainings.batch_norms,
            trainings.zero_initialised,
            trainings.warm_up_and_cosine,
            trainings.step_decay,
            trainings.unfreezing,
            trainings.gan,
            trainings.reinforce,
            trainings.key_biases,
            trainings.transformer,
            trainings.experts,
            trainings.experts_with_zeros,
            trainings.stochastic_depth,
            trainings.recurrence,
            trainings.alternating_tasks,
            trainings.warm_restarts,
            trainings.rare_rows,
        ),
    ],
)
def test_a_healthy_training_has_no_remark(healthy: Callable[[], Training], tmp_path: Path) -> None:
    assert remarks(healthy(), tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("healthy", "frozen"),
    [(trainings.lora, 6), (trainings.fine_tuning, 12)],
)
def test_what_is_frozen_is_told_apart_from_remarks(
    healthy: Callable[[], Training], frozen: int, tmp_path: Path
) -> None:
    assert remarks(healthy(), tmp_path) == []
    with gradsurgeon.open_run(tmp_path) as run:
        text = str(gradsurgeon.report.from_run(run))
    assert f"requires_grad off: {frozen} parameters" in text
    assert "never got" not in text
