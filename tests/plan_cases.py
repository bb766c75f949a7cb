"""Plans as data: a file under ``cases/plans`` holds a model, rules, and the plan of them or what it is refused for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import models
import report_cases
import torch
from ranks import Json
from several_losses import Heads
from torch import nn

import gradsurgeon
from gradsurgeon.language.planning import Manifest, ModuleEntry, Param, Plan, from_model

FILES = sorted(Path(__file__).parent.joinpath("cases", "plans").glob("*.yaml"))


def deep(layers: int) -> nn.Module:
    return nn.ModuleDict({"h": nn.ModuleList([_block() for _ in range(layers)])})


def _block() -> nn.Module:
    parts = {"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2, bias=False), "norm": nn.LayerNorm(2)}
    return nn.ModuleDict(parts)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
        self.head = nn.Linear(3, 1)
        self.again = self.head


def wrapped() -> nn.Module:
    return nn.DataParallel(torch.compile(Generator(), backend="eager"))  # type: ignore[type-var]


def tied_heads() -> nn.Module:
    model = Heads()
    model.seg.weight = model.trunk[2].weight
    return model


def sparse() -> nn.Module:
    return Heads(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 8)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "twelve blocks": partial(deep, 12),
    "two blocks": partial(deep, 2),
    "linear": partial(nn.Linear, 3, 2),
    "lazy": partial(nn.LazyLinear, 3),
    "tied": models.Tied,
    "frozen": models.CASES["frozen"].make,
    "generator": Generator,
    "wrapped generator": wrapped,
    "heads": Heads,
    "tied heads": tied_heads,
    "sparse heads": sparse,
}


def named(case: Json) -> Manifest:
    """Return a model of a class with parameters of these names, and the modules around them."""
    modules: dict[str, None] = {}
    params = []
    for name in report_cases.histories(dict.fromkeys(case["params"], "")):
        params.append(
            Param(name, (), (2,), "float32", case.get("trains", True), ("Linear", "Module"))
        )
        parts = name.split(".")
        modules.update(dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts))))
    entries = [ModuleEntry(name, (), ("Linear", "Module")) for name in modules]
    kind = case.get("class", "Net")
    return Manifest(kind, tuple(params), tuple(entries), (kind, "Module"))


def model_of(case: Json) -> Any:
    if "params" in case:
        return named(case)
    model = MODELS[case["model"]]()
    if "sharding" not in case:
        return model
    found = from_model(model)
    params = [replace(param, sharding=case["sharding"]) for param in found.params]
    return replace(found, params=tuple(params))


def plan(case: Json) -> Plan:
    given: Json = {key: case[key] for key in ("include", "rules") if key in case}
    return gradsurgeon.plan(model_of(case), {"version": 1, **given})
