"""Reading the captured tensors of a run directory: numbers and small maps. Needs no torch."""

from base64 import b64decode
from math import prod
from typing import Self

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, TypeAdapter, model_validator

from gradsurgeon.errors import printable
from gradsurgeon.store.layout import captures_name
from gradsurgeon.store.run import Run

_LONGEST = 64 * 2**20


class Maps(BaseModel):
    """Maps of shape (count, height, width), a byte per pixel: 0 is `low`, 254 is `high`, 255 is non-finite."""

    shape: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
    low: FiniteFloat
    high: FiniteFloat
    codes: str  # in base64

    @model_validator(mode="after")
    def _has_all(self) -> Self:
        if len(b64decode(self.codes, validate=True)) != prod(self.shape):
            raise ValueError("the numbers of codes and pixels differ")
        return self


class CapturedTensor(BaseModel):
    """The newest copy of one tensor: statistics of its finite elements, and maps if it has the shape of maps."""

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


class CapturedByRule(BaseModel):
    """The first tensors that a rule has kept, and the number of further tensors."""

    rule: str
    more: NonNegativeInt
    tensors: list[CapturedTensor]


_FILE = TypeAdapter(list[CapturedByRule])


def captures(run: Run) -> tuple[list[CapturedByRule], str]:
    """Return the captured tensors of the lowest rank that has some, and why they cannot be read."""
    paths = [run.path / captures_name(rank) for rank in run.ranks]
    for path in [path for path in paths if path.exists()]:
        try:
            with path.open("rb") as file:
                return _FILE.validate_json(file.read(_LONGEST)), ""
        except (OSError, ValueError):
            text = "is damaged, or cannot be read: no pictures of captured tensors"
            return [], f"{printable(str(path))}: {text}"
    return [], ""
