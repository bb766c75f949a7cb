"""An older PyTorch is refused by name, when the runtime is imported."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.runtime import _oldest_torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("found", ["2.7.1+cpu", "2.0.1", "1.13.1", "2.7.0a0+git1234"])
def test_an_older_torch_is_refused(found: str) -> None:
    with pytest.raises(GradSurgeonError) as caught:
        _oldest_torch.check(found)
    assert str(caught.value).startswith(
        f"applying rules needs PyTorch 2.8 or newer, this is {found}:"
    )
    assert "pip install 'torch>=2.8'" in str(caught.value)


@pytest.mark.parametrize("found", ["2.8.0", "2.8.0+cu128", "2.13.0+cpu", "2.15.0a0", "3.0.0"])
def test_a_torch_that_will_do_is_taken(found: str) -> None:
    _oldest_torch.check(found)


def test_what_is_installed_refused_and_promised_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = _oldest_torch.OLDEST
    extras = project["optional-dependencies"]
    assert f"torch>={oldest}" in extras["torch"]
    assert f"torch>={oldest}" in extras["bench"]
    assert re.search(rf"PyTorch \({oldest} or\s+newer\)", (ROOT / "README.md").read_text("utf-8"))
