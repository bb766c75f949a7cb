"""What `gradsurgeon watch` draws, from run directories as the writer leaves them."""

from __future__ import annotations

import contextlib
import math
import pathlib
import random
import re
import sqlite3
import time
from collections.abc import Sequence

import pytest
from gradsurgeon.report.measurements import InMemory
from gradsurgeon.report.newest_rows import NewestRows
from runs import KEY, listing, meta, refuse_wal, values, write

from gradsurgeon import Event, RecordError
from gradsurgeon.events import RuleStatus
from gradsurgeon.report import from_run
from gradsurgeon.report.live import LiveRun, Snapshot
from gradsurgeon.report.screen import ending, screen, status_line
from gradsurgeon.store import Key
from gradsurgeon.store.run import open_run
from gradsurgeon.store.writer import RunWriter

STEPS = 100


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def shown(snapshot: Snapshot, columns: int = 100) -> list[str]:
    return [line.text for line in screen(snapshot, columns)]


def read(path: pathlib.Path) -> Snapshot:
    return LiveRun(path).read()


def calm(seed: int, steps: int = STEPS) -> list[float | None]:
    rng = random.Random(seed)
    return [rng.uniform(0.9, 1.1) for _ in range(steps)]


def with_one(history: Sequence[float | None], step: int, value: float) -> list[float | None]:
    return [*history[:step], value, *history[step + 1 :]]


def trap(step: int, rank: int = 0, message: str = "bad\nvery") -> Event:
    return Event("trap", "nans", step, rank, "w", message)


class TestWorst:
    def test_in_the_order_of_how_bad_they_are(self, tmp_path: pathlib.Path) -> None:
        write(
            tmp_path,
            {
                **{f"calm.{number}": calm(number) for number in range(12)},
                "gains": [*calm(20)[:-1], 5.0],
                "spikes": with_one(calm(21), 40, 64.0),
                "vanishes": [*calm(22)[:-1], 0.01],
                "dies": [*calm(23)[:-1], 0.0],
                "spikes more": with_one(calm(24), 90, 6400.0),
                "breaks": with_one(calm(25), 70, math.nan),
                "breaks first": with_one(calm(26), 60, math.inf),
                "breaks with it": with_one(with_one(calm(27), 60, math.inf), 50, 64.0),
                "dead": [0.0] * STEPS,
                "never": [None] * STEPS,
            },
        ).close()
        snapshot = read(tmp_path)
        names = [row.name for row in snapshot.worst]
        assert names[:8] == [
            "breaks with it",
            "breaks first",
            "breaks",
            "spikes more",
            "spikes",
            "dies",
            "vanishes",
            "gains",
        ]
        assert all(name.startswith("calm.") for name in names[8:])
        assert len(names) == 10
        lines = shown(snapshot)
        assert "worst norms (l2) of 21 parameters, in steps 0..99" in lines

        def cells(name: str) -> list[str]:
            line = next(line for line in lines if line.startswith(f"  {name}  "))
            return re.split(r" {2,}", line.strip())

        assert cells("breaks")[-1] == "1 non-finite, from 70"
        assert re.fullmatch(r"spike 6[0-9.e+]+x at step 90", cells("spikes more")[-1])
        assert cells("spikes more")[4] == "6.4e+03"
        assert cells("dies")[2] == "0"
        assert cells("dies")[-1] == "now 0"
        assert cells("vanishes")[2] == "0.01"
        assert re.fullmatch(r"0.009\d*x its median|0.01\d*x its median", cells("vanishes")[-1])
        assert (cells("gains")[2], cells("gains")[4]) == ("5", "5")
        assert len(cells("gains")) == 5  # less than ten times its median: no remark
        drawn = cells("breaks")[1]
        assert drawn.index("✗") == 70 * len(drawn) // STEPS

    def test_only_the_newest_rows_are_read(self, tmp_path: pathlib.Path) -> None:
        broken = with_one(with_one([1.0] * 10_000, 3, math.nan), 9_999, 3.0)
        write(tmp_path, {"w": broken}).close()
        snapshot = read(tmp_path)
        assert snapshot.span == (9_744, 9_999)
        (row,) = snapshot.worst
        assert (len(row.history.norms), row.history.nonfinite) == (256, 0)
        assert (row.history.last, row.history.median, row.history.largest) == (3.0, 1.0, 3.0)
        assert snapshot.step == 9_999

    def test_fewer_rows_of_a_large_model(self, tmp_path: pathlib.Path) -> None:
        names = tuple(f"w{number}" for number in range(5_000))
        writer = RunWriter(tmp_path, meta=meta(names))
        key = Key("norms", "l2", "accumulated", names)
        for step in range(60):
            writer.add(key, step, values(*[1.0] * 5_000))
        writer.close()
        assert read(tmp_path).span == (8, 59)

    def test_what_a_report_says_of_a_short_run(self, tmp_path: pathlib.Path) -> None:
        rng = random.Random(7)
        histories = {
            f"w{number}": [
                None if rng.random() < 0.2 else rng.choice((1.0, 2.0, 100.0, math.inf))
                for _ in range(50)
            ]
            for number in range(6)
        }
        writer = write(tmp_path, histories)
        # One of the tensors moves on to a series of its own.
        for step in range(50, 90):
            writer.add(Key("norms", "l2", "accumulated", ("w3",)), step, values(step))
        writer.close()
        with open_run(tmp_path) as run:
            newest, report = NewestRows(run), from_run(run).measurements
            assert isinstance(report, InMemory)
            for name in ("w0", "w1", "w2", "w4", "w5"):
                assert newest.keys_of(name) == report.keys_of(name)
                found, expected = (
                    repr(source.history(name, "norms", "accumulated"))
                    for source in (newest, report)
                )
                assert found == expected
            # What it had before it moved is out of view.
            moved = newest.history("w3", "norms", "accumulated")
            assert moved.norms == tuple(float(step) for step in range(50, 90))


