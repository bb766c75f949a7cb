"""Trainings of all kinds do under the default pack what they do without: exit code, output, and weights of each rank.

They are the functions of `tests/scripts/gallery`. Each runs plain, and as `gradsurgeon run` runs it, in forks. The output
has a checksum of the weights, and a word if gradsurgeon has waited in the script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import forks
import pytest
from bounds import TIMEOUT
from commands import environment
from launching import SCRIPTS
from ranks import Job

import gradsurgeon

pytestmark = pytest.mark.slow

GALLERY = SCRIPTS / "gallery"
PACKAGE = str(Path(gradsurgeon.__file__).parent)
LAUNCHER = ("-m", "gradsurgeon", "run")
# A warning of Python begins with the file that it is about.
WARNING = re.compile(rf"^{re.escape(PACKAGE)}\S*:\d+: \w*Warning: ", re.MULTILINE)
FINDINGS = re.compile(r"^  checked: .*; found: (.*)$", re.MULTILINE)
BANDS = re.compile(r"^  (fine|look|broken): ", re.MULTILINE)


class Training(NamedTuple):
    """A function of the gallery, and the number of ranks that it runs on; 0 for a process without ranks."""

    module: str
    function: str
    ranks: int
    healthy: bool

    def __str__(self) -> str:
        return f"{self.function}-{self.ranks}" if self.ranks else self.function


def trainings() -> Iterator[Training]:
    """Yield the trainings by their marks, without running the files: these import half of torch.

    Of those that run on one rank and on several, one of each file runs on one rank.
    """
    for file in sorted(GALLERY.glob("*.py")):
        alone = 0
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            marks: list[Any] = getattr(node, "decorator_list", [])
            for mark in marks:
                assert isinstance(node, ast.FunctionDef)
                assert mark.func.id == "training"
                options = {one.arg: ast.literal_eval(one.value) for one in mark.keywords}
                for ranks in map(ast.literal_eval, mark.args or [ast.Constant(0)]):
                    alone += ranks == 1
                    if ranks != 1 or alone == 1:
                        yield Training(file.stem, node.name, ranks, options.get("healthy", True))


TRAININGS = list(trainings())
# The script replaces parameters after the rules were put on them.
LOSES_HOOKS = {"parallel_layers_under_ddp_of_one_rank"}


class Outcome(NamedTuple):
    """How a rank has ended, and what it wrote."""

    code: int
    out: str
    err: str


def start(training: Training, *launchers: Sequence[str]) -> Job | forks.Fork:
    """Start a training; ``launchers`` are the words before the script on each rank."""
    env = {**environment(), "OMP_NUM_THREADS": "1"}
    script = ["train.py", training.module, training.function]
    if not training.ranks:
        return forks.start([*launchers[0], *script], cwd=GALLERY, env=env)
    commands = [[*launcher, *script, str(training.ranks)] for launcher in launchers]
    return Job(commands, cwd=GALLERY, env=env)


def ended(started: Job | forks.Fork) -> list[Outcome]:
    found = started.wait() if isinstance(started, Job) else [started.wait(TIMEOUT)]
    return [Outcome(one.returncode, one.stdout.decode(), one.stderr.decode()) for one in found]


def compared(training: Training, *launchers: Sequence[str]) -> list[Outcome]:
    """Run a training plain and under launchers; return how it has ended under these, which must be the same."""
    both = start(training, *([()] * len(launchers))), start(training, *launchers)
    plain, launched = map(ended, both)
    for rank, (before, after) in enumerate(zip(plain, launched, strict=True)):
        assert before.code == 0, before.err
        assert "weights" in before.out
        assert after.code == 0, f"rank {rank}\n{after.err}"
        assert after.out == before.out, f"rank {rank}\n{after.err}"
        assert "Traceback" not in after.err, after.err
        assert WARNING.search(after.err) is None, after.err
    return launched


def test_the_gallery_is_large() -> None:
    assert len(TRAININGS) >= 80
    assert len({(one.function, one.ranks) for one in TRAININGS}) == len(TRAININGS)


@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_a_training_under_the_default_pack_is_as_it_is_without(training: Training) -> None:
    launched = compared(training, *([LAUNCHER] * max(1, training.ranks)))
    assert "gradsurgeon: " in launched[0].err
    if training.healthy:
        for after in launched:
            assert set(FINDINGS.findall(after.err)) <= {"nothing", "no fault"}, after.err
            state = "look" if training.function in LOSES_HOOKS else "fine"
            assert set(BANDS.findall(after.err)) <= {state}, after.err


@pytest.mark.parametrize("function", ["ddp", "fully_sharded", "parallel_sequences"])
def test_a_rank_with_rules_waits_for_none_without(function: str) -> None:
    (training,) = [one for one in TRAININGS if (one.function, one.ranks) == (function, 2)]
    launched = compared(training, LAUNCHER, ())
    assert set(FINDINGS.findall(launched[0].err)) == {"nothing"}, launched[0].err
