"""What a run directory holds of captured tensors, read: numbers and small maps. Needs no torch."""

from __future__ import annotations

from base64 import b64decode
from math import prod
from typing import Self

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, TypeAdapter, model_validator

from gradsurgeon.errors import printable
from gradsurgeon.store.layout import captures_name
from gradsurgeon.store.run import Run

_LONGEST = 64 * 2**20


class Maps(BaseModel):
    """Maps of (count, height, width), a byte per pixel: from 0 for `low` to 254 for `high`, 255 if not finite."""

    shape: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
    low: FiniteFloat
    high: FiniteFloat
    codes: str  # in base64
    step: int | None = None

    @model_validator(mode="after")
    def _has_all(self) -> Self:
        if len(b64decode(self.codes, validate=True)) != prod(self.shape):
            raise ValueError("the codes are not as many as the pixels")
        return self


class CapturedTensor(BaseModel):
    """Of the newest copy of one tensor: the numbers of its finite elements, and maps if it has such a shape."""

    name: str
    step: int
    call: int
    dtype: str
    shape: list[NonNegativeInt] | None = None
    elements: NonNegativeInt = 0
    nonfinite: NonNegativeInt = 0
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None
    mean: FiniteFloat | None = None
    counts: list[NonNegativeInt] = Field(default_factory=list)
    note: str = ""
    maps: Maps | None = None
    cam: Maps | None = None


class CapturedByRule(BaseModel):
    """What a rule has kept: its first tensors, and how many more there are."""

    rule: str
    more: NonNegativeInt
    tensors: list[CapturedTensor]


_FILE = TypeAdapter(list[CapturedByRule])


def captures(run: Run) -> tuple[list[CapturedByRule], str]:
    """Return what a run holds of captured tensors, of the lowest rank that has some: of most runs nothing.

    The second is why they cannot be read, empty where they can: the rest of the run is as good without them.
    """
    for rank in run.ranks:
        path = run.path / captures_name(rank)
        try:
            if not path.exists():
                continue
            with path.open("rb") as file:
                return _FILE.validate_json(file.read(_LONGEST)), ""
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None)
            problem = f"cannot be read: {reason}" if reason else "is damaged"
            return [], f"{printable(str(path))}: {problem}: no pictures of captured tensors"
    return [], ""