class TestTotal:
    def test_it_is_that_of_each_step(self, tmp_path: pathlib.Path) -> None:
        writer = write(tmp_path, {"a": [3.0, 6.0, 1.0], "b": [4.0, 8.0, None]})
        writer.close()
        snapshot = read(tmp_path)
        assert snapshot.total is not None
        assert snapshot.total.history == ((0, 5.0), (1, 10.0), (2, 1.0))
        (line,) = (line for line in shown(snapshot) if line.startswith("total norm"))
        assert re.fullmatch(
            r"total norm 1 at step 2  \S{3}  2 parameters, norms at accumulated", line
        )

    @pytest.mark.parametrize(("broken", "text"), [(math.nan, "nan"), (math.inf, "inf")])
    def test_of_what_is_not_finite(self, tmp_path: pathlib.Path, broken: float, text: str) -> None:
        write(tmp_path, {"a": [3.0, broken], "b": [4.0, 1.0]}).close()
        (line,) = (one for one in screen(read(tmp_path), 100) if one.text.startswith("total norm"))
        assert line.text.startswith(f"total norm {text} at step 1  ")
        assert line.text.split()[6][-1] == "✗"
        assert line.style == "bad"

    def test_the_point_is_what_a_report_takes_and_the_rule_has_most(
        self, tmp_path: pathlib.Path
    ) -> None:
        writer = RunWriter(tmp_path, meta=meta(("a", "b")))
        for rule, point, names, value in (
            ("all", "backward", ("a", "b"), 1.0),
            ("few", "accumulated", ("a",), 2.0),
            ("most", "accumulated", ("a", "b"), 3.0),
            ("late", "step", ("a", "b"), 4.0),
            ("modules", "accumulated", ("block.1", "block.2", "block.3"), 5.0),
        ):
            writer.add(Key(rule, "l2", point, names), 0, values(*[value] * len(names)))
            writer.add(Key(rule, "max", point, names), 0, values(*[99.0] * len(names)))
        writer.close()
        total = read(tmp_path).total
        assert total is not None
        assert (total.rule, total.point, sorted(total.names)) == ("most", "accumulated", ["a", "b"])
        ((step, norm),) = total.history
        assert step == 0
        assert norm == pytest.approx(math.sqrt(18))

    def test_series_are_added_up_while_they_go_on(self, tmp_path: pathlib.Path) -> None:
        writer = RunWriter(tmp_path, meta=meta(("a", "b", "c")))
        writer.add(Key("norms", "l2", "accumulated", ("a", "b", "c")), 0, values(9.0, 9.0, 9.0))
        for step in range(1, 4):
            writer.add(Key("norms", "l2", "accumulated", ("a",)), step, values(3.0 * step))
            if step < 3:  # of the newest step this series is not there yet
                writer.add(
                    Key("norms", "l2", "accumulated", ("b", "c")), step, values(4.0 * step, 0.0)
                )
        writer.close()
        total = read(tmp_path).total
        assert total is not None
        assert total.names == {"a", "b", "c"}
        assert total.history == ((1, 5.0), (2, 10.0))

    def test_each_tensor_counts_once_on_several_ranks(self, tmp_path: pathlib.Path) -> None:
        writers = [RunWriter(tmp_path, rank=rank, meta=meta()) for rank in (0, 1)]
        for writer in writers:
            writer.add(KEY, 0, values(3.0, 4.0))
            norms = values(1.0 + writer.rank, 2.0)
            writer.add(Key("acts", "l2", "forward", ("x", f"y{writer.rank}")), 0, norms)
        for writer in writers:
            writer.close()
        snapshot = read(tmp_path)
        assert snapshot.total is not None
        assert snapshot.total.history == ((0, 5.0),)
        assert snapshot.measured == (5, "tensor")
        (row,) = (row for row in snapshot.worst if row.name == "x")
        assert row.history.norms == (1.0,)  # as the lowest rank has it


