"""What is told of a difference: its chains, its JSON, its Markdown and its text, with all that users wrote in it inert."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from unit.test_difference import KINDS, NORMS, TRAP, clamp, diff, load, manifest, zero

import gradsurgeon
from gradsurgeon import planning
from gradsurgeon.planning import Manifest, Param
from gradsurgeon.review import markdown, sources, text
from gradsurgeon.review.difference import Difference, compare
from gradsurgeon.review.folding import fold
from gradsurgeon.schema import RuleSet

CASES = pathlib.Path(__file__).parents[1] / "cases" / "review"

SIDE: list[dict[str, Any]] = [
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


def test_included_or_inline_is_no_difference(tmp_path: pathlib.Path) -> None:
    rule = '  - {id: it, action: zero, params: "h.*"}\n'
    last = '  - {id: norms, action: norm-log, params: "*"}\n'
    (tmp_path / "part.yaml").write_text(f"version: 1\nrules:\n{rule}")
    (tmp_path / "old.yaml").write_text(f"version: 1\nrules:\n{rule}{last}")
    (tmp_path / "new.yaml").write_text(f"version: 1\ninclude: [part.yaml]\nrules:\n{last}")
    old, new = (gradsurgeon.load(tmp_path / f"{name}.yaml") for name in ("old", "new"))
    assert not compare(old, new, manifest()).in_effect


def test_the_documented_json() -> None:
    """`design.md` and tools go by these keys: a change here breaks them."""
    found = diff(
        [clamp("bound", min=-1.0), zero("gone", params="head.*"), {**NORMS, "params": "h.0.*"}],
        [
            clamp("bound", min=0.0, exclude=["h.{0..1}.*"]),
            {"id": "out", "action": "zero", "modules": "conv*", "tensor": "output"},
            {**NORMS, "id": "sizes", "params": "h.0.*"},
        ],
    )
    first = [f"h.{at}.{kind}.weight" for at in range(2) for kind in KINDS]
    last = ["h.2.attn.weight", "h.2.mlp.weight"]
    same = {"before": ["bound"], "after": []}
    zeroth = {"before": ["norms", "bound"], "after": ["sizes"]}
    assert found.to_dict() == {
        "version": 1,
        "added": [
            {
                "id": "out",
                "action": "zero",
                "target": "modules",
                "params": [],
                "modules": ["conv1"],
                "elements": 0,
            }
        ],
        "removed": [
            {
                "id": "gone",
                "action": "zero",
                "target": "params",
                "params": ["head.weight"],
                "modules": [],
                "elements": 6,
            }
        ],
        "changed": [
            {
                "id": "bound",
                "action": "clamp",
                "target": "params",
                "was": "bound",
                "fields": [
                    {"name": "min", "before": -1.0, "after": 0.0, "word": "tightened", "why": ""},
                    {
                        "name": "exclude",
                        "before": [],
                        "after": ["h.{0..1}.*"],
                        "word": "changed",
                        "why": "",
                    },
                ],
                "params_before": first + last,
                "params_after": last,
                "elements_before": 36,
                "elements_after": 12,
            }
        ],
        "renamed": [
            {
                "id": "sizes",
                "action": "norm-log",
                "target": "params",
                "was": "norms",
                "fields": [],
                "params_before": first[:2],
                "params_after": first[:2],
                "elements_before": 12,
                "elements_after": 12,
            }
        ],
        "order_changed": False,
        "order": {"before": ["bound", "sizes"], "after": ["bound", "sizes"]},
        "params": [
            *({"name": name, **zeroth} for name in first[:2]),
            *({"name": name, **same} for name in first[2:]),
            {"name": "head.weight", "before": ["gone"], "after": []},
        ],
        "tensors": [{"name": "conv1 output", "before": [], "after": ["out"]}],
        "lost_protection": [*first, "head.weight"],
        "covered": {"before": 7, "after": 4},
        "model": {"params": 8, "elements": 48},
        "warnings": [
            {
                "kind": "lost-protection",
                "rules": [],
                "names": [*first, "head.weight"],
                "detail": "",
            }
        ],
        "in_effect": True,
    }


# --- how it is written ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], {}),
        (["head"], {"head": 1}),
        ([f"h.{at}.w" for at in range(12)], {"h.{0..11}.w": 12}),
        (["h.0.w", "h.2.w", "h.3.w"], {"h.{0,2,3}.w": 3}),
        (["h.7.w", "h.1.w"], {"h.{1,7}.w": 2}),
        ([f"h.{a}.{b}" for a in range(3) for b in range(4)], {"h.{0..2}.{0..3}": 12}),
        (["h.0.1", "h.1.0"], {"h.0.1": 1, "h.1.0": 1}),
        (["h.0.0", "h.0.1", "h.1.0"], {"h.{0,1}.0": 2, "h.0.1": 1}),
        (["h.1", "h.01"], {"h.{1,01}": 2}),
        (["h." + "9" * 5000], {"h." + "9" * 5000: 1}),
        ([f"h.{at}" for at in range(0, 40, 2)], {"h.{0,2,4,6,8,10,...}": 20}),
    ],
)
def test_fold(names: list[str], folded: dict[str, int]) -> None:
    assert fold(names) == folded
    assert sum(fold(names).values()) == len(names)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Difference:
    monkeypatch.chdir(CASES)
    old, new = sources.rules_at("old.yaml"), sources.rules_at("new.yaml")
    return compare(old, new, sources.manifest_of("params.json"))


HOSTILE = (
    "re:(a|b`c\\|</table><script>@everyone #1 &lt; https://x.y)?",
    "@team",
    "a`b``c",
    "<!-- x -->",
    "x|y",
    " *bold* ",
    "\u202e\x1b[31mred\n- [x] done\r\n```",
    "`",
)


def outside_code(line: str) -> str:
    return re.sub(r"`[^`]*`|<code>[A-Za-z0-9&#;]*</code>", "", line)


class TestMarkdown:
    @pytest.mark.parametrize("hostile", HOSTILE)
    def test_users_write_nothing_outside_of_code(self, hostile: str) -> None:
        names = Manifest(hostile, (Param(hostile, (), (2,), "float32", True, ("Linear",)),))
        old = {**zero("a"), "params": "?*"}
        # What a file could hold that YAML lets through; patterns are refused for less.
        pattern = hostile if hostile.startswith("re:") else "re:" + re.escape(hostile)
        if any(char in hostile for char in "\n\x1b"):
            pattern = "*done*"
        new = RuleSet(load({**old, "params": pattern}, zero("b", "*")).rules, file=hostile)
        written = markdown.render(compare(load(old), new, names))
        marker, *lines = written.splitlines()
        assert re.fullmatch(r"<!-- gradsurgeon:diff [\w./%:~-]+ -->", marker)
        assert marker.count("--") == 2
        for line in lines:
            ours = outside_code(line)
            assert not set("`@#\x1b\u202e&") & set(ours)
            assert not re.search(r"everyone|team|script|bold|red|https", ours)
            if line.startswith("|"):
                assert len(re.findall(r"\|", line)) in (4, 7)
        assert len(lines) == written.count("\n") - 1

    @pytest.mark.parametrize("text", ["", " ", "x", "a b", "a|b", "`", "\n", "x" * 5000])
    def test_code_is_one_piece(self, text: str) -> None:
        written = markdown.code(text)
        assert outside_code(written).strip("…") == ""
        assert len(written) < 3000
        assert "|" not in written

    def test_it_is_cut_where_comments_end(self) -> None:
        names = manifest(layers=2000)
        words = [f"{a}-{b}" for a in "abcdefghij" for b in range(60)]
        old = [zero(word, params=f"h.{at}.*") for at, word in enumerate(words)]
        new = [zero(word, params=f"h.{at}.attn.*") for at, word in enumerate(words)]
        written = markdown.render(compare(load(*old), load(*new), names))
        assert 55_000 < len(written) <= markdown.LIMIT
        assert "Cut here" in written.splitlines()[-1]
        few = markdown.render(compare(load(*old[:60]), load(*new[:60]), names), limit=13_000)
        assert len(few) <= 13_000
        assert few.count("<details>") == few.count("</details>") == 1

    def test_no_difference_has_a_marker_and_says_so(self) -> None:
        written = markdown.render(diff([NORMS], [NORMS]))
        assert written.startswith("<!-- gradsurgeon:diff ")
        assert "no difference in effect" in written
        assert "|" not in written

    def test_the_worked_example(self, example: Difference) -> None:
        lines = markdown.render(example).splitlines()
        assert lines[1] == (
            "**What the change of `new.yaml` does: 2 added, 1 removed, 2 changed; "
            "51 → 48 of 51 parameters under rules; 3 lost all protection.**"
        )


class TestText:
    def test_the_worked_example(self, example: Difference) -> None:
        lines = text.render(example).splitlines()
        assert lines[1] == (
            "2 added, 1 removed, 2 changed; 51 -> 48 of 51 parameters under rules; "
            "3 lost all protection"
        )
        signs = [line.split()[:2] for line in lines if line[:2] in ("+ ", "- ", "~ ", "= ")]
        assert signs == [
            ["+", "clipped-outputs"],
            ["+", "steady-gates"],
            ["-", "slow-embedding"],
            ["~", "trap"],
            ["~", "bounded-attention"],
            ["=", "norms"],
        ]
        assert "      max: 1.0 -> 0.5 (tightened)" in lines

    def test_control_codes_are_shown(self) -> None:
        names = manifest("h.\x1b[31m\u202ered\r\n.weight")
        written = text.render(compare(load(NORMS), load(NORMS, zero()), names))
        assert "\x1b" not in written
        assert "\u202e" not in written
        assert "\r" not in written
        assert "\\x1b[31m" in written
