"""What a change of rules does: found in the rules and the names of a model alone, without torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ranks import Json

import gradsurgeon
from gradsurgeon.cli.review import sources, text
from gradsurgeon.cli.review.difference import Difference, compare
from gradsurgeon.language import planning
from gradsurgeon.language.planning import Manifest, ModuleEntry, Param
from gradsurgeon.language.schema import RuleSet

CASES = Path(__file__).parents[1] / "cases" / "review"
KINDS = ("attn", "mlp")


def manifest(*names: str, layers: int = 3) -> Manifest:
    known = names or (
        "embed.weight",
        *(f"h.{at}.{kind}.weight" for at in range(layers) for kind in KINDS),
        "head.weight",
    )
    return Manifest(
        "Net",
        tuple(Param(name, (), (2, 3), "float32", True, ("Linear", "Module")) for name in known),
        (ModuleEntry(".", (), ("Net", "Module")), ModuleEntry("conv1", (), ("Conv2d", "Module"))),
        ("Net", "Module"),
    )


def zero(rule_id: str = "it", params: str = "h.*", **options: Any) -> Json:
    return {"id": rule_id, "action": "zero", "params": params, **options}


def clamp(rule_id: str = "it", **options: Any) -> Json:
    return {"id": rule_id, "action": "clamp", "params": "h.*", "at": "step", **options}


def load(*rules: Json) -> RuleSet:
    return gradsurgeon.load({"version": 1, "rules": list(rules)})


def diff(old: list[Json], new: list[Json]) -> Difference:
    return compare(load(*old), load(*new), manifest())


NORMS = {"id": "norms", "action": "norm-log", "params": "*"}
TRAP = {"id": "trap", "action": "nan-trap", "params": "*"}


class TestRules:
    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (zero(), zero(at="backward", steps={"from": 0, "every": 1}, optional=False)),
            (zero(), zero(tensor="grad")),
            (zero(params="h.*"), {**zero(), "params": ["h.*"]}),
            ({**zero(), "params": ["a", "h.*"]}, {**zero(), "params": ["h.*", "a", "a"]}),
            (zero(exclude=["*.b", "*.c"]), zero(exclude=["*.c", "*.b"])),
            (zero(where={"dtype": "float32"}), zero(where={"dtype": "torch.float32"})),
            (clamp(min=-1), clamp(min=-1.0)),
            ({**NORMS, "stats": ["l1", "l2"]}, {**NORMS, "stats": ["l2", "l1"]}),
            (TRAP, {**TRAP, "then": "raise", "give_up_after": 10}),
        ],
    )
    def test_what_means_the_same_is_no_difference(self, old: Any, new: Any) -> None:
        found = diff([old], [new])
        assert not found.in_effect
        assert found.changed == ()

    def test_another_action_under_the_same_id(self) -> None:
        found = diff([clamp(min=-1.0)], [{**zero(), "at": "step"}])
        (change,) = found.changed
        assert [(one.name, one.before, one.after) for one in change.options] == [
            ("action", "clamp", "zero"),
            ("min", -1.0, None),
        ]


def clip(**options: Any) -> Json:
    return {"id": "it", "action": "clip-norm", "params": "*", "max_norm": 1.0, **options}


@pytest.mark.parametrize(
    ("old", "new", "option"),
    [
        (clamp(max=1), clamp(max=1, min=0), "min"),
        (clip(), clip(max_norm=0.5), "max_norm"),
        (clip(), clip(per="rule"), "per"),
        (TRAP, {**TRAP, "then": "warn"}, "then"),
        (zero(), zero(steps={"from": 0, "to": 100}), "steps"),
        (zero(), zero(optional=True), "optional"),
        (zero(), zero(expect={"params": 6}), "expect"),
        (zero(at="step"), zero(), "at"),
    ],
)
def test_changed_options(old: Any, new: Any, option: str) -> None:
    found = diff([old], [new])
    names = [one.name for change in found.changed for one in change.options]
    assert names == [option]


def test_a_rule_under_another_id_is_another_rule() -> None:
    # Records go by ids.
    found = diff([zero("before")], [zero("after")])
    assert [one.id for one in found.removed] == ["before"]
    assert [one.id for one in found.added] == ["after"]


class TestOrder:
    def test_an_order_that_tensors_see(self) -> None:
        first, second = (
            zero("first"),
            {"id": "second", "action": "scale", "params": "*", "factor": 2},
        )
        found = diff([first, second], [second, first])
        assert found.order_changed
        assert len(found.params) == 6
        assert found.in_effect

    def test_an_order_that_none_sees_is_no_difference_in_effect(self) -> None:
        old = [zero("first", params="head.*"), zero("second")]
        found = diff(old, old[::-1])
        assert found.order_changed
        assert not found.in_effect
        assert "note: the rules are in another order in the file" in text.render(found)


def kinds(found: Difference) -> list[str]:
    return [one.kind for _, one in found.obstacles]


class TestFindings:
    def test_protection_is_lost(self) -> None:
        found = diff([NORMS, TRAP], [NORMS, {**TRAP, "params": "h.*"}])
        assert found.lost == ("embed.weight", "head.weight")
        assert found.covered == (8, 8)
        assert "warning: 2 parameters lost all protection" in text.render(found)

    @pytest.mark.parametrize(
        "other", [TRAP, zero(), {"id": "it", "action": "freeze", "params": "*"}]
    )
    def test_another_protection_is_protection(self, other: Any) -> None:
        assert diff([clamp("gone", min=0)], [other]).lost == ()
        assert len(diff([other], [NORMS]).lost) >= 6

    def test_a_trap_that_other_rules_outlive_leaves_the_chains(self) -> None:
        edit = zero("z", params="*")
        found = diff([edit, TRAP], [edit, {**TRAP, "params": "h.*"}])
        assert found.lost == ()
        lines = text.render(found).splitlines()
        at = lines.index("  embed.weight, head.weight")
        assert {"z", "trap"} == set(lines[at + 1].partition("before:")[2].split()) - {"->"}
        assert lines[at + 2].split() == ["now:", "z"]

    def test_a_trap_that_only_warns_now_is_a_changed_option(self) -> None:
        found = diff([{**TRAP, "then": "skip-step"}], [{**TRAP, "then": "warn"}])
        assert "      then: skip-step -> warn" in text.render(found).splitlines()
        number = len(found.untrapped)
        assert number == found.covered[0] > 6
        told = f"warning: no trap stops or skips a step of {number} parameters any more: "
        assert any(line.startswith(told) for line in text.render(found).splitlines())
        assert f"! {told}" in text.markdown(found)

    def test_a_trap_that_others_outlive_is_told_by_name(self) -> None:
        edit, other = zero("z", params="*"), {**TRAP, "id": "other", "params": "head.*"}
        found = diff([edit, TRAP], [edit, {**TRAP, "params": "h.*"}, other])
        assert (found.lost, found.untrapped) == ((), ("embed.weight",))
        assert found.to_dict()["lost_trap"] == ("embed.weight",)
        # What lost all protection is said once.
        gone = diff([TRAP], [{**TRAP, "params": "h.*"}])
        assert (gone.lost, gone.untrapped) == (("embed.weight", "head.weight"), ())

    def test_nothing_is_matched(self) -> None:
        found = diff([zero()], [zero(params="layers.*")])
        assert kinds(found) == ["no-match"]
        assert '"layers.*"' in found.obstacles[0][1].text

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (zero(params="layers.*"), zero(params="blocks.*")),
            (zero(params="layers.*"), zero(params="blocks.*", optional=True)),
            (NORMS, {**NORMS, "params": "x", "model": "Other"}),
        ],
    )
    def test_what_was_so_before_or_is_meant_is_no_finding(self, old: Any, new: Any) -> None:
        assert kinds(diff([old], [new])) == []

    def test_expectations(self) -> None:
        good, bad = zero(expect={"params": 6}), zero(params="h.0.*", expect={"params": 6})
        assert kinds(diff([good], [bad])) == ["expect"]
        assert kinds(diff([bad], [{**bad, "at": "step"}])) == []
        assert kinds(diff([bad], [good])) == []
        ((_, finding),) = diff([good], [bad]).obstacles
        assert finding.text == "expected 6 parameters, matched 2 (h.0.attn.weight, h.0.mlp.weight)"

    def test_what_cannot_act(self) -> None:
        whole = manifest()
        lazy = Manifest("Net", (Param("h.0", (), None, "float32", True, ("Linear",)),))
        assert kinds(compare(load(NORMS), load(NORMS, zero()), lazy)) == ["cannot-act"]
        assert kinds(compare(load(zero()), load(zero(at="step")), lazy)) == []
        assert kinds(compare(load(NORMS), load(NORMS, zero()), whole)) == []

    def test_conditions_on_what_the_names_do_not_tell(self) -> None:
        weights = Manifest("w", (Param("h.0", (), (2,), "float32", True, ()),))
        asked = zero(where={"module_type": "Linear"})
        ((_, finding),) = compare(load(NORMS), load(NORMS, asked), weights).obstacles
        assert finding.kind == "cannot-act"
        assert "module_type" in finding.text


SIDE: list[Json] = [
    zero("late", at="step"),
    zero("early"),
    {"id": "out", "action": "zero", "modules": "conv*", "tensor": "output.grad"},
    {"id": "value", "action": "capture", "modules": ["conv1", "."], "tensor": "output"},
    {"id": "tags", "action": "norm-log", "tensors": ["hidden", "other"]},
    {**TRAP, "exclude": ["h.1.*"]},
]


def test_chains_are_those_of_the_plan() -> None:
    rules = load(*SIDE)
    chains = planning.bind(rules, manifest()).chains
    found = compare(load({**NORMS, "params": "embed.weight"}), rules, manifest())
    now = {one.name: one.after for one in (*found.params, *found.tensors)}
    assert now == chains
    assert {one.name for one in found.tensors} == {name for name in chains if " " in name}


def test_included_or_inline_is_no_difference(tmp_path: Path) -> None:
    rule = '  - {id: it, action: zero, params: "h.*"}\n'
    last = '  - {id: norms, action: norm-log, params: "*"}\n'
    (tmp_path / "part.yaml").write_text(f"version: 1\nrules:\n{rule}")
    (tmp_path / "old.yaml").write_text(f"version: 1\nrules:\n{rule}{last}")
    (tmp_path / "new.yaml").write_text(f"version: 1\ninclude: [part.yaml]\nrules:\n{last}")
    old, new = (gradsurgeon.load(tmp_path / f"{name}.yaml") for name in ("old", "new"))
    assert not compare(old, new, manifest()).in_effect


# --- how it is written ----------------------------------------------------------------------------


HOSTILE = (
    "re:(a|b`c\\|</table><script>@everyone #1 &lt; https://x.y)?",
    "@team",
    "a`b``c",
    "<!-- x -->",
    "x|y",
    " *bold* ",
    "`",
    "\u202e\x1b[31mred\n- [x] done\r\n```",
)


class TestMarkdown:
    @pytest.mark.parametrize("hostile", HOSTILE)
    def test_users_write_nothing_outside_of_the_block(self, hostile: str) -> None:
        names = Manifest(hostile, (Param(hostile, (), (2,), "float32", True, ("Linear",)),))
        old = {**zero("a"), "params": "?*"}
        # What a file could hold that YAML lets through; patterns are refused for less.
        pattern = hostile if hostile.startswith("re:") else "re:" + re.escape(hostile)
        if any(char in hostile for char in "\n\x1b"):
            pattern = "*done*"
        new = RuleSet(load({**old, "params": pattern}, zero("b", "*")).rules, file=hostile)
        found = compare(load(old), new, names)
        head, blank, begin, *block, end = text.markdown(found).splitlines()
        assert re.fullmatch(r"[\w *:;,.>-]+", head)
        assert (blank, begin) == ("", f"{end}diff")
        assert re.fullmatch("`{3,}", end)
        assert not any(end in line for line in block)
        assert [re.sub("^[!~] ?", "", line) for line in block] == [
            re.sub("^[!~] ?", "", line) for line in text.render(found).split("\n")
        ]

    def test_no_difference_says_so(self) -> None:
        assert "no difference in effect" in text.markdown(diff([NORMS], [NORMS]))


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

    def test_names_of_losses_are_escaped(self) -> None:
        old = {"id": "it", "action": "combine", "params": "*", "method": "mgda"}
        before, after = (load({**old, "losses": ["a", one]}) for one in ("b", "<img src=x>\x1b[2J"))
        shown = compare(before, after, manifest())
        assert "\x1b" not in text.render(shown)

    def test_a_clip_that_goes_leaves_what_combine_still_changes(self) -> None:
        surgery = {
            "id": "it",
            "action": "combine",
            "params": "h.*",
            "method": "mgda",
            "losses": ["a", "b"],
        }
        assert diff([surgery, clamp("bound", max=1)], [surgery]).lost == ()
        assert len(diff([surgery], [NORMS]).lost) == 6