class TestEvents:
    def test_traps_first_and_the_newest_of_each(self, tmp_path: pathlib.Path) -> None:
        writer = write(tmp_path, {"w": [1.0]})
        for step in range(8):
            writer.event(trap(step))
            writer.event(Event("notice", "", step, 0, "", f"note {step}"))
        writer.close()
        lines = shown(read(tmp_path))
        begin = lines.index("events (16): trap 8, notice 8")
        assert lines[begin + 1 : begin + 11] == [
            *(f"  step {step}  trap  nans  w  bad" for step in (7, 6, 5, 4, 3)),
            *(f"  step {step}  notice  note {step}" for step in (7, 6, 5, 4, 3)),
        ]
        assert lines[begin + 11] == ""

    def test_each_is_read_once_and_new_ones_are_seen(self, tmp_path: pathlib.Path) -> None:
        writer = write(tmp_path, {"w": [1.0]})
        live = LiveRun(tmp_path)
        writer.event(trap(0))
        for _ in range(3):
            assert live.read().kinds == {"trap": 1}
        writer.event(trap(1))
        writer.event(Event("notice", "", 1, 0, "", "hello"))
        snapshot = live.read()
        assert snapshot.kinds == {"trap": 2, "notice": 1}
        assert snapshot.newest is not None
        assert snapshot.newest.message == "hello"
        writer.close()

    def test_more_than_are_read_at_a_time(self, tmp_path: pathlib.Path) -> None:
        writer = write(tmp_path, {"w": [1.0]})
        writer._batch.events.extend((float(step), trap(step)) for step in range(3_000))
        writer.close()
        live = LiveRun(tmp_path)
        for _ in range(2):
            snapshot = live.read()
            assert snapshot.kinds == {"trap": 3_000}
            assert [event.step for event in snapshot.events] == [2999, 2998, 2997, 2996, 2995]
        with open_run(tmp_path) as run:
            assert [event.step for event in run.events] == list(range(3_000))

    def test_what_several_ranks_note_counts_once(self, tmp_path: pathlib.Path) -> None:
        writers = [RunWriter(tmp_path, rank=rank, meta=meta()) for rank in (0, 1)]
        for writer in writers:
            writer.event(trap(5, rank=writer.rank))
        live = LiveRun(tmp_path)
        assert live.read().kinds == {"trap": 1}
        writers[1].event(trap(6, rank=1))
        lines = shown(live.read())
        begin = lines.index("events (2): trap 2")
        assert lines[begin + 1 : begin + 3] == [
            "  step 6  trap  nans  w  rank 1  bad",
            "  step 5  trap  nans  w  rank 0  bad",
        ]
        for writer in writers:
            writer.close()


