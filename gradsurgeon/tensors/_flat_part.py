"""What a rank holds of a tensor that an engine has flattened and divided over ranks at any element."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class FlatPart(Tensor):
    """Consecutive elements of a flattened tensor, possibly none, of shape ``[n]``. Results of operations are parts also.

    Attributes:
        whole: the number of elements of the whole tensor.
        start: the place of the first element in it.
        group: the process group over which the elements are divided.
    """

    whole: int
    start: int
    group: Any

    @classmethod
    def of(cls, elements: Tensor, whole: int, start: int, group: Any) -> "FlatPart":
        """Return the elements as a part that shares their memory."""
        part = elements.detach().as_subclass(cls)
        part.whole = whole
        part.start = start
        part.group = group
        return part

    @property
    def elements(self) -> Tensor:
        with torch.no_grad():
            return self.as_subclass(Tensor)

    def numel(self) -> int:
        """Return the number of elements of the whole tensor, as a `DTensor` does."""
        return self.whole

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, FlatPart) and not hasattr(result, "whole"):
            for arg in args:
                if isinstance(arg, FlatPart):
                    vars(result).update(vars(arg))
        return result
