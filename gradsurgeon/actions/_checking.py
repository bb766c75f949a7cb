"""Raw options -> rule, with every flaw of the rule in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gradsurgeon.actions._base import Rule, known_actions
from gradsurgeon.actions._fields import MAX_FLAWS, Flaw, described
from gradsurgeon.actions._methods import METHODS
from gradsurgeon.actions._options import keys_of, suggestion
from gradsurgeon.errors import did_you_mean

_OWN = "an action of your own is written MODULE:NAME"


def check_rule(entry: Mapping[Any, Any]) -> tuple[Rule | None, list[Flaw]]:
    """Return the rule that one mapping of a file describes, or everything that is wrong with it."""
    kind, flaws = _action_of(entry)
    options = dict(entry)
    if kind is None:
        # The other keys may be options of the action that was meant.
        options = {k: v for k, v in entry.items() if not isinstance(k, str) or k in keys_of(Rule)}
        if options.get("action", "") is not None:
            options["action"] = "unknown"
    elif "action" in options:
        options["action"] = kind.name()
    rule = None
    try:
        rule = (kind or Rule).model_validate(options, context=known_actions)
    except ValidationError as errors:
        (error,) = errors.errors(include_url=False)
        flaws += error["ctx"]["flaws"]
    if len(flaws) > MAX_FLAWS:
        message = f"over {MAX_FLAWS} problems in one rule: the rest of it is not looked at"
        flaws[MAX_FLAWS:] = [Flaw("", message, "correct these first", check="too-large")]
    return (None if flaws else rule), flaws


def _action_of(entry: Mapping[Any, Any]) -> tuple[type[Rule] | None, list[Flaw]]:
    known = f"known: {', '.join(known_actions)}"
    key = "action"
    if key not in entry:
        misspelt = [one for one in entry if isinstance(one, str) and suggestion(one, [key])]
        if not misspelt:
            message, hint = (
                "missing key `action`",
                _beside(entry) or f"add `action`; {known}",
            )
            return None, [Flaw(key, message, hint, missing=True, check="missing-key")]
        key = misspelt[0]  # the validation reports the misspelling
    action = entry[key]
    if action is None:
        return None, []
    if not isinstance(action, str):
        message = f"`action` must be the name of an action, found {described(action)}"
        hint = (_beside(action) if isinstance(action, dict) else "") or known
        return None, [Flaw(key, message, hint, check="wrong-type")]
    module, _, name = action.rpartition(":")
    if name in known_actions and module in ("", known_actions[name].__module__):
        return known_actions[name], []
    message = f"unknown action `{action[:60]}`"
    near = did_you_mean(action, known_actions)
    hint = f"{near} {known}" if near else f"{known}; {_OWN}"
    if module:
        message = f"no module `{module[:60]}` with the action `{name[:60]}` has been imported"
        command = f"gradsurgeon lint --import {module[:60]}"
        hint = f"rule files import nothing: import it before `apply`, or by `{command}`"
    elif action == "clip":  # `clip-norm` is not the most similar name
        hint = f"did you mean `clip-norm`, which bounds a norm, or `clamp`? {known}"
    elif (method := action.lower()) in METHODS:
        hint = f"this is a method of `combine`: write `action: combine` and `method: {method}`; {known}"
    return None, [Flaw(key, message, hint, check="unknown-action")]


def _beside(entry: Mapping[Any, Any]) -> str:
    """Return the remedy if an action is the key of its options, the other shape of such files."""
    action = next((key for key in entry if key in known_actions), None)
    return f"write `action: {action}` and the options beside it" if action else ""
