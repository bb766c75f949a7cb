"""The action `mask`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import At, Edit, MaskedUpdate, Shard
from gradsurgeon.actions._fields import Flaw
from gradsurgeon.actions._kinds import EditRule
from gradsurgeon.common.tensor_file import StoredTensor, tensors_of
from gradsurgeon.errors import GradSurgeonError, reason_of

if TYPE_CHECKING:
    from torch import Tensor

_SLICE = re.compile(r"(-?\d{1,12})?:(-?\d{1,12})?")


class Mask(EditRule):
    """Train some elements of a parameter, and keep the others out.

    ## What it does
    `rows` are the rows of dimension 0 that train, as a slice of Python: `"32000:"`, `"-16:"`, `":100"`. `file` is a
    safetensors file with a mask for each parameter, under a name of it and of its shape: 1 trains, 0 does not. The path is relative
    to the rule file, and leads to its folder or below. The gradient of
    all other elements becomes 0, also if it is NaN. Weight decay, and momentum of earlier steps, still move them; with `then: freeze`
    their weights and the state of the optimizer for them stay as they are, bit for bit.

    ## Why use it
    New tokens shall learn in a table of embeddings, and the old ones shall stay; pruned weights shall stay 0 (lottery tickets,
    2:4). To freeze whole tensors use `freeze`.

    ## Points
    Linear, so `backward` and `step` (default) differ only in rounding, and in the input of later rules. `then: freeze` acts at
    `step` only, and not with LBFGS. A shard counts by the elements of the whole parameter.

    ## Cost
    One write per tensor; never waits for the device. `then: freeze` keeps a copy of weight and state during the update. `file`
    keeps the masks in the memory of the host, a byte per element, and the part that each rank needs on its device.
    """

    points: ClassVar = ("step", "backward")
    targets: ClassVar = ("params",)
    linear: ClassVar[bool] = True
    either: ClassVar = ("rows", "file")
    EXAMPLES: ClassVar = (
        Example({"rows": "1:"}, [-3.0, 0.5, 2.0], expect=[0.0, 0.5, 2.0]),
        Example({"rows": ":-1"}, [-3.0, 0.5, float("nan")], expect=[-3.0, 0.5, 0.0]),
        Example(
            {"rows": "-2:2", "then": "freeze", "at": "step"},
            [1.0, 2.0, 4.0],
            expect=[0.0, 2.0, 0.0],
        ),
    )

    action: Literal["mask"] = "mask"
    rows: Annotated[
        str | None,
        Field(description='The rows of dimension 0 that train, as a slice: "32000:".'),
    ] = None
    file: Annotated[
        str | None,
        Field(
            min_length=1,
            description="A safetensors file beside the rule file with a mask by parameter: 1 trains.",
        ),
    ] = None
    then: Annotated[
        Literal["zero", "freeze"],
        Field(description="Whether the other rows only get no gradient, or stay bit for bit."),
    ] = "zero"

    _path: Path | None = None
    _sha256: str = ""
    _stored: Mapping[str, StoredTensor] = {}
    _masks: dict[str, bytes] = PrivateAttr(default_factory=dict)

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        if (self.rows is None) == (self.file is None):
            message = "mask takes either `rows` or `file`, which say what trains"
            yield Flaw("rows", message, 'such as `rows: "32000:"` or `file: masks.safetensors`')
        elif self.rows is not None and _SLICE.fullmatch(self.rows) is None:
            message = f'`rows` must be a slice of Python without a step, found "{self.rows[:60]}"'
            yield Flaw("rows", message, 'write "32000:", "-16:" or "10:20"')
        if self.then == "freeze" and self.at == "backward":
            message = "`then: freeze` holds weights during an update, and `backward` is before it"
            yield Flaw("at", message, "remove it, or use `at: step`")

    @property
    def may_overflow(self) -> bool:
        return False

    def read_file(self, find: Callable[[str], Path]) -> None:
        if self.file is not None:
            path = find(self.file)
            self._stored = tensors_of(path)
            with path.open("rb") as stream:
                self._sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            self._path = path

    @property
    def file_sha256(self) -> str:
        return self._sha256

    def param_problem(self, names: Sequence[str], shape: tuple[int, ...]) -> str:
        if self._path is not None:
            return self._read_mask(names, shape, self._path)
        if self.rows is not None:
            if not shape:
                return "is a single number, which has no rows"
            if not range(shape[0])[_slice(self.rows)]:
                return f'has {shape[0]:,} rows, and `rows: "{self.rows}"` are none of them'
        return ""

    def _read_mask(self, names: Sequence[str], shape: tuple[int, ...], path: Path) -> str:
        """Keep the mask of a parameter, because the file may change before the first update, or return a problem."""
        masks = set()
        for name in names:
            stored = self._stored.get(name)
            if stored is None:
                continue
            if stored.shape != shape:
                return f"has the shape {list(shape)}, and its mask {list(stored.shape)}"
            try:
                mask = stored.mask(path)
            except (OSError, ValueError) as error:
                return f"has a mask in {self.file} that cannot be read any more: {reason_of(error)}"
            if mask is None:
                return f"has a mask in {self.file} whose elements are not all 0 or 1"
            masks.add(mask)
        if not masks:
            return f"has no mask in {self.file}"
        if len(masks) > 1:
            return f"has unlike masks under its names in {self.file}"
        self._masks[names[0]] = masks.pop()
        return ""

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        if self.rows is None and self._path is None:
            raise GradSurgeonError(
                f"`{self.file}` is relative to a rule file: load the rule from one"
            )
        # The part of each mask that this rank needs.
        parts: dict[tuple[str, tuple[int, ...], torch.device], Tensor] = {}

        def trains(grad: Tensor, at: At) -> Tensor:
            shard = at.shard
            shape = tuple(grad.shape) if shard is None else shard.shape
            key = (at.name, shape, grad.device)
            if key not in parts:
                parts[key] = self._mask_of(at.name, shape, shard).to(grad.device)
            if shard is not None and shard.is_sparse:
                return parts[key][shard.places[0]]
            return parts[key]

        def apply(grad: Tensor, at: At) -> Tensor:
            return torch.where(trains(grad, at), grad, grad.new_zeros(()))

        def apply_(grads: Sequence[Tensor], names: Sequence[str], step: int) -> None:
            if self.rows is not None:
                _zero_other_rows_(grads, _slice(self.rows))
                return
            for grad, name in zip(grads, names, strict=True):
                grad.copy_(apply(grad, At(name, None, step, None)))

        if self.then == "freeze":
            return MaskedUpdate(apply, apply_, trains=trains)
        return Edit(apply, apply_)

    def _mask_of(self, name: str, shape: tuple[int, ...], shard: Shard | None) -> Tensor:
        """Return what trains of a parameter, or of the shard of it, bool, in a shape that broadcasts."""
        import torch  # noqa: PLC0415 # as above

        if self.rows is not None:
            mask = torch.zeros(shape[0], *[1] * (len(shape) - 1), dtype=torch.bool, device="cpu")
            mask[_slice(self.rows)] = True
        else:
            mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
            if mask.numel():
                content = bytearray(self._masks[name])
                mask = torch.frombuffer(content, dtype=torch.uint8).view(shape).bool()
        return mask if shard is None else shard.part_of(mask)


def _zero_other_rows_(grads: Sequence[Tensor], rows: slice) -> None:
    import torch  # noqa: PLC0415 # as above

    others = []
    for grad in grads:
        count = len(grad)
        first, last, _ = rows.indices(count)
        if first > 0:
            others.append(grad[:first])
        if last < count:
            others.append(grad[last:])
    if others:
        torch._foreach_zero_(others)  # torch has no public function


def _slice(rows: str) -> slice:
    first, last = rows.split(":")
    return slice(int(first) if first else None, int(last) if last else None)
