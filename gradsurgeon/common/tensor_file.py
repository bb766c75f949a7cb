"""Files of tensors (`*.safetensors`), read without torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import calcsize
from typing import Annotated, BinaryIO, ClassVar, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError
from pydantic_core import from_json

_LEAD = 8  # bytes that hold the length of the header
_MAX_HEADER = 100_000_000  # bytes, as in the library itself
# Maps each dtype of several bytes to the letter of its elements as whole numbers, and the number with the bits of 1.
_ONES: Mapping[str, tuple[Literal["B", "H", "I", "Q"], int]] = {
    "I16": ("H", 1),
    "U16": ("H", 1),
    "I32": ("I", 1),
    "U32": ("I", 1),
    "I64": ("Q", 1),
    "U64": ("Q", 1),
    "F16": ("H", 0x3C00),
    "BF16": ("H", 0x3F80),
    "F32": ("I", 0x3F800000),
    "F64": ("Q", 0x3FF0000000000000),
}


# On longer names a regular expression could take long.
_Name = Annotated[str, Field(min_length=1, max_length=300)]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the header of a file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    dtype: Annotated[str, Field(max_length=40)]
    shape: Annotated[tuple[NonNegativeInt, ...], Field(max_length=64)]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)

    def mask(self, path: Path) -> bytes | None:
        """Return a byte per element, 0 where the element is 0, or ``None`` if the elements are not all 0 or 1."""
        letter, bits_of_one = _ONES.get(self.dtype, ("B", 1))
        size = calcsize(letter)
        content = self._content(path)
        if len(content) != prod(self.shape) * size:
            return None
        if not {0, bits_of_one}.issuperset(memoryview(content).cast(letter)):
            return None
        # The last byte of the float 1 is not 0, nor is the first byte of a whole 1.
        place = 0 if bits_of_one == 1 else size - 1
        return content[place::size]

    def _content(self, path: Path) -> bytes:
        first, last = self.data_offsets
        with path.open("rb") as stream:
            stream.seek(header_length(stream) + first, os.SEEK_CUR)
            return stream.read(last - first)


def header_length(stream: BinaryIO) -> int:
    """Return the number of bytes that come next, or raise `ValueError`."""
    lead = stream.read(_LEAD)
    length = int.from_bytes(lead, "little")
    size = os.fstat(stream.fileno()).st_size - _LEAD
    if len(lead) < _LEAD or length > min(size, _MAX_HEADER):
        raise ValueError(
            "no safetensors file, or one that is cut off: save it again, or download it, as by `git lfs pull`"
        )
    return length


def tensors_of(path: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a file by name, or raise `ValueError`."""
    with path.open("rb") as stream:
        header = from_json(stream.read(header_length(stream)), allow_inf_nan=False)
        size = os.fstat(stream.fileno()).st_size - stream.tell()
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    try:
        tensors = TypeAdapter(dict[_Name, StoredTensor]).validate_python(header)
    except ValidationError:
        raise ValueError("no safetensors file: its header lists no tensors") from None
    for name, tensor in tensors.items():
        first, last = tensor.data_offsets
        if not first <= last <= size:
            raise ValueError(f"the elements of {name} are not in the file")
    return tensors
