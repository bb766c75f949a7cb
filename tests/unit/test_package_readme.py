"""The map of the package, `gradsurgeon/README.md`: its names exist, its layers and walks are those of the code."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from small import kinds_of, sgd, take_step
from torch import Tensor, nn

import gradsurgeon

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gradsurgeon"
MAP = (PACKAGE / "README.md").read_text(encoding="utf-8")
PICTURE = MAP.split("```")[1]
WALKS = {
    "apply": 'A rule: `apply(model, "rules.yaml")`',
    "backward": "A gradient: `loss.backward()`",
    "step": "A gradient: `optimizer.step()`",
    "failed step": "A failed step: trap, diagnosis, bundle",
}
# A pattern that no other test has: a known one is not read again.
RULES = """
version: 1
rules:
  - {id: trap, action: nan-trap, params: ["fc.*", "he[a]d.{bias,weight}"], then: skip-step}
  - {id: clip, action: clip-norm, params: "*", per: rule, max_norm: 1.0}
  - {id: norms, action: norm-log, params: "*"}
"""


def named(text: str = MAP) -> list[str]:
    """Return what a text names in code style, without blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def drawn() -> list[str]:
    """Return the rooms of the picture, in its order."""
    return re.findall(r"^(?:──|  ) (\S+) ", PICTURE, re.MULTILINE)


def listed(heading: str) -> list[str]:
    """Return the rooms of a walk: the first name of each item."""
    section = MAP.partition(f"### {heading}\n")[2]
    return re.findall(
        r"^\d+\. `([^`]+)`:", re.split(r"^#", section, flags=re.MULTILINE)[0], re.MULTILINE
    )


def test_every_file_and_folder_it_names_exists() -> None:
    paths = [name for name in named() if re.fullmatch(r"[\w./-]+(\.\w+|/)", name)]
    paths = [path for path in paths if not re.search(r"NAME|^re:|^rules\.yaml$", path)]
    assert len(paths) > 100
    lost = [path for path in paths if not ((PACKAGE / path).exists() or (ROOT / path).exists())]
    assert lost == []


def test_every_name_in_the_code_exists() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    words = {*re.findall(r"\w+", code)}
    lost = [name for name in named() if name.isidentifier() and name not in words]
    assert lost == []


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", MAP):
        assert (PACKAGE / target).exists(), target


def test_every_folder_is_drawn() -> None:
    folders = {file.parent.relative_to(PACKAGE) for file in PACKAGE.rglob("*") if is_source(file)}
    names = {f"{folder.as_posix()}/" for folder in folders - {Path()}}
    assert names == {name for name in drawn() if name.endswith("/")}


def is_source(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts


def test_layers_are_drawn_in_their_order() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    layers = [set(re.split(r" [|:] ", layer)) for layer in contract["layers"]]
    shown = re.split(r"^──", PICTURE, flags=re.MULTILINE)[1:]
    # A folder inside a room belongs to the layer of the room.
    rooms = [re.findall(r"^ +(\w+)(?:\.py|/) ", layer, re.MULTILINE) for layer in shown]
    assert [set(names) for names in rooms] == layers


class Net(nn.Module):
    """A model whose square root is NaN if its offset is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.offset = 10.0

    def forward(self, x: Tensor) -> Any:
        return self.head((self.fc(x).tanh() + self.offset).sqrt())


class Entered:
    """The files of the package in the order in which a call first enters them; importing one is no entry."""

    def __init__(self) -> None:
        self.rooms: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{PACKAGE}/"):
            room = Path(file).relative_to(PACKAGE).as_posix()
            if room not in self.rooms and not is_import(frame):
                self.rooms[room] = None

    def during(self, call: Callable[[], Any]) -> Any:
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            return call()
        finally:
            sys.setprofile(before)


def is_import(frame: FrameType | None) -> bool:
    """Tell whether a module of the package is being imported by what runs."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(f"{PACKAGE}/"):
            return True
        frame = frame.f_back
    return False


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Train a few steps, the last one with NaN; return the rooms of each walk."""
    folder = tmp_path_factory.mktemp("walks")
    rules = folder / "rules.yaml"
    rules.write_text(RULES, encoding="utf-8")
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 4)
    optimizer = sgd(model, 0.01)
    seen = {walk: Entered() for walk in WALKS}

    def apply() -> gradsurgeon.Session:
        return gradsurgeon.apply(model, rules, optimizer=optimizer, record=folder / "run")

    with seen["apply"].during(apply) as session:
        for _ in range(3):
            take_step(optimizer, model(x).sum())
        optimizer.zero_grad()
        seen["backward"].during(model(x).sum().backward)
        seen["step"].during(optimizer.step)
        optimizer.zero_grad()
        model.offset = -10.0
        model(x).sum().backward()
        seen["failed step"].during(optimizer.step)
    assert "trap" in kinds_of(session)
    assert (folder / "run" / "trap-step4-rank0").is_dir()
    return {walk: [*entered.rooms] for walk, entered in seen.items()}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_enters_its_rooms_in_their_order(walk: str, walks: dict[str, list[str]]) -> None:
    rooms = listed(WALKS[walk])
    assert len(rooms) > 10
    entered = walks[walk]
    assert [room for room in rooms if room not in entered] == []
    assert rooms == sorted(rooms, key=entered.index)
