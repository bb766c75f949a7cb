"""Which tensor of a target a rule means: ``grad``, ``output[0].grad``, ``input.attention_mask``."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from gradsurgeon.actions._fields import Flaw

TargetKind = Literal["params", "modules", "tensors"]
TARGETS: tuple[TargetKind, ...] = ("params", "modules", "tensors")
Side = Literal["param", "input", "output", "tag"]

_STEP = re.compile(r"\[(\d{1,6})\]|\.([A-Za-z_]\w*)")
_MODULE_TENSOR = re.compile(r"(output|input)((?:\[\d{1,6}\]|\.[A-Za-z_]\w*)*?)(\.grad)?")
_HINTS: dict[TargetKind, str] = {
    "params": "leave `tensor` out",
    "modules": "write `output`, `input`, `output.grad` or `input.grad`, or one tensor of it by path, such "
    "as `output[0].grad`",
    "tensors": "write `grad` or `value`",
}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor of a target, or every tensor of a structure if ``path`` is empty."""

    side: Side
    path: tuple[int | str, ...] = ()  # into the arguments or the result of the module
    grad: bool = True  # the gradient of the tensor, not its value

    def __str__(self) -> str:
        if self.side in ("param", "tag"):
            return "grad" if self.grad else "value"
        return f"{self.side}{spelled(self.path)}{'.grad' if self.grad else ''}"


def spelled(path: tuple[int | str, ...]) -> str:
    """Return a path as rule files write it: ``[0].logits``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def gradient_pairs(rules: Mapping[str, TensorRef]) -> list[tuple[str, str]]:
    """Return the pairs of rules on a value and on its gradient. ``rules`` has the tensor of each rule by id."""
    return [
        (value, gradient)
        for value, of_value in rules.items()
        for gradient, of_gradient in rules.items()
        if (of_value.grad, of_gradient.grad) == (False, True)
        and (of_value.side, of_value.path) == (of_gradient.side, of_gradient.path)
    ]


@cache
def parse_tensor(target: TargetKind, text: str | None) -> TensorRef | str:
    """Return the meaning of ``tensor`` for a kind of target, or a message if it has none."""
    if target == "params":
        found = f"the tensor of a parameter is `grad`, found `{(text or '')[:60]}`"
        return TensorRef("param") if text in (None, "grad") else found
    if target == "tensors":
        found = f"the tensor of a tag is `grad` or `value`, found `{(text or '')[:60]}`"
        return TensorRef("tag", grad=text != "value") if text in (None, "grad", "value") else found
    if text is None:
        return "missing key `tensor`: a module has several"
    parts = _MODULE_TENSOR.fullmatch(text)
    if parts is None:
        return f"`{text[:60]}` is no tensor of a module"
    path = tuple(int(index) if index else key for index, key in _STEP.findall(parts[2]))
    return TensorRef("input" if parts[1] == "input" else "output", path, parts[3] is not None)


def target_flaws(
    action: str, allowed: Sequence[TargetKind], given: Mapping[str, Any]
) -> Generator[Flaw, None, TargetKind | None]:
    """Yield the flaws of target and tensor of a rule; return its target if it has one."""
    named = [kind for kind in TARGETS if given.get(kind) is not None]
    if not named:
        names = ", ".join(f"`{kind}`" for kind in allowed)
        choice = f"one of {names}" if len(allowed) > 1 else names
        message = f"missing key `{allowed[0]}`: a rule names its target by {choice}"
        hint = "add patterns of names"
        yield Flaw(allowed[0], message, hint, missing=True, check="missing-key")
        return None
    if len(named) > 1:
        message = f"a rule has one target, found {' and '.join(f'`{kind}`' for kind in named)}"
        yield Flaw(named[1], message, "write one rule for each", key=True)
        return None
    target = named[0]
    if target not in allowed:
        known = " and ".join(f"`{kind}`" for kind in allowed)
        message = f"{action} acts on {known}, not on `{target}`"
        yield Flaw(target, message, f"name {known.replace(' and ', ' or ')}", key=True)
    elif isinstance(text := given.get("tensor"), str | None):
        tensor = parse_tensor(target, text)
        if isinstance(tensor, str):
            missing = text is None
            check = "missing-key" if missing else "bad-value"
            yield Flaw("tensor", tensor, _HINTS[target], missing=missing, check=check)
    yield from _keys_for_other_targets(target, given)
    return target


def _keys_for_other_targets(target: TargetKind, given: Mapping[str, Any]) -> Iterator[Flaw]:
    if target == "params":
        if given.get("when") is not None:
            message = "`when` is for edits of outputs and inputs: gradients exist in training only"
            yield Flaw("when", message, "remove it", key=True)
        return
    if given.get("expect") is not None:
        yield Flaw("expect", "`expect` counts parameters", "remove it, or name `params`", key=True)
    where = cast("Any", given.get("where"))
    keys = where if isinstance(where, Mapping) else getattr(where, "model_fields_set", ())
    known = {"module_type"} if target == "modules" else set()
    wrong = sorted(str(key) for key in keys if key not in known)
    if wrong:
        message = f"`where: {{{wrong[0]}: ...}}` is a condition on parameters, not on {target}"
        yield Flaw("where", message, "use `module_type`" if known else "remove it")
