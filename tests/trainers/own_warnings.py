"""What trainers warn of by themselves in trainings as small as those here: no matter of the tests."""

from __future__ import annotations

import pytest

OWN_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in (
        "isinstance.treespec, LeafSpec.*:FutureWarning",
        "does not have many workers",
        "exists and is not empty",
        "your dataloader is not resumable",
    )
]
