"""A name of the package stands for one thing: `tensor` is a tensor, and no two classes share a name."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gradsurgeon"
CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)


def test_no_two_classes_share_a_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        for name in CLASS.findall(file.read_text(encoding="utf-8")):
            places[name].append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
    # Names of torch.
    assert places.keys().isdisjoint({"Tensor", "Parameter", "Module", "Optimizer"})