class TestHead:
    def test_a_run_that_goes_on(self, tmp_path: pathlib.Path) -> None:
        began = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - 3_725))
        writer = RunWriter(tmp_path, meta=meta(created=began))
        clock = Clock()
        live = LiveRun(tmp_path, clock)
        assert re.fullmatch(
            r"rules.yaml on Net: running, no step yet, 1:02:0\d", shown(live.read())[0]
        )
        heads = []
        for seconds, steps in ((0.0, 10), (2.0, 110), (2.0, 130), (8.0, 140)):
            clock.now += seconds
            writer.add(KEY, steps, values(1.0, 1.0))
            writer.commit()
            heads.append(shown(live.read())[0])
        assert [re.sub(r", 1:02:0\d$", "", head) for head in heads] == [
            "rules.yaml on Net: running, step 10",
            "rules.yaml on Net: running, step 110, 50 steps/s",
            "rules.yaml on Net: running, step 130, 30 steps/s",
            "rules.yaml on Net: running, step 140, 3 steps/s",  # of the last ten seconds
        ]
        writer.close()
        head = shown(live.read())[0]
        assert re.fullmatch(r"rules.yaml on Net: finished, step 140, 1:02:0\d", head)

    def test_steps_of_rules_that_record_nothing(self, tmp_path: pathlib.Path) -> None:
        writer = RunWriter(tmp_path, meta=meta())
        writer.statuses({"clip": RuleStatus(2, 84, 0.5, 41)})
        writer.close()
        snapshot = read(tmp_path)
        assert snapshot.step == 41
        assert "norms: no l2 recorded yet" in shown(snapshot)
        assert status_line(snapshot) == "step 41  0 events"

    def test_ranks_and_what_became_of_them(self, tmp_path: pathlib.Path) -> None:
        writers = [RunWriter(tmp_path, rank=rank, meta=meta()) for rank in (0, 1, 2)]
        live = LiveRun(tmp_path)
        assert ": running, 3 ranks, no step yet" in shown(live.read())[0]
        writers[0].close()
        writers[1]._claim.release()
        snapshot = live.read()
        assert snapshot.state == "running"
        assert ": running, 3 ranks (1 finished, 1 stopped), no step" in shown(snapshot)[0]
        writers[2].close()
        snapshot = live.read()
        assert snapshot.state == "stopped"
        assert ending(snapshot).startswith("rank 1 has stopped without being closed")
        writers[1].close()
        assert ending(live.read()) == "the run has finished"

    def test_ranks_may_join(self, tmp_path: pathlib.Path) -> None:
        writers = [RunWriter(tmp_path, meta=meta())]
        live = LiveRun(tmp_path)
        assert list(live.read().states) == [0]
        writers.append(RunWriter(tmp_path, rank=1))
        assert list(live.read().states) == [0, 1]
        for writer in writers:
            writer.close()

    @pytest.mark.parametrize("created", [None, "x", 7, "9999-12-31T23:59:59", "0001-01-01"])
    def test_an_odd_beginning_is_not_shown(self, tmp_path: pathlib.Path, created: object) -> None:
        RunWriter(tmp_path, meta=meta(created=created)).close()
        head = shown(read(tmp_path))[0]
        assert head.startswith("rules.yaml on Net: finished, no step yet")
        assert "-" not in head


def test_rules_in_one_line_each(tmp_path: pathlib.Path) -> None:
    rules = [{"id": f"rule-{number}", "action": "clip-norm"} for number in range(11)]
    writer = RunWriter(tmp_path, meta=meta(plan={"rules": rules}))
    writer.statuses({f"rule-{number}": RuleStatus(2, 10 * number, 0.25, 7) for number in range(11)})
    writer.close()
    lines = shown(read(tmp_path))
    begin = lines.index("rules (11)")
    assert len(lines[begin:]) == 11
    assert lines[begin + 2].split()[:4] == ["rule-0", "clip-norm", "2", "0"]
    assert lines[begin + 2].endswith("NEVER FIRED")
    assert lines[begin + 3].split() == ["rule-1", "clip-norm", "2", "10", "25%", "7"]
    assert lines[-1] == "  ... and 3 more"


