"""`gradsurgeon run --on-event COMMAND`: what the command gets, and that the script ends as without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from outside import Folder, Launched
from ranks import Json

from gradsurgeon.common.events import Event
from gradsurgeon.integrations.launcher import event_command
from gradsurgeon.integrations.launcher.event_command import MOST_WAITING, EventCommand
from gradsurgeon.integrations.launcher.settings import Settings

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.ones(5, 4)).square().mean() * (float("nan") if step in (2, 4) else 1.0)
    loss.backward()
    optimizer.step()
print("done")
"""
SKIP = "  - {id: trap, action: nan-trap, params: '*', then: skip-step}\n"
RAISE = SKIP.replace("skip-step", "raise")
KEEP = (
    "cat >> events; env | grep GRADSURGEON_ | grep -v TEST_SHARE >> rules; pwd >> places; echo kept"
)
KEYS = ["kind", "rule", "step", "rank", "name", "message", "diagnosis"]
EVENT = Event("trap", "trap", 7, 0, "a.weight", "step 7\nnot finite: \udc80")


def events(folder: Path) -> list[Json]:
    text = (folder / "events").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def launch(folder: Folder, rules: str = SKIP, command: str = KEEP, **more: Any) -> Launched:
    # The script is elsewhere by the time of its first event.
    script = SCRIPT.replace("import torch\n", "import os, torch\nos.chdir('/')\n", 1)
    return folder.run(script, "--on-event", command, rules=rules, **more)


@pytest.mark.slow
def test_each_trap_and_the_end_start_the_command(folder: Folder) -> None:
    done = launch(folder)
    assert (done.code, done.out) == (0, "done\n")
    first, second, end = events(folder.path)
    assert [list(first)[: len(KEYS)], list(second)[: len(KEYS)]] == [KEYS, KEYS]
    assert [event["step"] for event in (first, second)] == [2, 4]
    assert (first["kind"], first["rule"], first["rank"]) == ("trap", "trap", 0)
    assert first["message"].startswith("step 2, rule trap: 2 of 2 gradients")
    assert [*list(end)[: len(KEYS)], list(end)[-1]] == [*KEYS, "ended"]
    assert (end["kind"], end["step"], end["diagnosis"]) == ("end", 6, None)
    assert end["ended"] == {"state": "ended", "words": "ended"}
    # It starts where the launcher was started, is no part of the training, and does not write between the script's lines.
    assert (folder.path / "places").read_text().split() == [str(folder.path)] * 3
    assert not (folder.path / "rules").read_text()
    assert done.lines.count("kept") == 3


@pytest.mark.slow
def test_a_trap_that_ends_the_script_is_in_the_end(folder: Folder) -> None:
    done = launch(folder, RAISE)
    assert done.code == 1
    trap, end = events(folder.path)
    assert (trap["kind"], end["kind"], end["rule"]) == ("trap", "end", "trap")
    words = "stopped at step 2 by rule trap (NonFiniteGradientError)"
    cause = {"error": "NonFiniteGradientError", "step": 2, "rule": "trap"}
    assert end["ended"] == {"state": "stopped", "words": words, **cause}


@pytest.mark.slow
def test_each_rank_tells_its_own_events_and_the_first_the_end(folder: Folder) -> None:
    script = SCRIPT.replace("model = ", "torch.distributed.init_process_group('gloo')\nmodel = ")
    folder.run(script, "--on-event", "cat >> events", rules=SKIP, ranks=2)
    told = sorted((event["rank"], event["kind"], event["step"]) for event in events(folder.path))
    of_each = [("trap", 2), ("trap", 4)]
    assert told == sorted(
        [(0, "end", 6), *[(rank, *event) for rank in (0, 1) for event in of_each]]
    )


def test_thousands_of_events_start_one_command_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems: list[str] = []
    alone = "mkdir one || echo two >> overlaps; cat >> events; rmdir one"
    wait = "until [ -e begin ]; do sleep 0.05; done"
    settings = Settings("", on_event=f"{wait}; {alone}")
    command = EventCommand(settings, problems.append)
    for _ in range(2000):
        command.event(EVENT)
    (tmp_path / "begin").touch()
    command.finish()
    assert not (tmp_path / "overlaps").exists()
    told = events(tmp_path)
    # One may have been under way while the others came.
    assert len(told) in (MOST_WAITING, MOST_WAITING + 1)
    assert told[0]["message"] == EVENT.message
    (problem,) = problems
    assert f"{MOST_WAITING} events wait for it already, and later events do not start it" in problem
    # What the last checks of a session find starts no thread, and is told all the same.
    command.event(EVENT)
    command.end(7, 1, None)
    assert len(events(tmp_path)) == len(told)
    command.end(7, 1, KeyboardInterrupt())
    assert [event["kind"] for event in events(tmp_path)[len(told) :]] == ["trap", "end"]


@pytest.mark.parametrize(
    ("command", "folder", "problem"),
    [
        ("sleep 100", ".", "it was ended after 0.4 seconds; the next event starts it again"),
        ("cat", "gone", "it cannot be started: No such file or directory"),
        ("gradsurgeon-no-such-command 2> /dev/null", ".", "it ended with status 127"),
        ("exec 0<&-", ".", ""),  # it need not read its input
    ],
)
def test_what_can_go_wrong_is_told_once(
    command: str, folder: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "sleep 100":
        monkeypatch.setattr(event_command, "LIMIT", 0.4)
    problems: list[str] = []
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    told = EventCommand(Settings("", on_event=command), problems.append)
    if folder == "gone":
        (tmp_path / folder).rmdir()
    told.event(EVENT)
    told.finish()
    told.end(8, 0, None)
    expected = f"the command of --on-event: {problem}; training does not depend on it"
    assert problems == [expected] * bool(problem)


def test_notices_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = EventCommand(Settings("", on_event="cat >> events"), print)
    command.event(Event("notice", "", 0, 0, "", "a hook came back"))
    command.finish()
    assert not (tmp_path / "events").exists()
