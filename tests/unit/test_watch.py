"""What `gradsurgeon watch` draws, from run directories as the writer leaves them."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import add, listing, refuse_wal, values, write
from small import fields_of

from gradsurgeon import Event
from gradsurgeon.cli.watch import newest_report, screen
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.run import open_run
from gradsurgeon.report.tables import shortened


def test_more_events_than_are_read_at_a_time(tmp_path: Path) -> None:
    writer = write(tmp_path, {"w": [1.0]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "commit", lambda: None)  # all of them in one transaction
        for step in range(3_000):
            writer.event(Event("trap", "nans", step, 0, "w", "bad\nvery"))
    writer.close()
    lines = screen(newest_report(tmp_path), 100)
    begin = lines.index("events (3,000): trap 3,000")
    assert lines[begin + 1] == "  step 0  trap  nans  w  x3,000, steps 0..2999  bad"
    with open_run(tmp_path) as run:
        assert fields_of(run, "step") == list(range(3_000))


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


@pytest.mark.parametrize("log", ["wal", "no wal"])
def test_the_writer_is_not_kept_waiting_and_leaves_plain_files(
    tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if log == "no wal":
        refuse_wal(monkeypatch)
    writer = write(tmp_path, {"w": [1.0]})
    writer.commit()
    for step in range(1, 20):
        add(writer, Key("norms", "l2", "accumulated", ("w",)), step, values(1.0))
        writer.commit()
        assert not writer._batch  # nobody held the file
        assert newest_report(tmp_path).steps == (0, step)
    writer.close()
    assert listing(tmp_path) == ["rank-0.db", "run.json"]
