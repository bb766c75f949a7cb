"""`gradsurgeon compare`: its exit codes, its forms and its messages."""

from __future__ import annotations

from pathlib import Path

import comparison_trainings as parting
import pytest
from commands import WITHOUT_TORCH, call, call_here, refused
from comparison_nets import Transformer

pytestmark = pytest.mark.slow

NOISE = ("--noise", "noise1", "noise2", "--noise", "noise3")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a reference, noise runs, a run that is alike and one with a fault."""
    folder = tmp_path_factory.mktemp("compared")
    parting.train(folder / "reference", Transformer, 0)
    for seed in (1, 2, 3):
        parting.train(folder / f"noise{seed}", Transformer, 0, noise=seed)
    parting.train(folder / "fused", Transformer, 0, parting.HARMLESS["fused attention"])
    parting.train(folder / "scaled", Transformer, 0, parting.FAULTS[0].change)
    return folder


@pytest.mark.slow
def test_exit_codes(here: Path) -> None:
    for run, code, begins in (
        ("fused", 0, "They agree within rounding in "),
        ("scaled", 1, "They part at step 0, forward: input of h.1.attn.o.\n"),
    ):
        done = call_here("compare", run, "reference", *NOISE, cwd=here)
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout.startswith(begins)
    for words in (("none", "reference"), ("fused",), ("fused", "reference", "--map", "none.yaml")):
        done = call_here("compare", *words, cwd=here)
        refused(done)
        assert done.stderr


@pytest.mark.slow
@pytest.mark.cover_children
def test_it_needs_no_torch(here: Path) -> None:
    done = call("compare", "scaled", "reference", *NOISE, cwd=here, code=WITHOUT_TORCH)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("They part at step 0, forward: input of h.1.attn.o.\n")
