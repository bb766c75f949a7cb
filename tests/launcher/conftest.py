"""A folder for a script that nobody edits."""

from __future__ import annotations

from pathlib import Path

import pytest
from outside import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)
