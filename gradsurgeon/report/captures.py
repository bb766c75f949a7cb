"""Which of the tensors that `capture` rules have kept is meant, and what there is if none is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from gradsurgeon.actions import CaptureRule, gradient_pairs
from gradsurgeon.errors import RecordError
from gradsurgeon.planning import Module, Param
from gradsurgeon.report.names import Name, Session, matching

if TYPE_CHECKING:
    from torch import Tensor


Calls = int | tuple[int, int]

_ADD = '{id: maps, action: capture, modules: "layer4", tensor: output}'
_ADD_GRADIENT = '{id: map-gradients, action: capture, modules: "layer4", tensor: output.grad}'
_NAMED = 8


class Capture(NamedTuple):
    """A tensor that a rule has kept, on whichever device it was."""

    rule: str
    name: str
    step: int
    call: int
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name}, step {self.step}" + (f", call {self.call}" if self.call else "")

    def numbers(self) -> Tensor:
        """Return its elements as float64 on the CPU; of complex ones the magnitudes.

        Raises:
            RecordError: the tensor is divided over ranks.
        """
        from gradsurgeon import _dist  # noqa: PLC0415 # needs torch, as only captures do

        if _dist.is_sharded(self.tensor):
            raise RecordError(
                f"{self.name} is divided over ranks (a DTensor), and one rank has only a part to draw: "
                f"session.captured({self.rule!r}) has it"
            )
        dense = self.tensor.to_dense() if self.tensor.is_sparse else self.tensor
        return (dense.abs() if dense.is_complex() else dense).cpu().double()


def several(
    session: Session, rule: str | None, name: Name | None, step: int | None, call: int | None
) -> list[Capture]:
    """Return what a rule has kept of a step, the newest if not given.

    Raises:
        KeyError: no `capture` rule has this id, or no tensor this name.
        RecordError: nothing was kept, or nothing of this step or call.
        ValueError: several rules have kept something, and none is named.
    """
    rule = _rule(session) if rule is None else rule
    kept = _kept(session, rule)
    if not kept:
        raise RecordError(
            f"rule {rule} has kept nothing yet: it does when the tensor next passes, in a step in which it is due"
        )
    if name is not None:
        names = matching(name, dict.fromkeys(one.name for one in kept), _aliases(session))
        kept = [one for one in kept if one.name in names]
    steps = sorted({one.step for one in kept})
    newest = steps[-1] if step is None else step
    of_step = [one for one in kept if one.step == newest]
    found = [one for one in of_step if call in (None, one.call)]
    if not found:
        there = of_step or kept
        what, having = ("call", {one.call for one in there}) if of_step else ("step", set(steps))
        raise RecordError(
            f"rule {rule} has kept {_listed(dict.fromkeys(one.name for one in there))} of {what} "
            f"{_listed(sorted(having))}, not of {what} {call if of_step else step}"
        )
    return found


def single(
    session: Session, rule: str | None, name: Name | None, step: int | None, call: int | None
) -> Capture:
    """Return what `several` does, of one tensor: of its last call if none is given.

    Raises:
        ValueError: there are several tensors to choose from.
    """
    found = several(session, rule, name, step, call)
    names = dict.fromkeys(one.name for one in found)
    if len(names) > 1:
        raise ValueError(
            f"rule {found[0].rule} has kept several tensors: pass name= one of {_listed(names)}"
        )
    return found[-1]


def pair(
    session: Session,
    rule: str | Sequence[str] | None,
    name: Name | None,
    step: int | None,
    call: Calls | None,
) -> tuple[Capture, Capture]:
    """Return what a module returned, and the gradient of that, of one step.

    Raises:
        KeyError: no tensor has this name.
        RecordError: no two rules have kept both, or not of this step.
        ValueError: there are several to choose from.
    """
    of_name: dict[str, list[tuple[list[Capture], list[Capture]]]] = {}
    partners = _partners(session, rule)
    for ids in partners:
        values, gradients = (_by_name(_kept(session, one)) for one in ids)
        for one in values.keys() & gradients.keys():
            of_name.setdefault(one, []).append((values[one], gradients[one]))
    if not of_name:
        kept = {id_: _listed(_by_name(_kept(session, id_))) for id_ in chain(*partners)}
        found = "; ".join(f"{id_}: {names or 'nothing'}" for id_, names in kept.items())
        raise RecordError(
            "the output and its gradient have been kept of no module: both come with a forward pass and "
            f"`backward`; kept by {found}"
        )
    names = list(of_name) if name is None else matching(name, of_name, _aliases(session))
    if len(names) > 1:
        raise ValueError(f"there are several modules: pass name= one of {_listed(sorted(names))}")
    candidates = of_name[names[0]]
    if len(candidates) > 1:
        choices = _listed((values[0].rule, gradients[0].rule) for values, gradients in candidates)
        raise ValueError(f"several rules have kept {names[0]}: pass rule= one of {choices}")
    return _of_one_step(*candidates[0], step, call)


def _of_one_step(
    values: list[Capture], gradients: list[Capture], step: int | None, call: Calls | None
) -> tuple[Capture, Capture]:
    name = values[0].name
    steps = {one.step for one in values} & {one.step for one in gradients}
    newest = max(steps, default=None) if step is None else step
    if newest is None or newest not in steps:
        asked = "one step" if step is None else f"step {step}"
        raise RecordError(
            f"rules {values[0].rule} and {gradients[0].rule} have not kept both output and gradient of "
            f"{name} of {asked}; both are there of: {_listed(sorted(steps)) or 'none'}"
        )
    by_call = [
        {one.call: one for one in kept if one.step == newest} for kept in (values, gradients)
    ]
    if call is None and max(map(len, by_call)) > 1:
        raise ValueError(
            f"{name} has {len(by_call[0])} outputs and {len(by_call[1])} gradients in step {newest}, and "
            "which belong together cannot be known: pass call=, a number where each backward pass came right "
            "after its forward pass, or call=(output, gradient): in one backward pass the last call of a "
            "module comes first"
        )
    calls = call if isinstance(call, tuple) else (call, call)
    chosen = [
        next(iter(of.values())) if number is None else of.get(number)
        for of, number in zip(by_call, calls, strict=True)
    ]
    if chosen[0] is None or chosen[1] is None:
        raise RecordError(
            f"{name} has no call {call} in step {newest}; there are outputs {_listed(by_call[0])} and "
            f"gradients {_listed(by_call[1])}"
        )
    return chosen[0], chosen[1]


def _partners(session: Session, rule: str | Sequence[str] | None) -> list[tuple[str, str]]:
    """Return the rules that keep a value and its gradient, in pairs."""
    given = {rule} if isinstance(rule, str) else set(rule or ())
    rules = {one.id: one.ref for one in _rules(session) if one.target != "params"}
    pairs = [pair for pair in gradient_pairs(rules) if given <= {*pair}]
    if not pairs:
        found = _listed(f"{one} ({ref})" for one, ref in rules.items())
        raise RecordError(
            "Grad-CAM takes two capture rules on one module, of its output and of the gradient of that, "
            f"such as {_ADD} and {_ADD_GRADIENT}; there are: {found or 'none'}"
        )
    return pairs


def _rules(session: Session) -> list[CaptureRule]:
    return [one for one in session.plan.rules.rules if isinstance(one, CaptureRule)]


def _rule(session: Session) -> str:
    """Return the only `capture` rule that has kept something."""
    ids = [one.id for one in _rules(session)]
    if not ids:
        raise RecordError(f"no rule keeps tensors: add one, such as {_ADD}")
    kept = [one for one in ids if session.captured(one)]
    if len(kept) > 1:
        raise ValueError(f"several rules have kept tensors: pass rule= one of {_listed(kept)}")
    return kept[0] if kept else ids[0]


def _kept(session: Session, rule: str) -> list[Capture]:
    return [Capture(rule, *key, tensor) for key, tensor in session.captured(rule).items()]


def _by_name(kept: Iterable[Capture]) -> dict[str, list[Capture]]:
    found: dict[str, list[Capture]] = {}
    for one in kept:
        found.setdefault(one.name, []).append(one)
    return found


def _aliases(session: Session) -> dict[str, str]:
    manifest = session.plan.manifest
    named: tuple[Module | Param, ...] = (*manifest.modules, *manifest.params)
    return {alias: one.name for one in named for alias in one.aliases}


def _listed(items: Iterable[object]) -> str:
    texts = list(map(str, items))
    more = f", and {len(texts) - _NAMED:,} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more
