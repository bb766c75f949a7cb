"""`gradsurgeon run --sink`: the numbers of a script that nobody edits go to a tracker while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import Folder, Launched

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from torch import nn

def train(width):
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
    return model

torch.manual_seed(0)
first, second = train(3), train(6)
print("done")
"""


def run(folder: Path, sink: str, ranks: int = 0) -> Launched:
    return Folder(folder).run(SCRIPT, "--sink", sink, record=False, ranks=ranks)


def totals(folder: Path) -> dict[str, int]:
    """Return how many points each curve of a whole norm has."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        name: len(found.Scalars(name)) for name in found.Tags()["scalars"] if name.endswith("total")
    }


def test_each_model_has_curves_of_its_own(tmp_path: Path) -> None:
    done = run(tmp_path, "tensorboard:curves")
    assert (done.code, done.out) == (0, "done\n")
    assert totals(tmp_path / "curves") == {
        "gradsurgeon/norms/total": 20,
        "gradsurgeon/model-2/norms/total": 20,
    }


def test_of_two_ranks_the_first_one_sends(tmp_path: Path) -> None:
    done = run(tmp_path, "tensorboard:curves", ranks=2)
    assert (done.code, done.out) == (0, "done\ndone\n")
    assert len(list((tmp_path / "curves").iterdir())) == 1
