"""What a change of rules does: found in the rules and the names of a model alone, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import json_forms
import plan_cases
import pytest
import report_cases
from ranks import Json

import gradsurgeon
from gradsurgeon.cli.review import sources, text
from gradsurgeon.cli.review.difference import Difference, compare
from gradsurgeon.language import planning
from gradsurgeon.language.planning import Manifest, Param
from gradsurgeon.language.schema import RuleSet
from gradsurgeon.report.evidence import words
from gradsurgeon.report.evidence.told import Strongest, Thresholds, Told

CASES = Path(__file__).parents[1] / "cases" / "review"
CHANGES: Any = report_cases.read(CASES / "changes.yaml")
BLOCKS = [f"h.{at}.{kind}.weight" for at in range(3) for kind in ("attn", "mlp")]
MANIFEST = plan_cases.named({"params": ["embed.weight", *BLOCKS, "head.weight"]})
NORMS = {"id": "norms", "action": "norm-log", "params": "*"}


def zero(**options: Any) -> Json:
    return {"id": "it", "action": "zero", "params": "h.*", **options}


def load(*rules: Json) -> RuleSet:
    return gradsurgeon.load({"version": 1, "rules": list(rules)})


def kinds(found: Difference) -> list[str]:
    return [one.kind for _, one in found.obstacles]


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case["is"])
def test_a_change_is_told_as_in_the_case(case: Json) -> None:
    found = compare(load(*case["old"]), load(*case["new"]), MANIFEST)
    assert text.render(found) == case["text"].rstrip("\n")


def test_what_cannot_act() -> None:
    whole = MANIFEST
    lazy = Manifest("Net", (Param("h.0", (), None, "float32", True, ("Linear",)),))
    assert kinds(compare(load(NORMS), load(NORMS, zero()), lazy)) == ["cannot-act"]
    assert kinds(compare(load(zero()), load(zero(at="step")), lazy)) == []
    assert kinds(compare(load(NORMS), load(NORMS, zero()), whole)) == []


def test_conditions_on_what_the_names_do_not_tell() -> None:
    weights = Manifest("w", (Param("h.0", (), (2,), "float32", True, ()),))
    asked = zero(where={"module_type": "Linear"})
    ((_, finding),) = compare(load(NORMS), load(NORMS, asked), weights).obstacles
    assert finding.kind == "cannot-act"
    assert "module_type" in finding.text


def test_included_or_inline_is_no_difference(tmp_path: Path) -> None:
    rule = '  - {id: it, action: zero, params: "h.*"}\n'
    last = '  - {id: norms, action: norm-log, params: "*"}\n'
    (tmp_path / "part.yaml").write_text(f"version: 1\nrules:\n{rule}")
    (tmp_path / "old.yaml").write_text(f"version: 1\nrules:\n{rule}{last}")
    (tmp_path / "new.yaml").write_text(f"version: 1\ninclude: [part.yaml]\nrules:\n{last}")
    old, new = (gradsurgeon.load(tmp_path / f"{name}.yaml") for name in ("old", "new"))
    assert not compare(old, new, MANIFEST).in_effect


class TestLosses:
    """``cases/review/losses`` holds two files with rules on losses and what a review says of them."""

    FOLDER = CASES / "losses"

    def found(self) -> Difference:
        old, new = (gradsurgeon.load(self.FOLDER / f"{side}.yaml") for side in ("old", "new"))
        return compare(old, new, sources.manifest_of(str(self.FOLDER / "params.json")))

    @pytest.mark.parametrize("form", ["txt", "md"])
    def test_as_it_is_shown(self, form: str) -> None:
        render = {"txt": text.render, "md": text.markdown}[form]
        expected = (self.FOLDER / f"expected.{form}").read_text(encoding="utf-8")
        # The names of the files are those that the reader was given.
        assert render(self.found()).replace(f"{self.FOLDER}/", "").strip() == expected.strip()


def test_the_reference_names_every_key() -> None:
    old = {"id": "old", "action": "nan-trap", "params": "*"}
    new = {"id": "new", "action": "nan-trap", "params": "*", "steps": {"to": 5}}
    found = compare(load(old, zero(), NORMS), load(NORMS, new, zero(id="other")), MANIFEST)
    told = Told("run", thresholds=(Thresholds("all", (1.0,) * 5, (0,) * 5, 1),))
    forms = [planning.bind(load(NORMS), MANIFEST).to_dict(), told.to_dict(), found.to_dict()]
    forms.append(Strongest("h.0", 1, 2.0)._asdict())
    named = {*re.findall("`([a-z_]+)`", json_forms.TEXT)}
    assert {key for form in forms for key in keys(form)} <= named


def test_a_side_that_is_told_stays_told_beside_one_that_is_not() -> None:
    known = Told("run", steps=200, acts=188)
    unknown = Told("run", missing="why")
    untold = "not told by its records: why"
    acts = "acts in 94 % of 200 recorded steps"
    assert words.change(known, unknown) == f"on run: {acts} -> {untold}"
    assert words.change(unknown, known) == f"on run: {untold} -> {acts}"
    assert words.change(unknown, unknown) == f"on run: {untold}"
    unknown = Told("run", missing="why", is_rounded=True, is_of_one_rank=True)
    assert words.change(unknown, None) == f"on run: {untold}"
    assert not any("rank 0" in line for line in words.table({"it": unknown}))


def test_numbers_of_one_rank_say_so() -> None:
    told = Told("run", steps=200, acts=188, is_of_one_rank=True)
    assert words.change(told, None).endswith("94 % of 200 recorded steps (on rank 0)")
    *_, remark, _ = words.table({"clip": told})
    assert remark.startswith("  clip: counted on rank 0 alone")


def test_a_gradient_that_is_touched_now() -> None:
    before = Told("run", steps=10, bites=True)
    after = Told("run", steps=10, bites=True, acts=1, largest=Strongest("h.0", 1, 2.5))
    gradient = "the largest gradient is"
    assert words.change(before, after).endswith(f"{gradient} not touched -> divided by 2.5")
    assert words.change(after, before).endswith(f"{gradient} divided by 2.5 -> not touched")
    assert words.change(after, after).endswith(f"{gradient} divided by 2.5 -> 2.5")


def keys(form: Any) -> Iterator[str]:
    """Yield the keys of a form that are neither names of tensors nor values of options."""
    if isinstance(form, dict):
        for key, value in form.items():
            yield key
            if key not in ("chains", "fields"):
                yield from keys(value)
    elif isinstance(form, list | tuple):
        for value in form:
            yield from keys(value)
