"""Random numbers for methods that draw some, from a generator of their own.

The generator of the script is left alone: other threads may draw from it at the same time, and what it gives must not
depend on the rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWN = {torch.rand, torch.randn, torch.randint, torch.randperm}


class Drawing(TorchFunctionMode):
    """Gives functions of torch that draw on the host a generator, in this thread.

    Its numbers follow from the seed of the script, the rule, the step and the call: a training that is resumed has
    those of one that was not interrupted.

    Args:
        rule: id of the rule.
        step: the number of the update.
        call: which one it is in that step.
    """

    def __init__(self, rule: str, step: int, call: int) -> None:
        super().__init__()
        text = f"{torch.initial_seed()}/{rule}/{step}/{call}"
        # 63 bits, which no release of torch takes for a negative number.
        self._seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        self._generator: torch.Generator | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = dict(kwargs or {})
        if func in _DRAWN and options.get("generator") is None:
            if self._generator is None:
                self._generator = torch.Generator("cpu").manual_seed(self._seed)
            options["generator"] = self._generator
            # The script may have made another one the default.
            options.setdefault("device", "cpu")
        return func(*args, **options)
