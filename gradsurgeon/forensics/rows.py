"""Which rows of a blamed tensor are non-finite, and which rows of the model's input these come from: that is tried out."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.rows import Rows
from gradsurgeon.forensics.kept_step import KeptCall
from gradsurgeon.forensics.replay import input_name
from gradsurgeon.forensics.sources import NonfiniteSource
from gradsurgeon.tensors.structure import Copied, tensors_in

# Tensors that do not come from the batch.
_NOT_OF_BATCH = ("weight", "buffer", "literal")
# Runs a call again; returns the source to blame.
Blame = Callable[[KeptCall], NonfiniteSource | None]


def with_rows(diagnosis: Diagnosis, call: KeptCall, blame: Blame | None) -> Diagnosis:
    """Return a diagnosis with its rows, if the first dimension of the blamed tensor is the one of the batch.

    Without ``blame`` the fault is outside of the call, and nothing is run again.
    """
    output = diagnosis.output
    if output is None or output.rows is None or diagnosis.where in _NOT_OF_BATCH:
        return diagnosis
    if diagnosis.where == "input":
        blame = None
    try:
        return replace(diagnosis, rows=_rows_of_batch(output.rows, diagnosis, call, blame))
    except Exception:  # noqa: BLE001 # tensors of any kind may raise anything; the rest of the diagnosis stays
        return diagnosis


def _rows_of_batch(
    rows: Rows, diagnosis: Diagnosis, call: KeptCall, blame: Blame | None
) -> Rows | None:
    module = call.module()
    path, tensor = next(tensors_in([call.args, call.kwargs]))
    size = tensor.size(0)
    # A vector of numbers is one sample.
    if module is None or rows.size % size or (tensor.dim() == 1 and tensor.is_floating_point()):
        return None
    if blame is None:
        return _with_ids(rows, rows.rows, size, call) if rows.size == size else None
    # The dimension may be made of samples and heads, or of time and samples.
    outer = {row * size // rows.size for row in rows.rows}
    inner = {row % size for row in rows.rows}
    for input_rows in (sorted(outer), sorted(inner)):
        if len(input_rows) == size:
            continue
        source = blame(_without(input_rows, size, call))
        # The operation that was blamed is finite then, if another one is blamed or none.
        if source is None or source.diagnosis.lines != diagnosis.lines:
            found = replace(rows, input=input_name(module, path), input_rows=tuple(input_rows))
            return _with_ids(found, input_rows, size, call)
    return None


def _without(rows: Sequence[int], size: int, call: KeptCall) -> KeptCall:
    """Return a call with another row in the place of some, in each input of that size."""
    other = min(set(range(size)).difference(rows))

    def exchanged(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != size:
            return tensor
        changed = tensor.detach().clone()
        changed[rows] = tensor.detach()[other]
        return changed.requires_grad_(tensor.requires_grad)

    args, kwargs = Copied((call.args, call.kwargs), exchanged).value
    return replace(call, args=args, kwargs=kwargs)


def _with_ids(rows: Rows, samples: Sequence[int], size: int, call: KeptCall) -> Rows:
    ids = call.sample_ids
    if ids is None or len(ids) != size:
        return rows
    numbers = ids.tolist()
    return replace(rows, ids=tuple([numbers[sample] for sample in samples]))
