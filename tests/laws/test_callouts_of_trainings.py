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
from laws import trainings
from laws.trainings import Training
from small import rule_file

import gradsurgeon

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


@pytest.mark.parametrize(
    "healthy",
    [
        trainings.overfitting,
        trainings.lazy_penalty,
        trainings.accumulation,
        trainings.batch_norms,
        trainings.warm_up_and_cosine,
        trainings.unfreezing,
        trainings.gan,
        trainings.reinforce,
        trainings.key_biases,
        trainings.transformer,
        trainings.experts,
        trainings.experts_with_zeros,
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
