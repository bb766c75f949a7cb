"""Patterns: what they match, what is refused, and what is suggested instead."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from bounds import within
from pairs import slow

from gradsurgeon.common.match import (
    PatternError,
    compile_pattern,
    nearest,
    select,
    suggest,
)

# Which pattern matches which name; what is refused, with message and hint; what is allowed, and fast on all names.
CASES = json.loads(Path(__file__).parents[1].joinpath("cases", "patterns.json").read_text())
KINDS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up", "mlp.down", "input_layernorm")
NAMES = [
    "embed.weight",
    *(
        f"model.layers.{i}.{kind}.{leaf}"
        for i in range(12)
        for kind in KINDS
        for leaf in ("weight", "bias")
    ),
    "head.weight",
]


@pytest.mark.parametrize(("text", "name", "expected"), CASES["matches"])
def test_matching(text: str, name: str, expected: bool) -> None:
    pattern = compile_pattern(text)
    assert pattern.matches(name) is expected
    assert select([pattern], [name]) == ([0] if expected else [])


@pytest.mark.parametrize(("text", "message", "hint"), CASES["refused"])
def test_what_is_refused_at_once(text: str, message: str, hint: str) -> None:
    with within(0.2), pytest.raises(PatternError, match=r".") as raised:
        compile_pattern(text)
    assert message in raised.value.message
    assert hint in raised.value.hint
    assert str(raised.value).startswith(raised.value.message)


@pytest.mark.parametrize("text", CASES["allowed"])
def test_what_is_allowed_is_fast_on_the_worst_names(text: str) -> None:
    pattern = compile_pattern(text)
    with within(0.5):
        for name in (
            "a" * 200,
            "a." * 100,
            "1" * 200,
            "1." * 100 + "x",
            "ab" * 100 + "!",
            "x" * 499 + "y",
        ):
            pattern.matches(name)


@pytest.mark.parametrize("text", CASES["never_slow"])
def test_no_name_makes_an_expression_slow(text: str) -> None:
    pattern = compile_pattern(text)
    for piece in ("a", "a.", "1.", "attn.q_proj.", "layers.1.attn.", "x.a.b."):
        for length in (100, 200, 300):
            with within(0.3):
                pattern.matches((piece * length)[:length])


def test_patterns_are_values() -> None:
    assert compile_pattern("a.*") == compile_pattern("a.*")
    assert compile_pattern("a.*") != compile_pattern("b.*")
    assert len({compile_pattern("a.*"), compile_pattern("a.*")}) == 1
    assert repr(compile_pattern("a.*")) == "Pattern(text='a.*')"
    for text in ("a.*", "re:a.*"):
        assert pickle.loads(pickle.dumps(compile_pattern(text))) == compile_pattern(text)


def test_literals() -> None:
    literal = [
        text
        for text in ("a.b", ".", "a*", "a?", "[a]", "{a,b}", "re:a")
        if compile_pattern(text).is_literal
    ]
    assert literal == ["a.b", "."]


def test_select_gives_each_index_once_and_in_order() -> None:
    names = ["c.w", "a.w", "b.b", "a.b"]
    patterns = [compile_pattern(text) for text in ("a.*", "*.b", "a.w")]
    assert select(patterns, names) == [1, 2, 3]
    assert select([], names) == []
    assert select(patterns, []) == []


def big_model() -> list[str]:
    return [
        f"model.layers.{i}.{kind}.{leaf}"
        for i in range(1_000)
        for kind in KINDS
        for leaf in ("weight", "bias")
    ]


def test_selecting_from_a_big_model_is_fast() -> None:
    texts = ["*.weight", "*.layers.{0..5}.*", "*q_proj*", "*.decoder.*.bias"]
    texts += ["*.{mlp,self_attn}.*", r"re:.*\.layers\.\d+\.mlp\..*", "[!m]*", "model.*.up.?eight"]
    patterns = [compile_pattern(text) for text in texts * 2]
    names = big_model()
    with within(0.3):
        found = select(patterns, names)
    assert len(found) > 5_000


@pytest.mark.parametrize(("text", "names", "hint"), CASES["suggestions"])
def test_suggestions(text: str, names: str | list[str], hint: str) -> None:
    assert suggest(text, NAMES if names == "layers" else list(names)) == hint


def test_nearest_folds_numbers() -> None:
    assert nearest("model.layer.*.mlp.up.weight", NAMES, 1) == ["model.layers.*.mlp.up.weight"]
    assert nearest("haed.weight", NAMES, 1) == ["head.weight"]
    assert nearest("x" * 500, NAMES) == []
    assert nearest("a", []) == []


@pytest.mark.parametrize(
    "text", ["q_porj", *slow("*.layer.3.self_atn.q_porj.weigth", "zzzz", "w" * 500)]
)
def test_suggestions_for_a_big_model_are_fast(text: str) -> None:
    names = big_model()
    unlike = [f"{hash(name):x}.{name[::-1]}.{index}x" for index, name in enumerate(names)]
    for each in (names, unlike):
        with within(0.8):
            suggest(text, each)
            nearest(text, each)


def test_neither_torch_nor_pydantic_is_imported() -> None:
    code = "import sys, types, importlib.util as u; "
    code += "p = types.ModuleType('gradsurgeon'); p.__path__ = [sys.argv[1]]; sys.modules['gradsurgeon'] = p; "
    code += "import gradsurgeon.common.match, gradsurgeon.language.source; "
    code += "print([name for name in ('torch', 'pydantic', 'numpy') if name in sys.modules])"
    folder = compile_pattern.__wrapped__.__code__.co_filename.rsplit("/", 2)[0]
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
