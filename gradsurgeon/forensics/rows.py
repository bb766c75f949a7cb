"""Which rows of a blamed tensor are non-finite, and which rows of the model's input these come from: that is tried out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.rows import Rows
from gradsurgeon.forensics.kept_step import KeptCall
from gradsurgeon.forensics.replay import input_name
from gradsurgeon.forensics.sources import NonfiniteSource
from gradsurgeon.tensors.structure import Copied, tensors_in

# The dimensions of an input that can be the one of the batch.
_DIMS = (0, 1)
# Tensors that do not come from the batch.
_NOT_OF_BATCH = ("weight", "buffer", "literal")
# The forward pass of the script runs once more for each guess.
_MOST_REPLAYS = 3
# Runs a call again; returns the source to blame.
Blame = Callable[[KeptCall], NonfiniteSource | None]


class _Guess(NamedTuple):
    """Rows of an input that may have led to the rows of a blamed tensor."""

    input: str
    dim: int
    size: int
    rows: tuple[int, ...]


def with_rows(diagnosis: Diagnosis, call: KeptCall, blame: Blame | None) -> Diagnosis:
    """Return a diagnosis with its rows, if the first dimension of the blamed tensor is the one of the batch.

    Without ``blame`` the fault is outside of the call, and nothing is run again.
    """
    output = diagnosis.output
    is_made_of_nothing = blame is not None and diagnosis.operation and not diagnosis.inputs
    if output is None or output.rows is None or is_made_of_nothing:
        return diagnosis
    if diagnosis.where in _NOT_OF_BATCH:
        return diagnosis
    try:
        return replace(diagnosis, rows=_rows_of_batch(output.rows, diagnosis, call, blame))
    except Exception:  # noqa: BLE001 # tensors of any kind may raise anything; the rest of the diagnosis stays
        return diagnosis


def _rows_of_batch(
    rows: Rows, diagnosis: Diagnosis, call: KeptCall, blame: Blame | None
) -> Rows | None:
    is_input = diagnosis.where == "input"
    if is_input or blame is None or rows.count == rows.size:
        if is_input or rows.size == _size_of_batch(call):
            return _with_ids(rows, rows.rows, rows.size, call)
        return None
    for guess in islice(_guesses(rows, call), _MOST_REPLAYS):
        if _is_finite_without(guess, diagnosis, call, blame):
            found = replace(
                rows, input=guess.input, input_dim=guess.dim, input_rows=guess.rows, is_tried=True
            )
            return _with_ids(found, guess.rows, guess.size, call)
    return None


def _guesses(rows: Rows, call: KeptCall) -> Iterator[_Guess]:
    """Yield the rows of the first input that rows of a tensor may come from, the likeliest first.

    The first dimension of the tensor may be made of several, such as samples and heads, or time and samples.
    """
    module = call.module()
    inputs = list(tensors_in([call.args, call.kwargs]))
    if module is None or not inputs:
        return
    path, tensor = inputs[0]
    name = input_name(module, path)
    for dim in _DIMS[: tensor.dim()]:
        size = tensor.size(dim)
        if not size or rows.size % size:
            continue
        inner = rows.size // size
        outer_rows = [row // inner for row in rows.rows]
        inner_rows = [row % size for row in rows.rows]
        for guessed in dict.fromkeys((_distinct(outer_rows), _distinct(inner_rows))):
            if len(guessed) < size:
                yield _Guess(name, dim, size, guessed)


def _size_of_batch(call: KeptCall) -> int:
    """Return the size of the first dimension of the first input, 0 if that is no batch."""
    for _, tensor in tensors_in([call.args, call.kwargs]):
        is_one_sample = tensor.dim() == 0 or (tensor.dim() == 1 and tensor.is_floating_point())
        return 0 if is_one_sample else tensor.size(0)
    return 0


def _distinct(rows: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(rows)))


def _is_finite_without(guess: _Guess, diagnosis: Diagnosis, call: KeptCall, blame: Blame) -> bool:
    """Run a call again with other rows of its inputs; tell whether the blamed operation is then finite."""
    finite_row = min(set(range(guess.size)).difference(guess.rows))

    def exchanged(tensor: Tensor) -> Tensor:
        if tensor.dim() <= guess.dim or tensor.size(guess.dim) != guess.size:
            return tensor
        changed = tensor.detach().clone()
        for row in guess.rows:
            changed.select(guess.dim, row).copy_(tensor.detach().select(guess.dim, finite_row))
        return changed.requires_grad_(tensor.requires_grad)

    args, kwargs = Copied((call.args, call.kwargs), exchanged).value
    source = blame(replace(call, args=args, kwargs=kwargs))
    if source is None:
        return True
    again = source.diagnosis
    return (again.operation, again.lines) != (diagnosis.operation, diagnosis.lines)


def _with_ids(rows: Rows, samples: Sequence[int], size: int, call: KeptCall) -> Rows:
    """Return rows with the numbers that the script gave to some of so many samples."""
    ids = call.sample_ids
    if ids is None or len(ids) != size:
        return rows
    numbers = ids.tolist()
    return replace(rows, ids=tuple([int(numbers[sample]) for sample in samples]))
