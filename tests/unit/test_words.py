"""Words that people write from habit lead to the form that means the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from small import rule_file

import gradsurgeon

# What a person writes, and what each form must be.
ACTIONS = {
    "clip clip_grad clip-gradient clip_grad_norm clip_grad_norm_ clip_by_global_norm max_grad_norm gradient_clipping": "clip-norm",
    "clip_by_norm clip-per-parameter": "clip-norm",
    "clip_value clip_grad_value_ clip_by_value clamp_grad": "clamp",
    "autoclip zclip AdaGC clip-spikes": "spike-trap",
    "nan_to_num nan2num replace-nan fill_nan": "sanitize",
    "detect-anomaly detect_anomaly anomaly check_nan nan-guard isnan terminate_on_nan": "nan-trap",
    "skip skip_step skip-nan": "nan-trap",
    "gradient-reversal grad_reversal GRL reverse negate": "scale",
    "multiply mul scale_grad lr_scale lr_mult gradient_multiplier": "scale",
    "detach stop_gradient no_grad zero_grad": "zero",
    "unfreeze requires_grad lock": "freeze",
    "lottery-mask mask-rows prune gradient_mask freeze-rows": "mask",
    "watch log log_norm grad-norm grad_norm gradient-norm monitor track_grad_norm plot_grad_flow record": "norm-log",
    "histogram hist": "norm-log",
    "add-noise gradient_noise annealed-noise gaussian_noise": "noise",
    "gradient-centralization gc center": "centralize",
    "pcgrad CAGrad gradient-surgery": "combine",
    "save cache dump retain_grad hook": "capture",
}
WORDS = [(word, action) for words, action in ACTIONS.items() for word in words.split()]
KEYS = {
    "name": "id",
    "every": "steps",
    "interval": "steps",
    "freq": "steps",
    "log_every": "steps",
    "until": "steps",
    "after": "steps",
    "start": "steps",
    "warmup_steps": "steps",
    "module_type": "where",
    "type": "where",
    "layers": "modules",
    "weights": "params",
    "pattern": "params",
    "ignore": "exclude",
    "statistics": "stats",
    "metrics": "stats",
    "moment": "at",
}


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
    gradsurgeon.load(rule_file({"id": "it", "params": "*", **form}))


@pytest.mark.parametrize(("word", "key"), KEYS.items())
def test_a_word_for_a_key_gets_the_form(word: str, key: str) -> None:
    rule: dict[str, Any] = {"id": "it", "action": "norm-log", "params": "*", word: 10}
    rule.pop(key, None)
    with pytest.raises(gradsurgeon.RuleFileError) as refused:
        gradsurgeon.load({"version": 1, "rules": [rule]})
    assert [*form_in(str(refused.value))] == [key]


def test_values_from_habit() -> None:
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
    gradsurgeon.load(rule_file({"action": "mask", "params": "emb.weight", "rows": ":15"}))
