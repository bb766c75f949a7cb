"""Rule files that went wrong somewhere: lint answers, in time, and points into their lines.

Some hundred inputs of each kind by default. Many more, spread over the tests that share them:

    GRADSURGEON_FUZZ=100000 python -m pytest tests/property/test_lint_*.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzzing import CASES, SETTINGS, SHAPES, answered, copied, in_their_lines
from hypothesis import given
from hypothesis import strategies as st

# Thousands of inputs take the same few lines, and tracing them twice the time.
pytestmark = pytest.mark.no_cover


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("fuzz"))


# -- bytes ----------------------------------------------------------------------------------------

FILES = sorted(path for path in CASES.rglob("*") if path.suffix in {".yaml", ".yml", ".json"})
PIECES = [
    b"\0", b"\r", b"\n", b"\r\n", b"\t", b" ", b"  ", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b"\xe2\x80\xa8", b"\xc2\x85", b"\xf0\x9f\x98\x80", b"\xe6\xbc\xa2", b"'", b'"', b"\\", b"[", b"]", b"{", b"}",
    b":", b": ", b",", b"- ", b"#", b" #", b"&a ", b"*a", b"!", b"!!str ", b"|", b">", b"%", b"@", b"`", b"?", b"? ",
    b"<<", b"~", b"---\n", b"...\n", b"null", b"true", b"no", b"1e999", b".nan", b"-.inf", b"0x10", b"1_0",
    b"9" * 70, b"a" * 300, b'"\\ud800"', b'"\\0\\e[2J"', b"\xe2\x80\xae", b"re:(a*)*", b"re:(", b"{0..11}", b"{0..", b"[!",
    b"version: 1\n", b"rules:\n", b"  - ", b"id: ", b"params: ", b"action: clamp\n", b'include: ["./a"]\n', b"requires: ",
]  # fmt: skip
WHERE = st.floats(0, 1, exclude_max=True)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), WHERE, st.sampled_from(PIECES)),
        st.tuples(st.just("overwrite"), WHERE, st.sampled_from(PIECES)),
        st.tuples(st.just("byte"), WHERE, st.binary(min_size=1, max_size=1)),
        st.tuples(st.just("delete"), WHERE, st.integers(1, 40)),
        st.tuples(st.just("repeat"), WHERE, st.integers(1, 40)),
        st.tuples(st.just("cut"), WHERE, st.just(0)),
        st.tuples(st.just("join"), WHERE, st.sampled_from(FILES)),
    ),
    min_size=1,
    max_size=5,
)


def mutated(raw: bytes, changes: list[tuple[str, float, Any]]) -> bytes:
    for kind, where, what in changes:
        at = int(where * (len(raw) + 1))
        before, after = raw[:at], raw[at:]
        if kind in {"insert", "overwrite", "byte"}:
            raw = before + what + after[0 if kind == "insert" else len(what) :]
        elif kind == "delete":
            raw = before + after[what:]
        elif kind == "repeat":
            raw = before + after[:what] * 3 + after[what:]
        elif kind == "cut":
            raw = before
        else:
            raw = before + what.read_bytes()
    return raw


@SETTINGS
@given(st.sampled_from(FILES), CHANGES)
def test_no_change_of_a_file_is_too_much(
    folder: Path, case: Path, changes: list[tuple[str, float, Any]]
) -> None:
    file = folder / "mutated.yaml"
    file.write_bytes(mutated(case.read_bytes(), changes))
    in_their_lines(answered(file), file)


# -- text -----------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        *("id", "action", "params", "modules", "tensors", "tensor", "exclude", "where", "model"),
        *("at", "steps", "expect", "optional", "when", "min", "max", "factor", "max_norm", "per"),
        *(
            "norm_type",
            "then",
            "give_up_after",
            "forensics",
            "stats",
            "max_bytes",
            "mni",
            "<<",
            "?",
        ),
    ]
)
WORDS = st.one_of(
    st.sampled_from(
        [
            *("clamp", "scale", "zero", "freeze", "nan-trap", "norm-log", "capture", "clip-norm"),
            *("sanitize", '"*"', '"fc*.bias"', "'re:^a.*$'", '"re:(a+)+"', '"[9-0]"', '"{a,{b}"'),
            *("*", "*a", "&a b", "{a}", "[a", "!x", "yes", "010", "1:30", "~", "null", "true"),
            *("step", "backward", "grad", "output.grad", '"output[0].x"', "1", "-1e-3", ".nan"),
            *(
                "{from: 5, to: 1}",
                "{params: -1}",
                "{ndim: x}",
                "{numel: {min: 2}}",
                "[l2, l2]",
                "[]",
            ),
        ]
    ),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=12),
)
RULES = st.lists(st.lists(st.tuples(KEYS, WORDS), max_size=6), max_size=5)
TOPS = st.lists(
    st.sampled_from(
        [
            "version: 1",
            "version: 2",
            'requires: ">=0.1"',
            "requires: soon",
            'include: ["gradsurgeon:clip@1"]',
            'include: ["include-parts/clean.yaml", "../x"]',
            "rulez: []",
            "",
            "#漢",
        ]
    ),
    max_size=4,
)


@SETTINGS
@given(TOPS, RULES, SHAPES)
def test_no_rule_file_is_too_much(
    folder: Path, tops: list[str], rules: list[Any], shape: tuple[bool, str, str]
) -> None:
    flow, end, start = shape
    lines = [*tops, "rules:"]
    for rule in rules:
        pairs = [f"{key}: {value}" for key, value in rule]
        if flow:
            lines.append(f"  - {{{', '.join(pairs)}}}")
        else:
            lines += [f"  {'- ' if not i else '  '}{pair}" for i, pair in enumerate(pairs)]
    file = folder / "made.yaml"
    file.write_bytes((start + end.join(lines)).encode("utf-8", "surrogatepass"))
    in_their_lines(answered(file), file)
