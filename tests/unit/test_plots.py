"""Pictures of norms over time, by the data that they are drawn from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from ranks import Json
from runs import KEY, add, meta, values, write

import gradsurgeon
from gradsurgeon import Event, GradSurgeonError, RecordError
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report.run import Run

pytestmark = pytest.mark.slow

NAN, INF = math.nan, math.inf
Histories = Mapping[str, Sequence[float | None]]
Opened = Callable[[Histories], Run]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Opened]:
    """Return a function that writes a run and opens it."""
    opened = []

    def run(histories: Histories) -> Run:
        write(tmp_path / "run", histories).close()
        opened.append(gradsurgeon.open_run(tmp_path / "run"))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def axes_of(figure: Figure) -> Axes:
    return figure.axes[0]


def lines(figure: Figure) -> Json:
    """Return the norms that are drawn as lines, by label."""
    return {
        str(line.get_label()): (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
        )
        for line in axes_of(figure).lines
        if line.get_linestyle() == "-"
    }


def marks(figure: Figure, marker: str) -> list[float]:
    """Return the steps at which something is marked."""
    found = [
        line
        for line in axes_of(figure).lines
        if line.get_marker() == marker and line.get_linestyle() == "None"
    ]
    return sorted(step for line in found for step in np.asarray(line.get_xdata()).tolist())


def across(figure: Figure) -> list[float]:
    """Return the steps of the lines across."""
    lines = [one for one in axes_of(figure).collections if isinstance(one, LineCollection)]
    return [segment[0][0] for one in lines for segment in one.get_segments()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def same(found: Sequence[float], expected: Sequence[float]) -> bool:
    return np.array_equal(np.asarray(found), np.asarray(expected), equal_nan=True)


def test_a_line_has_gaps_and_marks_for_what_is_no_norm(recorded: Opened) -> None:
    figure = recorded({"a": [1.0, 2.0, None, 4.0, NAN, 0.0, 8.0], "b": [1.0] * 7}).plot(name="a")
    assert isinstance(figure, Figure)
    ((label, (steps, norms)),) = lines(figure).items()
    assert label == "a (1 non-finite)"
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    assert same(norms, [1.0, 2.0, NAN, 4.0, NAN, NAN, 8.0])
    assert marks(figure, "x") == [4]
    axes = axes_of(figure)
    assert (axes.get_yscale(), axes.get_xlabel()) == ("log", "step")
    assert axes.get_ylabel() == "l2 norm at accumulated"
    assert axes.get_title(loc="left") == "l2 norms: rules.yaml on Net"
    # The cross is at the upper end of the axis. Between two gaps a line has no length.
    (cross,) = (line for line in axes.lines if line.get_marker() == "x")
    assert np.asarray(cross.get_ydata()).tolist() == [1]
    assert axes.lines[-1].get_marker() == "."


def test_without_a_name_the_worst_layers_and_the_whole_are_drawn(recorded: Opened) -> None:
    histories = {f"h.{i}": [3.0] * 30 for i in range(14)}
    histories["h.12"][20] = 300.0
    histories["h.4"][7] = NAN
    figure = recorded(histories).plot()
    drawn = lines(figure)
    # All others are equally calm, and stand as in the model.
    assert list(drawn) == [
        "norm of all 14 parameters (1 non-finite)",
        *(f"h.{i}" for i in range(4)),
        "h.4 (1 non-finite)",
        *(f"h.{i}" for i in (5, 6, 7, 8, 12)),
    ]
    total = drawn["norm of all 14 parameters (1 non-finite)"][1]
    expected = [math.sqrt(14 * 9.0)] * 30
    expected[20], expected[7] = math.sqrt(13 * 9.0 + 9e4), NAN
    assert total == pytest.approx(expected, nan_ok=True)
    assert same(drawn["h.12"][1], histories["h.12"])


def test_names_patterns_and_aliases_choose(recorded: Opened) -> None:
    histories = {name: [1.0, 2.0] for name in ("h.0.w", "h.0.b", "h.1.w", "lstm[0]")}
    run = recorded(histories)
    assert list(lines(run.plot(name="*.w"))) == ["h.0.w", "h.1.w"]
    # `runs.meta` ties each parameter to another name.
    assert list(lines(run.plot(name=["tied.h.1.w", "h.0.{b,x}"]))) == ["h.0.b", "h.1.w"]
    assert list(lines(run.plot(name="lstm[0]"))) == ["lstm[0]"]
    with pytest.raises(
        KeyError, match=r'^\'"w" is no name of what was recorded; did you mean "\*\.w"'
    ):
        run.plot(name="w")


def test_many_lines_have_a_legend_that_ends(recorded: Opened) -> None:
    figure = recorded({f"p{i}": [1.0, 2.0] for i in range(40)}).plot(name="*")
    assert len(lines(figure)) == 40
    assert legend(figure) == [f"p{i}" for i in range(24)]
    assert figure.legends[0].get_title().get_text() == "the first 24 of 40"
    assert len({str(line.get_color()) for line in axes_of(figure).lines}) == 40


def test_events_are_lines_across(tmp_path: Path) -> None:
    roles = {"norms": {"role": "observe", "stats": ["l2"]}, "clip": {"role": "edit"}}
    plan = {"rules": [{"id": "clip", "action": "spike-trap", "params": ["a"]}]}
    writer = RunWriter(tmp_path, meta=meta(("a",), roles=roles, plan=plan))
    for step in range(9):
        add(writer, Key("norms", "l2", "accumulated", ("a",)), step, values(1.0))
    for step in (3, 3, 7):
        writer.event(Event("trap", "trap", step, 0, "a", "bad"))
    writer.event(Event("skipped-step", "trap", 3, 0, "", "skipped"))
    writer.event(Event("notice", "", 5, 0, "", "nothing of a step"))
    writer.event(Event("spike", "clip", 6, 0, "a", "a spike that was clipped is no trip"))
    writer.event(Event("spike", "spikes", 8, 0, "a", "a spike"))
    writer.close()
    with gradsurgeon.open_run(tmp_path) as run:
        figure = run.plot()
    assert across(figure) == [3, 7, 8]
    assert legend(figure) == ["a", "trap, check or skipped step"]


def test_several_rules_are_told_apart(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, meta=meta())
    for rule, point, norm in (("after", "step", 2.0), ("before", "accumulated", 1.0)):
        add(writer, Key(rule, "l2", point, KEY.names), 0, values(norm, norm))
    writer.close()
    with gradsurgeon.open_run(tmp_path) as run:
        assert lines(run.plot())["a.bias"] == ([0], [1.0])
        assert lines(run.plot(rule="after"))["a.bias"] == ([0], [2.0])
        with pytest.raises(RecordError, match="no l2 norm was recorded by a rule 'other'"):
            run.plot(rule="other")


def test_what_is_not_there_is_told(recorded: Opened, tmp_path: Path) -> None:
    run: Any = recorded({"a": [1.0]})
    with pytest.raises(ValueError, match=r"^no picture 'lines' here; there are norms$"):
        run.plot("lines")
    write(tmp_path / "l1", {"a": [1.0]}, stat="l1").close()
    with gradsurgeon.open_run(tmp_path / "l1") as other, pytest.raises(RecordError) as caught:
        other.plot()
    assert str(caught.value).startswith("nothing to draw yet: rule norms records l2 norms")
    write(tmp_path / "none", {"a": [1.0]}, stat="l1", rule="sizes").close()
    with gradsurgeon.open_run(tmp_path / "none") as other, pytest.raises(RecordError) as caught:
        other.plot(rule="sizes")
    assert '{id: norms, action: norm-log, params: "*"}' in str(caught.value)


HOSTILE = ("$\\frac{", "_hidden", "<script>alert(1)</script>", "a\u202eb\nc", "x" * 300)


def test_hostile_names_are_drawn_as_they_are(recorded: Opened) -> None:
    figure = recorded({name: [1.0, NAN] for name in HOSTILE}).plot()
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    texts = legend(figure)
    assert texts[1:3] == [r"\$\frac{ (1 non-finite)", " _hidden (1 non-finite)"]
    assert texts[4] == r"a\u202eb\nc (1 non-finite)"
    assert len(texts[5]) < 80


def test_without_matplotlib_the_extra_is_named(
    recorded: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded({"a": [1.0]})
    for name in [*sys.modules]:
        if name.startswith(("gradsurgeon.report.plots", "matplotlib.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("gradsurgeon.report.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GradSurgeonError, match=r"pip install 'gradsurgeon\[plot\]'"):
        run.plot()
