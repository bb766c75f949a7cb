"""What `gradsurgeon watch` draws, from run directories as the writer leaves them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from runs import KEY, listing, meta, refuse_wal, values, write
from small import fields_of

from gradsurgeon import Event
from gradsurgeon.cli.watch import newest_report, screen
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.run import open_run
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.report import Report, from_run
from gradsurgeon.report.rules_and_events import by_kind
from gradsurgeon.report.tables import shortened

STEPS = 100


def shown(report: Report, columns: int = 100) -> list[str]:
    return screen(report, columns)


def calm(seed: int, steps: int = STEPS) -> list[float | None]:
    rng = random.Random(seed)
    return [rng.uniform(0.9, 1.1) for _ in range(steps)]


def with_one(history: Sequence[float | None], step: int, value: float) -> list[float | None]:
    return [*history[:step], value, *history[step + 1 :]]


def kinds(report: Report) -> dict[str, int]:
    return dict(by_kind(report.events))


def trap(step: int, rank: int = 0, message: str = "bad\nvery") -> Event:
    return Event("trap", "nans", step, rank, "w", message)


class TestWorst:
    def test_in_the_order_of_how_bad_they_are(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            {
                **{f"calm.{number}": calm(number) for number in range(12)},
                "spikes": with_one(calm(21), 40, 64.0),
                "spikes more": with_one(calm(24), 90, 6400.0),
                "breaks": with_one(calm(25), 70, math.nan),
                "breaks first": with_one(calm(26), 60, math.inf),
                "breaks with it": with_one(with_one(calm(27), 60, math.inf), 50, 64.0),
                "dead": [0.0] * STEPS,
                "never": [None] * STEPS,
            },
        ).close()
        lines = shown(newest_report(tmp_path))
        at = lines.index("norms (l2) of 18 parameters, recorded by norms (at accumulated)")
        rows = [re.split(r" {2,}", line.strip()) for line in lines[at + 2 : at + 12]]
        names = [row[0] for row in rows]
        assert names[:5] == ["breaks with it", "breaks first", "breaks", "spikes more", "spikes"]
        assert len(set(names)) == 10
        breaks, spikes = rows[2], rows[3]
        assert breaks[-1] == "1"
        assert breaks[1].index("✗") == 70 * len(breaks[1]) // STEPS
        assert spikes[4] == "6.4e+03"
        told = "2 of them first at step 60: breaks first, breaks with it; until step 70"
        assert f"non-finite: 3 parameters, {told}" in "\n".join(lines)

    def test_only_the_newest_rows_are_read(self, tmp_path: Path) -> None:
        broken = with_one(with_one([1.0] * 10_000, 3, math.nan), 9_999, 3.0)
        write(tmp_path, {"w": broken}).close()
        report = newest_report(tmp_path)
        (track,) = report.history.tracks
        assert track.steps.tolist() == [*range(9_744, 10_000)]
        assert not len(track.nonfinite_steps)
        assert (track.last, track.median, track.largest) == (3.0, 1.0, 3.0)
        # The run as a whole has all its steps.
        assert report.steps == (0, 9_999)

    def test_what_older_rows_have_is_not_missing(self, tmp_path: Path) -> None:
        early: list[float | None] = [*calm(1, 100), *[None] * 900]
        dead: list[float | None] = [*calm(2, 200), *[0.0] * 800]
        writer = write(tmp_path, {"w": calm(0, 1000), "early": early, "dead": dead})
        writer.statuses({"norms": RuleStatus(3, 5, 0, 999)})
        writer.close()
        lines = shown(newest_report(tmp_path))
        assert "never got a gradient" not in "\n".join(lines)
        # What is true of the newest rows alone stands below these words.
        at = lines.index("in the newest records:")
        assert lines[at + 1 : at + 3] == ["facts:", "  norm always exactly 0: dead"]
        with open_run(tmp_path) as run:
            assert "norm exactly 0 since step 200, and until the end: dead" in str(from_run(run))

    def test_ranks_that_differed_before_the_newest_rows(self, tmp_path: Path) -> None:
        writers = [RunWriter(tmp_path, rank=n, meta=meta(("w",), replicas=True)) for n in (0, 1)]
        for writer in writers:
            for step in range(1000):
                norm = 1.0 if step < 10 else 1.0 + writer.rank
                writer.add(Key("norms", "l2", "accumulated", ("w",)), step, values(norm))
        for writer in writers:
            writer.close()
        (told,) = (one for one in newest_report(tmp_path).remarks if one.startswith("ranks"))
        assert told.startswith("ranks differ at step 744 or before: the norm of w is 1 on rank 0")
        with open_run(tmp_path) as run:
            assert "ranks differ from step 10 on" in str(from_run(run))

    def test_fewer_rows_of_a_large_model(self, tmp_path: Path) -> None:
        names = tuple(f"w{number}" for number in range(5_000))
        writer = RunWriter(tmp_path, meta=meta(names))
        key = Key("norms", "l2", "accumulated", names)
        for step in range(60):
            writer.add(key, step, values(*[1.0] * 5_000))
        writer.close()
        track = newest_report(tmp_path).history.tracks[0]
        assert (track.steps[0], track.steps[-1]) == (8, 59)

    def test_what_a_report_says_of_a_short_run(self, tmp_path: Path) -> None:
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
            report = from_run(run)
        watched = newest_report(tmp_path)
        assert list(map(repr, watched.history.tracks)) == list(map(repr, report.history.tracks))
        assert watched.remarks == report.remarks
        assert watched.steps == report.steps


class TestTotal:
    def test_it_is_that_of_each_step(self, tmp_path: Path) -> None:
        write(tmp_path, {"a": [3.0, 6.0, 1.0, 3.0], "b": [4.0, 8.0, None, math.inf]}).close()
        report = newest_report(tmp_path)
        (whole,) = report.history.gradients
        assert whole.norms.tolist() == [5.0, 10.0, 1.0, math.inf]
        assert "norm of all 2 parameters: inf at step 3" in shown(report)

    def test_each_tensor_counts_once_on_several_ranks(self, tmp_path: Path) -> None:
        writers = [RunWriter(tmp_path, rank=rank, meta=meta()) for rank in (0, 1)]
        for writer in writers:
            writer.add(KEY, 0, values(3.0, 4.0))
            norms = values(1.0 + writer.rank, 2.0)
            writer.add(Key("acts", "l2", "forward", ("x", f"y{writer.rank}")), 0, norms)
        for writer in writers:
            writer.close()
        history = newest_report(tmp_path).history
        assert history.gradients[0].norms.tolist() == [5.0]
        norms_of = {track.name: track.last for track in history.tracks}
        # As the lowest rank has it.
        assert norms_of == {"a.weight": 3.0, "a.bias": 4.0, "x": 1.0, "y0": 2.0, "y1": 2.0}


class TestEvents:
    def test_traps_first_and_the_newest_of_each(self, tmp_path: Path) -> None:
        writer = write(tmp_path, {"w": [1.0]})
        for step in range(8):
            writer.event(trap(step, message=f"bad {'abcdefgh'[step]}"))
            writer.event(Event("notice", "", step, 0, "", f"note {'abcdefgh'[step]}"))
        writer.close()
        lines = shown(newest_report(tmp_path))
        begin = lines.index("events (16): trap 8, notice 8")
        assert lines[begin + 1 : begin + 9] == [
            *(f"  step {step}  trap  nans  w  bad {'abcdefgh'[step]}" for step in (7, 6, 5, 4)),
            *(f"  step {step}  notice  note {'abcdefgh'[step]}" for step in (7, 6, 5, 4)),
        ]
        assert lines[begin + 9] == ""

    def test_more_than_are_read_at_a_time(self, tmp_path: Path) -> None:
        writer = write(tmp_path, {"w": [1.0]})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "commit", lambda: None)  # all of them in one transaction
            for step in range(3_000):
                writer.event(trap(step))
        writer.close()
        report = newest_report(tmp_path)
        assert kinds(report) == {"trap": 3_000}
        assert "  step 0  trap  nans  w  x3,000, steps 0..2999  bad" in shown(report)
        with open_run(tmp_path) as run:
            assert fields_of(run, "step") == list(range(3_000))

    def test_what_several_ranks_note_counts_once(self, tmp_path: Path) -> None:
        writers = [RunWriter(tmp_path, rank=rank, meta=meta()) for rank in (0, 1)]
        for writer in writers:
            writer.event(trap(5, rank=writer.rank))
        assert kinds(newest_report(tmp_path)) == {"trap": 1}
        writers[1].event(trap(6, rank=1))
        lines = shown(newest_report(tmp_path))
        begin = lines.index("events (2): trap 2")
        assert lines[begin + 1 : begin + 3] == [
            "  step 5  trap  nans  w  rank 0, 1  x2, steps 5..6  bad",
            "",
        ]
        for writer in writers:
            writer.close()


class TestHead:
    def test_a_run_that_goes_on(self, tmp_path: Path) -> None:
        writer = RunWriter(tmp_path, meta=meta())
        assert shown(newest_report(tmp_path))[:2] == [
            "no step yet of rules.yaml on Net",
            "fine: running",
        ]
        writer.add(KEY, 10, values(1.0, 1.0))
        writer.commit()
        assert shown(newest_report(tmp_path))[:2] == [
            "step 10 of rules.yaml on Net",
            "fine: running",
        ]
        writer.close()
        assert shown(newest_report(tmp_path))[:2] == [
            "step 10 of rules.yaml on Net",
            "fine: ended, clean",
        ]

    def test_steps_of_rules_that_record_nothing(self, tmp_path: Path) -> None:
        writer = RunWriter(tmp_path, meta=meta())
        writer.statuses({"clip": RuleStatus(2, 84, 42, 41)})
        writer.close()
        report = newest_report(tmp_path)
        assert "step 41 of rules.yaml on Net" in shown(report)[0]
        assert any("no l2 recorded; recorded: nothing yet" in one for one in shown(report))


def test_rules_in_one_line_each(tmp_path: Path) -> None:
    rules = [{"id": f"rule-{number}", "action": "clip-norm"} for number in range(11)]
    writer = RunWriter(tmp_path, meta=meta(plan={"rules": rules}))
    writer.statuses(
        {f"rule-{number}": RuleStatus(2, 20 * number, 5 * number, 7) for number in range(11)}
    )
    writer.close()
    lines = shown(newest_report(tmp_path))
    begin = lines.index("rules (11)")
    assert len(lines[begin:]) == 11
    assert lines[begin + 2].split()[:4] == ["rule-0", "clip-norm", "2", "0"]
    assert lines[begin + 2].endswith("NEVER FIRED")
    assert lines[begin + 3].split() == ["rule-1", "clip-norm", "2", "20", "25%", "7"]
    assert lines[-1] == "  ... and 3 more"


class TestSize:
    @pytest.fixture
    def full(self, tmp_path: Path) -> Report:
        names = [f"model.decoder.layers.{number}.self_attn.q_proj.weight" for number in range(30)]
        writer = write(tmp_path, {name: calm(number) for number, name in enumerate(names)})
        for step in range(8):
            writer.event(trap(step, message="m" * 300))
            writer.event(Event("notice", "", step, 0, "", "n" * 300))
        writer.statuses({f"rule-{number}": RuleStatus(2, 1, 0, 7) for number in range(12)})
        writer.close()
        return newest_report(tmp_path)

    @pytest.mark.parametrize("columns", [1, 40, 300])
    def test_nothing_is_longer_than_there_is(self, full: Report, columns: int) -> None:
        assert max(map(len, screen(full, columns))) <= columns

    def test_names_lose_their_middle_at_dots_and_keep_their_numbers(self, full: Report) -> None:
        lines = screen(full, 80)
        rows = [line for line in lines if "weight  " in line]
        assert len({row.split()[0] for row in rows}) == len(rows) == 10
        for row in rows:
            assert re.fullmatch(r"  ….*\.\d+\..*weight  +[▁▂▃▄▅▆▇█]{8,}  +\d.*  -", row), row


@pytest.mark.parametrize(
    ("most", "short"),
    [
        (47, "model.decoder.layers.12.self_attn.q_proj.weight"),
        (46, "….decoder.layers.12.self_attn.q_proj.weight"),
        (30, "….12.self_attn.q_proj.weight"),
        (18, "….12.….weight"),
        (10, "….12.…ight"),
    ],
)
def test_a_name_is_shortened_between_dots(most: int, short: str) -> None:
    assert shortened("model.decoder.layers.12.self_attn.q_proj.weight", most) == short


def test_no_text_of_a_run_steers_the_terminal(tmp_path: Path) -> None:
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
        writer.add(Key(evil, "l2", point, (evil,)), 0, values(math.nan))
    writer.statuses({evil: RuleStatus(1, 1, 0, 0, (evil,))})
    writer.event(Event("trap", evil, 0, 0, evil, evil))
    writer.close()
    report = newest_report(tmp_path)
    lines = [*shown(report, 200), report.head[-1]]
    assert not {"\x1b", "\x07", "\u202e", "\r", "\n"} & set("".join(lines))
    assert sum("w\\x1b[2J\\x07\\u202e\\r\\nx" in line for line in lines) >= 5


@pytest.mark.parametrize("log", ["wal", "no wal"])
def test_the_writer_is_not_kept_waiting_and_leaves_plain_files(
    tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if log == "no wal":
        refuse_wal(monkeypatch)
    writer = write(tmp_path, {"w": [1.0]})
    writer.commit()
    for step in range(1, 20):
        writer.add(Key("norms", "l2", "accumulated", ("w",)), step, values(1.0))
        writer.commit()
        assert not writer._batch  # nobody held the file
        assert newest_report(tmp_path).steps == (0, step)
    writer.close()
    assert listing(tmp_path) == ["rank-0.db", "run.json"]
