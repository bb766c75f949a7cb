"""Reports of run directories: short ones to the last value, long ones by cells of several rows."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from runs import KEY, meta, values, write

from gradsurgeon import Event
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report import RuleInfo, from_run, summary
from gradsurgeon.report.spikes import LEAST_PAST
from gradsurgeon.report.tables import NONFINITE

STEPS = 10_000


def long_history(seed: int) -> list[float | None]:
    rng = random.Random(seed)
    return [rng.lognormvariate(0.0, 0.3) for _ in range(STEPS)]


def cells(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


@pytest.fixture
def as_if_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsurgeon.report.history.MOST_VALUES", 3 * STEPS // 2)


def test_a_short_run_reads_as_its_session_would(tmp_path: Path) -> None:
    writer = write(tmp_path, {"a.weight": [1.0, 2.0, 64.0, 3.0, 4.0], "a.bias": [None] * 5})
    writer.statuses({"norms": RuleStatus(2, 5, 0, 4)})
    writer.event(Event("trap", "norms", 2, 0, "a.weight", "bad"))
    writer.close()
    with open_run(tmp_path) as run:
        report = from_run(run)
        text = report.text(width=100)
        assert summary(run).text(width=100) == text
    assert text.splitlines()[:3] == [
        "look: bad",
        "ended, traps tripped in 1 step",
        "summary: rules.yaml on Net: steps 0..4, 1 event (1 trap)",
    ]
    assert report.rules == {"norms": RuleInfo("norm-log", "observe", ("a.weight", "a.bias"))}
    # The file is closed; what was read stays.
    assert report.text(width=100) == text
    assert cells(text, "a.weight")[2:6] == ["1", "3", "64", "4"]
    assert "never got a gradient: a.bias" in text
    assert "step 2  trap  norms  a.weight" in text


@pytest.mark.usefixtures("as_if_long")
def test_what_all_layers_do_together_in_a_long_run_is_told_with_its_step(
    tmp_path: Path,
) -> None:
    at = 5_001
    names = [f"layer.{number}" for number in range(5)]
    histories = {name: long_history(number) for number, name in enumerate(names)}
    for history in histories.values():
        history[at] = 100.0
    write(tmp_path / "spike", histories).close()
    with open_run(tmp_path / "spike") as run:
        found = from_run(run)
        text = found.text(width=110)
    assert found.history.rows_of_a_column > 1
    few = found.history.rows_of_a_column
    assert f"spike: the norm of all 5 parameters, 224 at step {at - at % few}, " in text
    (whole,) = found.history.gradients
    assert whole.steps.tolist() == [*range(0, STEPS, few)]


@pytest.mark.usefixtures("as_if_long")
def test_an_explosion_in_a_long_run_is_told_with_its_steps(tmp_path: Path) -> None:
    grown = [min(1.0 * 1.01**step, 1e6 + step) for step in range(STEPS)]
    grown[9_997], grown[9_998] = 5e7, 4e7
    write(tmp_path, {"a": [*grown], "b": [*grown[:-40], *[math.nan] * 40]}).close()
    with open_run(tmp_path) as run:
        a, b = from_run(run).history.tracks
        text = from_run(run).text(width=110)
    assert a.largest == 5e7
    # Two steps count as one, by the larger norm.
    assert (a.last, b.finite_norms[-1]) == pytest.approx((4e7, grown[-41]), rel=1e-4)
    assert "a grew from 1.01 to 5e+07 at step 9996 (last " in text


@pytest.mark.usefixtures("as_if_long")
@pytest.mark.parametrize("spike_at", [20, 255, 256, 9_999])
def test_one_step_of_ten_thousand_survives(tmp_path: Path, spike_at: int) -> None:
    history, broken = long_history(1), long_history(2)
    history[spike_at], broken[spike_at] = 1e4, math.nan
    write(tmp_path, {"spiky": history, "broken": broken, "calm": long_history(3)}).close()
    with open_run(tmp_path) as run:
        report = from_run(run)
        text = report.text(width=110)
    few = report.history.rows_of_a_column
    shown_at = spike_at - spike_at % few
    if spike_at // few >= LEAST_PAST:
        assert f"largest spike: spiky, 1e+04 at step {shown_at}, " in text
    assert f"non-finite: 1 parameter, first at step {shown_at}: broken" in text
    assert ("finite again since" in text) == (spike_at < STEPS - 1)
    drawn = cells(text, "spiky")[1]
    assert drawn.count("█") == 1
    assert abs(drawn.index("█") - spike_at * len(drawn) / STEPS) <= 1
    assert cells(text, "broken")[1].index(NONFINITE) == drawn.index("█")
    assert "2 successive steps count as one, by their largest norm" in text


def test_ranks_are_not_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, size in ((1, 100.0), (0, 1.0)):
        writer = RunWriter(tmp_path, rank=rank, meta=meta(mode="observe"))
        writer.add(KEY, 0, values(size, size))
        writer.close()
    for most in (10**9, 1):
        monkeypatch.setattr("gradsurgeon.report.history.MOST_VALUES", most)
        with open_run(tmp_path) as run:
            text = from_run(run).text(width=100)
        assert "observed only: no rule changed anything; 2 ranks, norms of the lowest" in text
        assert cells(text, "a.bias")[2:6] == ["1", "1", "1", "1"]


def test_tensors_of_modules_have_rows_as_well(tmp_path: Path) -> None:
    rules = [
        {"id": "norms", "action": "norm-log", "params": ["a.weight", "a.bias"]},
        {"id": "hidden", "action": "norm-log", "tensor": "output[0]", "modules": ["block.1"]},
    ]
    writer = RunWriter(tmp_path, meta=meta(plan={"rules": rules}))
    writer.add(KEY, 0, values(1.0, math.nan))
    writer.add(Key("hidden", "l2", "forward", ("block.1",)), 0, values(math.inf))
    writer.close()
    with open_run(tmp_path) as run:
        text = from_run(run).text(width=100)
    assert "norms (l2) of 2 parameters, recorded by norms (at accumulated)\n" in text
    assert "norms (l2) of 1 output, recorded by hidden (at forward)\n" in text
    assert cells(text, "block.1")[-2:] == ["inf", "1"]
    # A norm is compared with its own kind.
    assert "non-finite: 1 parameter, first at step 0: a.bias\n" in text
    assert "non-finite (output): 1 tensor, first at step 0: block.1\n" in text
