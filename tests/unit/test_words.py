"""Words that people write from habit lead to the form that means the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import report_cases
import yaml
from small import rule_file

import gradsurgeon
from gradsurgeon.actions import _synonyms, check_rule
from gradsurgeon.common import match
from gradsurgeon.integrations.launcher import command

CASES = report_cases.read(Path(__file__).parents[1] / "cases" / "words.yaml")
WORDS = [(word, action) for action, words in CASES["actions"].items() for word in words]
KEYS = [(word, key) for key, words in CASES["keys"].items() for word in words]


def hint_on(**rule: Any) -> str:
    with pytest.raises(gradsurgeon.RuleFileError) as refused:
        gradsurgeon.load(rule_file({"id": "it", "params": "*", **rule}))
    return str(refused.value)


def form_in(text: str) -> dict[str, Any]:
    found = re.search(r"did you mean `(.*)`\?", text)
    assert found, text
    form = yaml.safe_load(f"{{{found[1]}}}")
    assert isinstance(form, dict)
    return form


@pytest.mark.parametrize(("word", "action"), WORDS)
def test_a_word_for_an_action_gets_the_whole_form(word: str, action: str) -> None:
    form = form_in(hint_on(action=word))
    assert form["action"] == action
    # The form is a rule, if it has a target.
    rule, flaws = check_rule(_whole(form))
    assert (rule is None, flaws) == (False, [])


@pytest.mark.parametrize(("word", "key"), KEYS)
def test_a_word_for_a_key_gets_the_form(word: str, key: str) -> None:
    rule: dict[str, Any] = {"id": "it", "action": "norm-log", "params": "*", word: 10}
    rule.pop(key, None)
    with pytest.raises(gradsurgeon.RuleFileError) as refused:
        gradsurgeon.load({"version": 1, "rules": [rule]})
    assert [*form_in(str(refused.value))] == [key]


def test_values_from_habit() -> None:
    # Another action has `skip-step`, and another one `module`.
    assert "did you mean" not in hint_on(action="mask", rows="1:", then="skip")
    assert "did you mean" not in hint_on(action="norm-log", per="layer")
    assert form_in(hint_on(action="norm-log", steps=1000)) == {"steps": {"to": 1000}}
    assert "did you mean `at: step`?" in hint_on(action="zero", at="before-step")
    assert "did you mean `at: accumulated" in hint_on(action="norm-log", at="after-backward")
    assert 'apply(..., mode="observe")' in hint_on(action="zero", mode="observe")


def test_what_is_only_misspelt_is_found_by_its_spelling() -> None:
    assert "did you mean `norm-log`?" in hint_on(action="norm-lgo")
    assert "did you mean `exclude`?" in hint_on(action="norm-log", exlude="*.bias")


def test_rows_in_a_pattern_lead_to_a_mask() -> None:
    text = hint_on(action="freeze", params="emb.weight[:15]")
    assert 'write "emb.weight" with `action: mask, rows: ":15"`' in text
    # `freeze` names rows that stay, and `rows` those that train.
    assert text.endswith("if these are the rows that train")
    gradsurgeon.load(rule_file({"action": "mask", "params": "emb.weight", "rows": ":15"}))


@pytest.mark.parametrize(("row", "rows"), [("15", "15:16"), ("-1", "-1:"), ("-3", "-3:-2")])
def test_a_row_in_a_pattern_leads_to_a_mask_where_that_is_no_glob(row: str, rows: str) -> None:
    names = ["emb.weight", "h1", "h5"]
    answer = match.suggest(f"emb.weight[{row}]", names)
    assert answer.startswith(f'write "emb.weight" with `action: mask, rows: "{rows}"`')
    gradsurgeon.load(rule_file({"action": "mask", "params": "emb.weight", "rows": rows}))
    # In a glob it is a set of characters.
    assert match.select([match.compile_pattern("h[15]")], names) == [1, 2]


def test_a_wrong_key_of_a_ramp_is_no_key_of_a_rule() -> None:
    ramp = {"from": 0, "to": 1, "steps": 10, "type": "cosine", "end": 5}
    text = hint_on(action="scale", factor=ramp)
    assert text.count("known: from, to, steps, shape, start_step") == 2
    assert "did you mean" not in text


@pytest.mark.parametrize(
    ("word", "form"),
    [
        ("cagrad", {"method": "cagrad"}),
        ("MGDA", {"method": "mgda"}),
        ("imtl-g", {"method": "imtl-g"}),
        ("a-gem", {"method": "dualproj", "memory": ["b"]}),
        ("adagc", {"per": "parameter", "above": {"times": 1.05}}),
    ],
)
def test_a_method_is_answered_with_itself(word: str, form: dict[str, Any]) -> None:
    found = form_in(hint_on(action=word))
    assert {key: found[key] for key in form} == form


def test_a_command_in_an_answer_has_its_option() -> None:
    answer = re.search(r"gradsurgeon run (--\w+)`", hint_on(action="zero", mode="observe"))
    assert answer is not None
    # A command without this option would end the process here.
    assert command.parsed([answer[1], "train.py"])


GUESSES = json.loads((Path(__file__).parents[1] / "cases/guesses.json").read_text("utf-8"))


@pytest.mark.parametrize("guess", GUESSES, ids=lambda guess: json.dumps(guess["rule"]))
def test_a_guess_gets_the_form_that_works(guess: dict[str, Any]) -> None:
    """Each is what somebody who knows the field and not the rules has written."""
    entry = {"id": "it", "params": "*", **guess["rule"]}
    entry = {key: value for key, value in entry.items() if value is not None}
    rule, flaws = check_rule(entry)
    assert rule is None
    answers = [flaw.hint for flaw in flaws]
    assert any(answer.startswith(guess["answer"]) for answer in answers), answers


def test_there_are_as_many_guesses_as_were_collected() -> None:
    assert len(GUESSES) == 87
    words = [json.dumps(guess["rule"]) for guess in GUESSES]
    assert len(set(words)) == 87


def test_every_form_is_a_part_of_a_rule() -> None:
    for table in (_synonyms._ACTIONS, _synonyms._KEYS, _synonyms._VALUES):
        for form in set(table.values()):
            if form.startswith("no ") or ", or " in form:
                continue
            options = yaml.safe_load(f"{{{form}}}")
            rule = _whole({**_around(options), **options})
            if options.get("tensor", "").startswith(("input", "output")):
                rule = {"action": "zero", "modules": "*", **rule}
            if "modules" in rule:
                rule["params"] = None
                rule.setdefault("tensor", "output")
            found, flaws = check_rule({key: v for key, v in rule.items() if v is not None})
            assert found is not None, (form, flaws)


def _whole(form: dict[str, Any]) -> dict[str, Any]:
    """Return a form as a rule, on all parameters if it has no target."""
    target = {"params": "*"} if {"tensors", "modules"}.isdisjoint(form) else {}
    return {"id": "it", **target, **form}


def _around(options: dict[str, Any]) -> dict[str, Any]:
    """Return an action that takes some options, and what it needs besides."""
    if "action" in options:
        return {}
    action = "spike-trap" if "above" in options else "norm-log"
    for key, of_action in OF_ACTION.items():
        if key in options:
            action = of_action
    return {"action": action, **NEEDED.get(action, {})}


OF_ACTION = {
    "min": "clamp",
    "max": "clamp",
    "factor": "scale",
    "std": "noise",
    "decay": "noise",
    "rows": "mask",
    "file": "mask",
    "max_norm": "clip-norm",
    "per": "clip-norm",
    "norm_type": "clip-norm",
    "then": "nan-trap",
    "give_up_after": "nan-trap",
}
NEEDED: dict[str, dict[str, Any]] = {
    "clamp": {"at": "step"},
    "noise": {"std": 1},
    "clip-norm": {"max_norm": 1},
}
