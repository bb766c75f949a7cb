"""Patterns: what they match, what is refused, and what is suggested instead."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from bounds import within
from pairs import slow

from gradsurgeon.common.match import (
    Pattern,
    PatternError,
    compile_pattern,
    nearest,
    select,
    suggest,
)

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

MATCHES: list[tuple[str, str, bool]] = [
    ("*", "", True),
    ("*", "a.b.c", True),
    ("**", "a.b", True),
    ("a**b", "ab", True),
    ("*.bias", "a.b.bias", True),
    ("*.bias", "bias", False),
    ("*.bias", "a.bias.x", False),
    ("fc*.bias", "fc1.bias", True),
    ("fc*.bias", "xfc1.bias", False),
    ("FC*", "fc1", False),
    ("?.a", "x.a", True),
    ("a?b", "a.b", True),
    ("?", "", False),
    ("?", "ab", False),
    ("[0-9]", "5", True),
    ("[0-9]", "a", False),
    ("[!0-9]x", "ax", True),
    ("[!0-9]x", "5x", False),
    ("[!a]", ".", True),
    ("[a-c-]", "-", True),
    ("[-a]", "-", True),
    ("[!!]", "!", False),
    ("[*?]", "*", True),
    ("[[a]", "[", True),
    ("[~&]", "&", True),
    ("a.b", "axb", False),
    ("{a,b}.w", "b.w", True),
    ("{a,b}.w", "c.w", False),
    ("{a,}x", "x", True),
    ("{a}", "a", True),
    ("*{abc,b}*c", "abc", True),
    ("*{abc,b}*c", "abcc", True),
    ("{abc,a}bc", "abc", True),
    ("*{ab,a}*{b,bc}*d", "abcd", True),
    ("x{a*,b}y", "xa.q.y", True),
    ("x{[0-9],bb}y", "x7y", True),
    ("{?,ab}{?,ab}", "abc", True),
    ("h.{0..5}.w", "h.0.w", True),
    ("h.{0..5}.w", "h.5.w", True),
    ("h.{0..5}.w", "h.6.w", False),
    ("h.{0..5}.w", "h.05.w", True),
    ("h.{0..5}.w", "h.50.w", False),
    ("h.{0..5}.w", "h..w", False),
    ("h.{0..5}.w", "h.-1.w", False),
    ("h.{0..0}", "h.000", True),
    ("layers.{1..2}*", "layers.12", False),
    ("layers.{1..2}*", "layers.2.x", True),
    ("layers.{1..2}*", "layers.2x", True),
    ("*{1..2}", "layers.12", False),
    ("*{1..2}", "layers.2", True),
    ("*{1..2}*x", "a12.2x", True),
    ("h{8..11}", "h10", True),
    ("h{8..11}", "h12", False),
    ("h{8..11}", "h\u0661", False),
    ("h{0..999999999}", "h999999999", True),
    ("h{0..999999999}", "h1000000000", False),
    (".", ".", True),
    (".", "a", False),
    ("!bias", "!bias", True),
    ("a b#~&-,:", "a b#~&-,:", True),
    ("漢*", "漢字", True),
    ("a*", "a\nb", True),
    ("re:.*\\.bias", "a.bias", True),
    ("re:bias", "a.bias", False),
    ("re:bias", "bias2", False),
    ("re:^bias$", "bias", True),
    ("re:a|ab", "ab", True),
    ("re:(?i)BIAS", "bias", True),
    ("re:[^.]+\\.w", "a.w", True),
    ("re:[^.]+\\.w", "a.b.w", False),
]


@pytest.mark.parametrize(("text", "name", "expected"), MATCHES)
def test_matching(text: str, name: str, expected: bool) -> None:
    pattern = compile_pattern(text)
    assert pattern.matches(name) is expected
    assert select([pattern], [name]) == ([0] if expected else [])


REFUSED: list[tuple[str, str, str]] = [
    ("", "the pattern is empty", 'write "*"'),
    ("re:", "the pattern is empty", ""),
    ("x" * 501, "the pattern has 501 characters, at most 500 are read", ""),
    ("re:" + "x" * 498, "the pattern has 501 characters", ""),
    *(
        (f"a{char}b", f"`{char}` has no meaning in a glob pattern", '"re:..."')
        for char in "^$()|+\\"
    ),
    ("[^a]", "`^` has no meaning", '"re:..."'),
    ("{a|b,c}", "`|` has no meaning", '"re:..."'),
    ("[a", "`[` at character 1 is not closed", "[0-9]"),
    ("x[]", "`[` at character 2 holds nothing", ""),
    ("[!]", "`[` at character 1 holds nothing", ""),
    ("a]", "`]` at character 2 closes nothing", ""),
    ("[z-a]", "[z-a]: bad character range z-a", "write a set"),
    ("a{b", "`{` at character 2 is not closed", ""),
    ("a}", "`}` at character 2 closes nothing", ""),
    ("{a,{b,c}}", "`{` at character 1 is nested", ""),
    ("{}", "braces {} with nothing in them", "{a,b} or {0..11}"),
    ("{a..b}", "{a..b} is not a range of whole numbers", "{0..11}"),
    ("{-1..2}", "{-1..2} is not a range", ""),
    ("{..2}", "{..2} is not a range", ""),
    ("{5..1}", "the range {5..1} is reversed", "write {1..5}"),
    ("{0..2,7}", "the range 0..2 is in a list", "write a list of patterns"),
    ("{0.." + "9" * 19 + "}", "at most 18 digits", ""),
    ("{a,bb}" * 7, "more than 64 combinations", "write a list of patterns"),
    ("re:[", "not a regular expression: unterminated character set", ""),
    ("re:a(", "not a regular expression: missing ), unterminated subpattern", ""),
    ("re:*a", "not a regular expression: nothing to repeat", ""),
    ("re:a{99999999999999999999}", "not a regular expression: the repetition number", ""),
    ("re:(?L)a", "not a regular expression", ""),
    ("re:" + "(" * 400, "not a regular expression", ""),
    ("re:(.*.*)*x", "a repeat inside a repeat is not allowed", "write a glob"),
    ("re:(a*)*", "a repeat inside a repeat", ""),
    ("re:(a+)+b", "a repeat inside a repeat", ""),
    ("re:(a?){16}", "a repeat inside a repeat", ""),
    ("re:(?:x(?:a+)?)*", "a repeat inside a repeat", ""),
    ("re:(ab|cd)*", "alternatives inside a repeat", ""),
    ("re:(?:a|ab)+", "alternatives inside a repeat", ""),
    (r"re:(a)\1", "back-references are not allowed", ""),
    (r"re:(?P<x>a)(?P=x)", "back-references are not allowed", ""),
    (r"re:(a)?(?(1)b|c)", "back-references are not allowed", ""),
    ("re:a{17}", "repeated more than 16 times", ""),
    ("re:a{17,}", "repeated more than 16 times", ""),
    ("re:(?:a{9}){9}", "repeated more than 16 times", ""),
    ("re:(?:(?:(?:){16}){16}){16}", "repeated more than 16 times", ""),
    ("re:(?=(ab|cd)+)b", "alternatives inside a repeat", ""),
    ("re:.*.*.*.*", "could take very long", ""),
    ("re:.*a.*a[^c]*c.*d", "could take very long", ""),
    ("re:" + r"\d+\." * 4, "could take very long", ""),
    ("re:(?=.*a.*a.*a.*a)b", "could take very long", ""),
    ("re:" + ".*a" * 5, "could take very long", ""),
    ("re:" + "(?:|)" * 95, "could take very long", ""),
    ("re:" + "a?" * 40 + "a" * 40, "could take very long", ""),
    ("re:" + "(?:a|aa)" * 40, "could take very long", ""),
    ("re:" + "(?=(?:a|aa))" * 40, "could take very long", ""),
    ("re:" + "a{0,64}" * 20, "could take very long", ""),
]


@pytest.mark.parametrize(("text", "message", "hint"), REFUSED)
def test_what_is_refused_at_once(text: str, message: str, hint: str) -> None:
    with within(0.2), pytest.raises(PatternError, match=r".") as raised:
        compile_pattern(text)
    assert message in raised.value.message
    assert hint in raised.value.hint
    assert str(raised.value).startswith(raised.value.message)


@pytest.mark.parametrize(
    "text",
    [
        r"re:.*\.layers\.\d+\..*\.(weight|bias)",
        r"re:.*\.a\..*\.b\..*\.weight",
        r"re:[^.]+\.[^.]+\.[^.]+",
        r"re:\w+\.\w+\.\d+",
        r"re:(?:layer|block)s?\.\d{1,3}\..*",
        r"re:(?!head)\w+\.weight",
        r"re:(?:[a-z]{2}\.){3}w",
        r"re:(?>a+)b",
        r"re:a*+b",
        r"re:.*?\.bias",
        r"re:(?i:x)+y",
        r"re:[[a]",  # Python warns about it; a rule file cannot mend that
        r"re:[a||b]",
        "re:" + "(" * 80 + ")" * 80,
        "{0..999999999999999999}",
        "x" * 500,
        "*a" * 250,
        "?*" * 250,
        "{a,b}" * 100,
        "{a,aa,aaa,aaaa,aaaaa,aaaaaa,aaaaaaa,aaaaaaaa}" * 2 + "*" * 300,
    ],
)
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


@pytest.mark.parametrize(
    "text",
    [
        "re:.*.*.*b",
        "re:(?=.*a.*a)a*",
        "re:(?>.*a.*)b",
        "re:.*a.*a(?<=.{16}b)",
        "re:.*a{1,8}.*b",
        "re:.*a[^c]*c.*d",
        r"re:.*(attn|mlp).*(q|k|v)_proj.*weight",
        r"re:.*\.a\..*\.b\..*\.weight",
        r"re:layers\.(\d+)\.attn\..*weight",
        "re:(?:a{2}.*)?a*b",
    ],
)
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
    assert isinstance(compile_pattern("a.*"), Pattern)
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
    texts = [
        "*.weight",
        "*.self_attn.*.weight",
        "*.layers.{0..5}.*",
        "*q_proj*",
        "*.decoder.*.bias",
    ]
    texts += ["*.{mlp,self_attn}.*", r"re:.*\.layers\.\d+\.mlp\..*", "[!m]*", "model.*.up.?eight"]
    patterns = [compile_pattern(text) for text in texts * 2]
    names = big_model()
    with within(0.3):
        found = select(patterns, names)
    assert len(found) > 5_000


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("q_proj", 'did you mean "*.q_proj.*" (it matches 24)?'),
        ("weight", 'did you mean "*.weight" (it matches 62)?'),
        ("embed", 'did you mean "embed.*" (it matches 1)?'),
        ("proj.", 'did you mean "*proj.*" (it matches 48)?'),
        (
            "zzzzzz",
            "the model has 122 names, such as embed.weight, model.layers.0.self_attn.q_proj.weight, ",
        ),
    ],
)
def test_suggestions(text: str, hint: str) -> None:
    assert suggest(text, NAMES).startswith(hint)


def test_suggestions_by_likeness() -> None:
    names = ["model.layers.0.up.w", "model.layers.1.up.w", "head"]
    assert suggest("model.layers.7.up.w", names) == "closest names: model.layers.*.up.w"
    spelt = 'did you mean "head.weight" (it matches 1)?'
    assert suggest("HEAD.weight", ["head.weight", "x"]) == spelt
    assert suggest("*.weigth", ["head.weight", "x"]) == 'did you mean "*.weight" (it matches 1)?'
    assert suggest("haed.*", ["head.weight", "x"]) == 'did you mean "head.*" (it matches 1)?'
    assert suggest("headweight", ["head.weight", "x"]) == "closest names: head.weight"
    assert suggest("a", ["b"]) == "the model has 1 names, such as b"
    assert suggest("*", []) == "the model has no names to match"


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