class TestSize:
    @pytest.fixture
    def full(self, tmp_path: pathlib.Path) -> Snapshot:
        names = [f"model.decoder.layers.{number}.self_attn.q_proj.weight" for number in range(30)]
        writer = write(tmp_path, {name: calm(number) for number, name in enumerate(names)})
        for step in range(8):
            writer.event(trap(step, message="m" * 300))
            writer.event(Event("notice", "", step, 0, "", "n" * 300))
        writer.statuses({f"rule-{number}": RuleStatus(2, 1, 0.0, 7) for number in range(12)})
        writer.close()
        return read(tmp_path)

    @pytest.mark.parametrize("columns", [1, 20, 40, 80, 120, 300])
    def test_nothing_is_longer_or_more_than_there_is(self, full: Snapshot, columns: int) -> None:
        for rows in range(1, 60):
            lines = screen(full, columns, rows, hint="q quits")
            assert len(lines) <= rows
            assert max(len(line.text) for line in lines) <= columns
            assert lines[0].style == "head"

    def test_what_is_left_out_first(self, full: Snapshot) -> None:
        everything = [line.text for line in screen(full, 80, hint="q quits")]
        assert [line.text for line in screen(full, 80, len(everything), "q quits")] == everything
        assert len(everything) == 42
        lines = [line.text for line in screen(full, 80, 24, hint="q quits")]
        assert len(lines) == 24
        assert "" not in lines
        assert lines[0] == everything[0]
        assert lines[1:8] == everything[2:9]  # the events, traps before others
        assert lines[8].startswith("worst norms (l2) of 30 parameters")
        assert lines[15].startswith("total norm ")
        assert lines[16] == "rules (12)"
        assert lines[-1] == "q quits"

    def test_names_are_cut_in_the_middle(self, full: Snapshot) -> None:
        lines = [line.text for line in screen(full, 64)]
        rows = [line for line in lines if line.startswith("  model.")]
        assert len(rows) == 10
        for row in rows:
            assert re.match(r"  model\.dec\S*…\S*oj\.weight  [▁▂▃▄▅▆▇█]{8}  ", row), row


def test_no_text_of_a_run_steers_the_terminal(tmp_path: pathlib.Path) -> None:
    evil = "w\x1b[2J\x07\u202e\r\nx"
    about = meta(
        (evil,),
        rules={"file": evil},
        mode=evil,
        created=evil,
        plan={"rules": [{"id": evil, "action": evil}]},
    )
    writer = RunWriter(tmp_path, meta=about)
    for point in ("accumulated", evil):
        writer.add(Key(evil, "l2", point, (evil,)), 0, values(1.0))
        writer.add(Key("norms", "l2", evil, ("y" + evil,)), 0, values(math.nan))
    writer.statuses({evil: RuleStatus(1, 1, 0.0, 0, (evil,))})
    writer.event(Event("trap", evil, 0, 0, evil, evil))
    writer.close()
    snapshot = read(tmp_path)
    lines = [*shown(snapshot, 200), status_line(snapshot)]
    assert not {"\x1b", "\x07", "\u202e", "\r", "\n"} & set("".join(lines))
    assert sum("w\\x1b[2J\\x07\\u202e\\r\\nx" in line for line in lines) >= 5


@pytest.mark.parametrize("log", ["wal", "no wal"])
def test_the_writer_is_not_kept_waiting_and_leaves_plain_files(
    tmp_path: pathlib.Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if log == "no wal":
        refuse_wal(monkeypatch)
    writer = write(tmp_path, {"w": [1.0]})
    writer.commit()
    live = LiveRun(tmp_path)
    for step in range(1, 20):
        writer.add(Key("norms", "l2", "accumulated", ("w",)), step, values(1.0))
        writer.commit()
        assert not writer._batch  # nobody held the file
        assert live.read().step == step
    writer.close()
    assert listing(tmp_path) == ["rank-0.db", "run.json"]


def test_damaged_files_are_an_error(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {"w": [1.0] * 5}).close()
    live = LiveRun(tmp_path)
    live.read()
    with contextlib.closing(sqlite3.connect(tmp_path / "rank-0.db")) as connection:
        connection.execute("UPDATE meta SET value = 'x' WHERE key = 'closed'")
        connection.commit()
    with pytest.raises(RecordError, match=r"rank-0.db: is damaged: it has values of wrong types"):
        live.read()


def test_a_small_screen_has_fewer_parts_and_no_heading_alone(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {"a": [3.0] * 9, "b": [4.0] * 9}).close()
    snapshot = read(tmp_path)
    texts = [line.text.split()[0] for line in screen(snapshot, 60, 6)]
    # Nothing stands below the heading of the rules, and there is no room for more.
    assert texts == ["rules.yaml", "events", "worst", "parameter", "a", "total"]
    assert len(screen(snapshot, 60, 1)) == 1
