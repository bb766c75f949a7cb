"""What can be wrong with the method of a `combine` and the options that belong to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradsurgeon.actions._fields import Flaw, is_number, is_whole
from gradsurgeon.actions._methods import METHODS
from gradsurgeon.errors import did_you_mean

# The options that belong to methods, each as a file may have it.
OPTIONS: Mapping[str, str] = {
    "c": "c: 0.4",
    "alpha": "alpha: 1",
    "n_byzantine": "n_byzantine: 1",
    "n_selected": "n_selected: 2",
    "weights": "weights: {seg: 1, depth: 0.5}",
}
_OF_LOSSES = ("preference", "memory", "weights")
# As many more gradients than are wrong must be there for `krum`.
_MORE_THAN_WRONG = 3


def method_flaws(given: Mapping[str, Any]) -> Iterator[Flaw]:
    """Yield the flaws of raw options, of any type; of those that go with a method only where that is known."""
    name = given.get("method")
    if isinstance(name, str) and name in METHODS:
        yield from _lacking_and_foreign(name, given)
        yield from _not_of_the_method(name, given)
    if given.get("modules") is not None:
        yield from _names_on_modules(given)
    elif isinstance(losses := given.get("losses"), list | tuple):
        yield from _preference(given.get("preference"), losses)
        yield from _memory(given, losses)
        yield from _weights(given.get("weights"), losses)
        if name == "krum":
            yield from _krum(given, len(losses))


def _lacking_and_foreign(name: str, given: Mapping[str, Any]) -> Iterator[Flaw]:
    wanted, on_modules = METHODS[name].options, given.get("modules") is not None
    for option, example in OPTIONS.items():
        if given.get(option) is None:
            if wanted.get(option) and on_modules and option in _OF_LOSSES:
                message = (
                    f"`method: {name}` goes by the names of losses, and on modules there are none"
                )
                yield Flaw("method", message, "use `mean` or `sum`, or name `params` and `losses`")
            elif wanted.get(option):
                message, hint = (
                    f"missing key `{option}`: `method: {name}` needs it",
                    f"such as `{example}`",
                )
                yield Flaw(option, message, hint, missing=True, check="missing-key")
        elif option not in wanted:
            owner = next(one for one, known in METHODS.items() if option in known.options)
            message = f"`{option}` belongs to `method: {owner}`, not to `{name}`"
            yield Flaw(
                option,
                message,
                f"remove it, or write `method: {owner}`",
                key=True,
                check="unknown-key",
            )


def _not_of_the_method(name: str, given: Mapping[str, Any]) -> Iterator[Flaw]:
    preferring = [one for one, known in METHODS.items() if known.takes_preference]
    constraining = [one for one in preferring if METHODS[one].solvers]
    for option, knowing in (("preference", preferring), ("memory", constraining)):
        if given.get(option) is not None and name not in knowing:
            message = f"`method: {name}` knows no `{option}`"
            choices = f"{', '.join(knowing[:-1])} or {knowing[-1]}"
            yield Flaw(
                option, message, f"use {choices}, or remove it", key=True, check="unknown-key"
            )


def _names_on_modules(given: Mapping[str, Any]) -> Iterator[Flaw]:
    for option in _OF_LOSSES:
        if given.get(option) is not None:
            message = f"`{option}` goes by the names of losses, and on modules there are none"
            yield Flaw(option, message, "remove it, or name `params` and `losses`", key=True)


def _preference(preference: object, losses: Sequence[object]) -> Iterator[Flaw]:
    if not isinstance(preference, Mapping):
        return
    yield from _unknown("preference", preference, losses)
    for name, value in preference.items():
        if is_number(value) and value < 0:
            message = f"a preference is 0 or more, found the number {value}"
            yield Flaw(
                ("preference", name), message, "what counts less than another is between 0 and 1"
            )
    if all(is_number(one := preference.get(name, 1.0)) and one == 0 for name in losses):
        message = "every loss has the preference 0: nothing is left to be trained"
        yield Flaw("preference", message, "give those that are trained more than 0")


def _memory(given: Mapping[str, Any], losses: Sequence[object]) -> Iterator[Flaw]:
    memory, preference = given.get("memory"), given.get("preference")
    if not isinstance(memory, list | tuple):
        return
    yield from _unknown("memory", memory, losses)
    if all(name in memory for name in losses):
        message = "every loss is under `memory`: nothing is left to be constrained"
        yield Flaw("memory", message, "leave out the losses that are trained")
    for index, name in enumerate(memory):
        if isinstance(preference, Mapping) and isinstance(name, str) and name in preference:
            message = f"`{name[:60]}` only constrains, and has a preference as well"
            yield Flaw(("memory", index), message, "remove it from one of the two")


def _weights(weights: object, losses: Sequence[object]) -> Iterator[Flaw]:
    if not isinstance(weights, Mapping):
        return
    yield from _unknown("weights", weights, losses)
    if lacking := [str(name)[:60] for name in losses if name not in weights]:
        message = f"the loss `{lacking[0]}` has no weight"
        yield Flaw("weights", message, "give each of the `losses` one")


def _unknown(option: str, names: Any, losses: Sequence[object]) -> Iterator[Flaw]:
    for index, name in enumerate(names):
        if isinstance(name, str) and name not in losses:
            is_key = isinstance(names, Mapping)
            near = did_you_mean(name[:60], [one for one in losses if isinstance(one, str)])
            message = f"`{name[:60]}` under `{option}` is none of the `losses`"
            yield Flaw(
                (option, name if is_key else index), message, near or "add it there", key=is_key
            )


def _krum(given: Mapping[str, Any], losses: int) -> Iterator[Flaw]:
    wrong, selected = given.get("n_byzantine"), given.get("n_selected")
    if is_whole(wrong) and wrong >= 0 and losses < wrong + _MORE_THAN_WRONG:
        message = f"`n_byzantine: {wrong}` needs {wrong + _MORE_THAN_WRONG} losses or more, found {losses}"
        hint = "name more losses" if wrong == 0 else "name more losses, or lower it"
        yield Flaw("n_byzantine", message, hint)
    if is_whole(selected) and selected > losses:
        yield Flaw("n_selected", f"`n_selected: {selected}` of {losses} losses", "lower it")
