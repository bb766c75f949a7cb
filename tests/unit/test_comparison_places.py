"""Twenty faults in two small networks: `compare` names the place of each, and lets harmless changes pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comparison_trainings as trainings
import pytest
from comparison_nets import Convolutions, Transformer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", [Transformer, Convolutions])
def test_every_fault_is_at_its_place(kind: Any, tmp_path: Path) -> None:
    faults = [fault for fault in trainings.FAULTS if fault.model is kind]
    changes = {fault.name: fault.change for fault in faults}
    found = trainings.compared(tmp_path, kind, 0, changes)
    places = {name: comparison.first[0].text for name, comparison in found.items()}
    assert places == {fault.name: fault.place for fault in faults}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", [Transformer, Convolutions])
def test_harmless_changes_are_quiet(kind: Any, seed: int, tmp_path: Path) -> None:
    found = trainings.compared(tmp_path, kind, seed, trainings.HARMLESS)
    assert [name for name, comparison in found.items() if not comparison.alike] == []
