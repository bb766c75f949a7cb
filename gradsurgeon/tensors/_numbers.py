"""Numbers measured on plain gradients, strided or sparse, of any dtype: norms, ranges, counts."""

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.tensors import _torch
from gradsurgeon.tensors._dist import Tensors


def on_values(edit: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
    """Apply ``edit`` to a gradient of any layout, out of place; a sparse one is coalesced: its duplicates are addends."""
    if grad.layout == torch.strided:
        return edit(grad)
    whole = grad.coalesce()
    return torch.sparse_coo_tensor(
        whole.indices(),
        edit(whole.values()),
        whole.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def values(grad: Tensor) -> Tensor:
    """Return the stored elements of a gradient of any layout, detached."""
    grad = grad.detach()
    if grad.layout == torch.strided:
        return grad
    return grad.coalesce().values()


# On a CPU each call takes about 2 microseconds per tensor, however few elements it has. Up to this
# many elements, copying all tensors into one is faster if that saves several calls per tensor.
_FEW = 1024
# A norm is one call: joining takes 185 instead of 480 microseconds for 200 tensors of 64 elements, the same for 200 of 300.
_FEW_FOR_NORM = 256
# From this many elements on, one float32 sum loses digits: 3e7 elements have an error of 2e-3. Rows of `_ROW` elements,
# summed in float64, have an error of 1e-7 at the same speed, and of 1e-6 if all elements are equal. A tensor with gaps
# loses digits from `_ROW` elements on.
_MANY = 2**17
_ROW = 2**10
# Scales each finite float64 number into the range of float32.
_INTO_FLOAT32 = 2.0**-900


@_torch.without_grad
def norms(grads: Tensors, order: float = 2.0) -> Tensor:
    """Return the norm of each gradient. Shape ``[len(grads)]``, float32, on their device.

    The tensors share a device. A norm is non-finite if an element is, or if it exceeds the largest float32. On
    devices other than the host it is also non-finite if the sum of squares is. An empty gradient has norm 0.
    """
    # A loop would take three times as long.
    sizes = tuple(map(Tensor.numel, grads))
    largest = max(sizes)
    if order == 2.0 and largest <= _FEW_FOR_NORM:  # noqa: PLR2004 # l2
        flat = _joined(grads, sum(sizes))
        if flat is not None:
            # A sequential float32 sum would lose digits.
            squares = flat.double().square()
            lengths = _torch.integers(sizes, flat.device)
            sums = torch.segment_reduce(squares, "sum", lengths=lengths, unsafe=True)
            return sums.sqrt_().float()
    dense = grads
    if {grad.layout for grad in grads} != {torch.strided}:
        dense = list(map(values, grads))
    dtypes = {grad.dtype for grad in dense}
    is_short = largest < _ROW or (largest < _MANY and all(map(Tensor.is_contiguous, dense)))
    if is_short and len(dtypes) == 1:  # one call can measure all
        norms = torch.stack(_each(dense, order)).float()
    else:
        # Without an index, which would have to come from the host: a CUDA graph cannot wait for it.
        norms = torch.stack([norm.float() for norm in _of_each_kind(dense, order)])
    if _may_be_out_of_range(norms, order):
        for position, norm in enumerate(norms.tolist()):
            is_out_of_range = math.isinf(norm) or norm < _TINY
            # Layers that do not learn have gradients of 0, often many: their norm needs no second sum.
            if is_out_of_range and dense[position].any():
                norms[position] = _wide_norm(dense[position], order)
    return norms


def _of_each_kind(dense: Tensors, order: float) -> list[Tensor]:
    kinds = defaultdict(list)
    for position, grad in enumerate(dense):
        kind = (_is_long(grad, order), grad.dtype)
        kinds[kind].append(position)
    by_position = {}
    for (in_rows, _), positions in kinds.items():
        if in_rows:
            for position in positions:
                by_position[position] = _by_rows(dense[position])
        else:
            alike = [dense[position] for position in positions]
            by_position.update(zip(positions, _each(alike, order), strict=True))
    return [by_position[position] for position in range(len(dense))]


@_torch.without_grad
def magnitudes(grads: Tensors) -> Tensor:
    """Return a number of each strided gradient: NaN or infinite exactly if an element is, and then of the same kind.

    Shape ``[len(grads)]``, float32, on their device. A finite one is the largest magnitude; of float64 it is scaled down.
    """
    numbers = []
    for number in _of_each_kind(grads, math.inf):
        narrow = number * _INTO_FLOAT32 if number.dtype is torch.float64 else number
        numbers.append(narrow.float())
    return torch.stack(numbers)


def over(norms: Tensor, places: Sequence[int], order: float) -> Tensor:
    """Return the norms over groups of tensors. Shape ``[max(places) + 1]``, float32.

    Args:
        norms: the norm of each tensor, float32.
        places: the number of the group of each tensor; every number up to the largest has a tensor.
        order: of the norms, such as 2 or infinity.
    """
    table = norms.unsqueeze(0)
    if max(places) > 0:
        members = defaultdict(list)
        for position, place in enumerate(places):
            members[place].append(position)
        longest = max(map(len, members.values()))
        # Short groups are filled up with the position of a 0.
        filled = []
        for place in range(len(members)):
            filled += members[place] + [len(norms)] * (longest - len(members[place]))
        positions = _torch.integers(tuple(filled), norms.device).view(-1, longest)
        table = torch.cat([norms, norms.new_zeros(1)])[positions]
    joint: Tensor = torch.linalg.vector_norm(table, order, dim=1)
    if _may_be_out_of_range(joint, order):
        # A norm that fits keeps the bits that a device computes.
        wide = torch.linalg.vector_norm(table, order, dim=1, dtype=torch.float64).float()
        fits = (joint >= _TINY) & joint.isfinite()
        joint = torch.where(fits, joint, wide)
    return joint


# Squares of elements below about 1e-19 lose digits in float32, and below 1e-23 they vanish.
_TINY = 1e-17


def _may_be_out_of_range(norms: Tensor, order: float) -> bool:
    """Tell whether the powers of elements may have overflowed or vanished. Shape of ``norms``: any."""
    # On a device this check would be a wait, and wider sums a second pass, or slow.
    if not _torch.is_host(norms) or order == math.inf or not norms.numel():
        return False
    if norms.numel() == 1:
        return not _TINY <= norms.item() < math.inf
    low, high = norms.aminmax()
    return not (low.item() >= _TINY and high.item() < math.inf)


def _wide_norm(grad: Tensor, order: float) -> Tensor:
    """Return the norm of a dense tensor whose powers do not fit its dtype, summed in float64."""
    dtype = torch.promote_types(grad.dtype, torch.float64)
    norms = [grad.new_zeros((), dtype=torch.float64)]
    # In parts: a complete float64 copy could be too large.
    for part in _flat_parts(grad):
        pieces = torch.split(part, _MANY)
        norms += [torch.linalg.vector_norm(piece, order, dtype=dtype) for piece in pieces]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return norm.float()


def norm(grad: Tensor, order: float = 2.0) -> Tensor:
    """Return the norm of a gradient of any layout as a 0-dim float32 tensor."""
    if grad.layout != torch.strided or not grad.numel():
        return norms([grad], order)[0]
    # One call without lists. `detach` takes a third of the time of `torch.no_grad`.
    dense = grad
    if grad.requires_grad:
        dense = grad.detach()
    norm: Tensor
    if _is_long(dense, order):
        norm = _by_rows(dense)
    else:
        norm = torch.linalg.vector_norm(dense, order, dtype=widened(dense))
    norm = norm.float()
    if _may_be_out_of_range(norm, order):
        return _wide_norm(dense, order)
    return norm


def is_small(tensor: Tensor) -> bool:
    """Tell whether copying a tensor and measuring it together with others costs less than its norm."""
    return tensor.dtype in _WIDE and type(tensor) is Tensor and tensor.is_cpu and is_few(tensor)


def is_few(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, real, and so small that its elements may be copied."""
    return 0 < tensor.numel() <= _FEW and tensor.layout == torch.strided and tensor.dtype in _REAL


def _joined(tensors: Tensors, count: int) -> Tensor | None:
    """Return tensors on the host joined in their widest dtype, given the sum of their sizes; ``None`` for other tensors."""
    if not tensors[0].is_cpu:
        return None
    try:
        # `torch.cat` takes half the time if no tensor needs a view, and twice the time if some do.
        if set(map(Tensor.dim, tensors)) == {1}:
            flat = torch.cat(list(tensors))
        else:
            # DDP fills its buckets with this function.
            flat = torch._C._nn.flatten_dense_tensors(list(tensors))  # noqa: SLF001
    except (RuntimeError, NotImplementedError):  # some are sparse, or on other devices
        return None
    # A single sparse tensor stays sparse.
    is_plain = type(flat) is Tensor and flat.layout is torch.strided
    if not is_plain or flat.dtype not in _WIDE or len(flat) != count:
        return None
    return flat


_WIDE = {torch.float32, torch.float64}
HALF = {torch.float16, torch.bfloat16}
_REAL = _WIDE | HALF


def _is_long(grad: Tensor, order: float) -> bool:
    if order != 2.0 or not grad.is_cpu or grad.dtype not in _REAL:  # noqa: PLR2004 # l2
        return False
    if grad.numel() >= _MANY:
        return True
    return grad.numel() >= _ROW and not _is_dense(grad)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill their memory without gaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


def _flat_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield all elements as flat tensors: one view in memory order, or copies of at most `_MANY` if there are gaps."""
    if _is_dense(tensor):
        yield tensor.as_strided((tensor.numel(),), (1,))
    elif tensor.numel() <= _MANY:
        yield tensor.contiguous().view(-1)
    else:
        divisible = [dim for dim, size in enumerate(tensor.shape) if size > 1]
        widest = max(divisible, key=tensor.stride)
        for half in tensor.chunk(2, widest):
            yield from _flat_parts(half)


def _by_rows(grad: Tensor) -> Tensor:
    of_rows = []
    for flat in _flat_parts(grad):
        even = flat.numel() // _ROW * _ROW
        rows = flat[:even].view(-1, _ROW)
        parts: Tensors = (rows,)
        if flat.dtype in HALF:
            # Half precision is converted in parts that stay in the cache.
            parts = torch.split(rows, 256)
        of_rows += [torch.linalg.vector_norm(in_float32(part), dim=1) for part in parts]
        last_row = in_float32(flat[even:])
        of_rows.append(torch.linalg.vector_norm(last_row).view(1))
    norm: Tensor = torch.linalg.vector_norm(torch.cat(of_rows).double())
    return norm


def _each(grads: Tensors, order: float) -> list[Tensor]:
    filled = list(grads)
    if order == math.inf or not grads[0].is_cpu:
        # torch refuses the maximum norm of an empty tensor.
        filled = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
    # One call over the list, as in `clip_grad_norm_`; it has no public name.
    return list(torch._foreach_norm(filled, order, dtype=widened(grads[0])))  # noqa: SLF001


def in_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, another tensor as it is."""
    if tensor.dtype in HALF:
        return tensor.float()
    return tensor


def widened(grad: Tensor) -> torch.dtype | None:
    # float16 overflows at 65504, so its norm must be computed in float32.
    if grad.dtype in HALF:
        return torch.float32
    return None


def differs(old: Tensor, new: Tensor) -> Tensor:
    """Tell for each element whether it differs; NaN does not differ from NaN."""
    are_nan = old.isnan() & new.isnan()
    return old.ne(new) & ~are_nan


def scale_(grads: Tensors, factors: Sequence[float]) -> None:
    """Multiply gradients in place by a factor each."""
    dtypes = {grad.dtype for grad in grads}
    is_cpu = [grad.is_cpu for grad in grads]
    if any(is_cpu) and not HALF.isdisjoint(dtypes):
        for grad, factor in zip(grads, factors, strict=True):
            # A multi-tensor call rounds the factor to half precision on the host: 1e5 would become infinite.
            grad.mul_(factor)
        return
    multiplier: Any = factors
    if len(set(factors)) == 1:
        multiplier = factors[0]
    if len(dtypes) == 1 and all(is_cpu):
        # From a number torch makes a tensor for each gradient, which takes longer than the multiplication.
        multiplier = torch.tensor(multiplier, dtype=grads[0].dtype, device="cpu")
        if multiplier.dim():
            multiplier = multiplier.unbind()
    torch._foreach_mul_(list(grads), multiplier)  # the call has no public name


def multiply_(parts: Tensors, factor: Tensor) -> None:
    """Multiply tensors in place by a factor of shape ``[1]``, float32 at least; no factor is rounded to half precision."""
    kinds = defaultdict(list)
    for part in parts:
        kinds[part.device, part.dtype].append(part)
    for (device, dtype), group in kinds.items():
        factor_there = factor.to(device)
        if dtype is torch.float16:
            # CUDA would round a 0-dim factor to half precision; the kernel of `GradScaler` multiplies in float32.
            ignored = torch.zeros(1, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, ignored, factor_there.float())
        elif dtype is torch.bfloat16:
            _multiply_bfloat16_(group, factor_there)
        else:
            torch._foreach_mul_(group, factor_there.reshape(()))  # there is no public name


# Up to this many elements, a kernel of its own costs more than copying a tensor to where others are multiplied with it.
_FEW_TO_COPY = 2**14


def _multiply_bfloat16_(parts: Tensors, factor: Tensor) -> None:
    # On CUDA the kernel of `GradScaler` has no bfloat16, and list kernels round the factor to bfloat16. Torch multiplies in
    # float32 where a float32 factor has a dimension, which is one kernel for each tensor.
    joined = [part for part in parts if part.numel() <= _FEW_TO_COPY]
    alone = [part for part in parts if part.numel() > _FEW_TO_COPY]
    if len(joined) == 1:
        alone += joined
        joined = []
    for part in alone:
        part.unsqueeze(0).mul_(factor)
    if joined:
        flat = torch.cat([part.reshape(-1) for part in joined]).mul_(factor)
        products = torch.split(flat, [part.numel() for part in joined])
        shaped = []
        for part, product in zip(joined, products, strict=True):
            shaped.append(product.view(part.shape))
        torch._foreach_copy_(joined, shaped)  # there is no public name


def to_bytes(tensor: Tensor) -> bytes:
    """Return a CPU tensor as bytes, in the order of its elements, without numpy, which torch does not require."""
    # A row of a transposed table has gaps.
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
