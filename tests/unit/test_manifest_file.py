"""Names of a model from files: what `params` writes, what safetensors holds, and what strangers send."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import models
import pytest
from ranks import Json
from torch import nn

import gradsurgeon
from gradsurgeon.errors import ManifestError
from gradsurgeon.language import planning
from gradsurgeon.language.planning import Manifest, manifest_file


class Shared(nn.Module):
    """Everything that is written for few models only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.act = nn.ReLU(inplace=True)
        self.table = nn.Embedding(4, 3, sparse=True)
        self.lazy = nn.LazyLinear(2)


ZOO = [models.Mlp, models.Tied, models.Frozen, Shared, nn.Identity]


def manifest(*rows: tuple[str, str, list[int]]) -> Json:
    content: Json = {
        "params": [
            {
                "name": name,
                "aliases": [],
                "shape": shape,
                "dtype": dtype,
                "requires_grad": True,
                "module_type": ["Linear", "Module"],
            }
            for name, dtype, shape in rows
        ],
        "modules": [{"name": ".", "type": ["Net", "Module"]}],
    }
    return {"version": 1, "origin": "Net", "hash": manifest_file.digest(content), **content}


GOOD = manifest(("fc.weight", "float32", [3, 4]), ("fc.bias", "float32", [3]))


def refused(data: object, path: Path) -> list[tuple[str, str]]:
    """Return place inside the file and message of each problem."""
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    with pytest.raises(ManifestError, match=r"problems? in the names of the model") as caught:
        manifest_file.read(path)
    return [
        (str(one.place).removeprefix(str(path)).strip(), one.message)
        for one in caught.value.problems
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "params.json"


class TestRoundTrip:
    @pytest.mark.parametrize("net", ZOO)
    def test_nothing_is_lost(self, net: type[nn.Module], file: Path) -> None:
        own = planning.from_model(net())
        file.write_text(manifest_file.dumps(own), encoding="utf-8")
        assert manifest_file.read(file) == own
        assert manifest_file.from_dict(manifest_file.to_dict(own)) == own

    def test_one_line_per_parameter(self) -> None:
        lines = manifest_file.dumps(planning.from_model(models.Tied())).splitlines()
        (line,) = (line for line in lines if '"emb.weight"' in line)
        assert '"head.weight"' in line


class TestStrict:
    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (
                {"shape": [3, -1]},
                (
                    "params[0].shape[1]",
                    "Input should be greater than or equal to 0, found -1",
                ),
            ),
            (
                {"requires_grad": 1},
                ("params[0].requires_grad", "Input should be a valid boolean, found 1"),
            ),
            (
                {"dtyp": "x"},
                ("params[0].dtyp", 'Unexpected keyword argument, found the text "x"'),
            ),
            (
                {"aliases": "fc.b"},
                ("params[0].aliases", 'Input should be a valid tuple, found the text "fc.b"'),
            ),
        ],
    )
    def test_the_first_problem_is_told_at_its_place(
        self, file: Path, change: dict[str, object], problem: tuple[str, str]
    ) -> None:
        data = json.loads(json.dumps(GOOD))
        data["params"][0] |= change
        data["params"][1] |= change
        assert refused(data, file) == [problem]

    @pytest.mark.parametrize(
        ("text", "place", "message"),
        [
            ("", "", "not JSON: EOF while parsing a value at line 1 column 0"),
            ("[1, NaN]", "", "not JSON: expected value at line 1 column 5"),
            ("[" * 100_000, "", "not JSON: recursion limit exceeded"),
            (
                "9" * 5000,
                "",
                "not JSON: number out of range at line 1 column 4302",
            ),
            (" " * 100_000_001, "", "more than 100 MB of JSON are not read"),
            ('{"version": 2}', "version", "Input should be 1, found 2"),
        ],
        ids=["empty", "nan", "deep", "digits", "bytes", "later"],
    )
    def test_hostile_texts(self, file: Path, text: str, place: str, message: str) -> None:
        ((where, found),) = refused(text, file)
        assert (where, found[: len(message)]) == (place, message)

    @pytest.mark.parametrize("value", [None, "x", {"a": 1}])
    def test_wrong_types_at_the_top(self, file: Path, value: object) -> None:
        assert refused(value, file)
        assert refused({**GOOD, "params": value}, file)
        assert refused({**GOOD, "version": value}, file)

    def test_control_codes_are_escaped(self, file: Path) -> None:
        file.write_text(json.dumps({**GOOD, "\x1b[2J": "\x1b[31m", "origin": ["\x1b"]}))
        with pytest.raises(ManifestError) as caught:
            manifest_file.read(file)
        assert "\x1b" not in str(caught.value)

    def test_bytes_that_are_no_text(self, file: Path) -> None:
        file.write_bytes(b'{"a": "\xff"}')
        with pytest.raises(
            ManifestError, match="not JSON: invalid unicode code point at line 1 column 8"
        ):
            manifest_file.read(file)

    @pytest.mark.parametrize("name", ["gone.json", "gone.safetensors", "a\0b", "."])
    def test_what_cannot_be_read(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ManifestError, match="cannot read the file") as caught:
            manifest_file.read(f"{tmp_path}/{name}")
        assert [one.check for one in caught.value.problems] == ["unreadable-file"]

    def test_the_error_travels_between_processes(self, file: Path) -> None:
        with pytest.raises(ManifestError) as caught:
            manifest_file.from_dict([], str(file))
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.problems == caught.value.problems


def write_weights(
    path: Path, tensors: Mapping[str, tuple[object, list[int]]], metadata: object = None
) -> None:
    """Write a header without the tensors, which nothing may read."""
    header: Json = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def bind(found: Manifest, *rules: str) -> gradsurgeon.Plan:
    lines = [f"  - {{id: r{number}, {rule}}}\n" for number, rule in enumerate(rules)]
    return gradsurgeon.plan(found, "version: 1\nrules:\n" + "".join(lines))


class TestWeights:
    @pytest.fixture
    def found(self, tmp_path: Path) -> Manifest:
        path = tmp_path / "model.safetensors"
        tensors = {
            "h.10.fc.weight": ("BF16", [8, 2]),
            "h.2.fc.weight": ("F32", [8, 2]),
            "emb.weight": ("F16", [5, 2]),
            "h.2.norm.num_batches_tracked": ("I64", []),
        }
        write_weights(path, tensors, {"format": "pt", "head.weight": "emb.weight"})
        return manifest_file.read(path)

    def test_names_shapes_and_dtypes(self, found: Manifest) -> None:
        assert [(one.name, one.aliases, one.shape, one.dtype) for one in found.params] == [
            ("emb.weight", (), (5, 2), "float16"),
            ("h.10.fc.weight", (), (8, 2), "bfloat16"),
            ("h.2.fc.weight", (), (8, 2), "float32"),
        ]
        names = [".", "emb", "h", "h.10", "h.10.fc", "h.2", "h.2.fc"]
        assert [one.name for one in found.modules] == names
        assert {one.module_type for one in found.params} | {
            one.module_type for one in found.modules
        } == {()}

    def test_what_it_cannot_tell_is_a_warning_of_the_plan(self, found: Manifest) -> None:
        plan = bind(
            found,
            'action: norm-log, params: "*"',
            'action: norm-log, modules: "h.*.fc", tensor: output',
        )
        assert [one.name for one in plan.of("r1")] == ["h.10.fc", "h.2.fc"]
        assert plan.manifest.elements == 42
        assert any("does not tell buffers from parameters" in text for text in plan.warnings)
        assert any("tensors of whole numbers are left out" in text for text in plan.warnings)

    @pytest.mark.parametrize(
        "rule",
        [
            'action: zero, params: "*", where: {module_type: "Linear"}',
            'action: norm-log, modules: "*", tensor: output, where: {module_type: "Linear"}',
            'action: zero, params: "*", where: {requires_grad: true}',
            'action: zero, params: "*", where: {module_type: "Linear"}, optional: true',
            'action: zero, params: "*", model: "Net"',
        ],
    )
    def test_conditions_on_what_is_not_told_are_errors(self, found: Manifest, rule: str) -> None:
        with pytest.raises(gradsurgeon.BindError) as caught:
            bind(found, rule)
        (complaint,) = caught.value.complaints
        assert f"cannot be decided: {found.origin} lacks these facts" in complaint

    def test_conditions_on_shapes_and_dtypes_hold(self, found: Manifest) -> None:
        plan = bind(
            found,
            'action: zero, params: "*", where: {ndim: 2, numel: {min: 11}, dtype: "bfloat16"}',
        )
        assert [one.name for one in plan.of("r0")] == ["h.10.fc.weight"]

    def test_real_files_say_the_same_as_the_model(self, tmp_path: Path) -> None:
        save = pytest.importorskip("safetensors.torch").save_model
        model = models.Frozen()
        save(model, str(tmp_path / "m.safetensors"))
        found = manifest_file.read(tmp_path / "m.safetensors")
        own = planning.from_model(model)
        assert {(frozenset(one.names), one.shape, one.dtype) for one in found.params} == {
            (frozenset(one.names), one.shape, one.dtype) for one in own.params
        }

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (b"", "or one that is cut off"),
            (b"version https://git-lfs.github.com/spec/v1\noid", "or one that is cut off"),
            (b"\x02" + bytes(7) + b"[]", "its header lists no tensors"),
            (b"\x09" + bytes(7) + b'{"a": NaN', "expected value at line 1"),
        ],
    )
    def test_other_files(self, tmp_path: Path, raw: bytes, message: str) -> None:
        (tmp_path / "m.safetensors").write_bytes(raw)
        with pytest.raises(ManifestError, match=message):
            manifest_file.read(tmp_path / "m.safetensors")

    def test_a_tensor_that_is_wrong(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        write_weights(
            path, {"a": ("F32", [-1]), "b": (3, [1]), "": ("F32", [1]), "c": ("F32", [1])}
        )
        with pytest.raises(ManifestError, match="its header lists no tensors"):
            manifest_file.read(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('"float32"', '"float16"'),
        ('"version": 1', '"version": 2'),
    ],
    ids=["the same", "an edited one", "one of a later version"],
)
def test_a_manifest_takes_the_place_of_an_earlier_one(old: str, new: str, tmp_path: Path) -> None:
    found = planning.from_model(models.Mlp())
    text = manifest_file.dumps(found)
    file = tmp_path / "params.json"
    file.write_text(text.replace(old, new))
    link = tmp_path / "link.json"
    link.symlink_to(file)
    manifest_file.write(found, link)
    assert file.read_text() == text
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "params.json"]


@pytest.mark.parametrize(
    "there",
    ['{"learning_rate": 1}', "<<<<<<< ours", "[]", '{"version": 1, "params": []}', "\xff"],
)
def test_a_manifest_takes_the_place_of_nothing_else(there: str, tmp_path: Path) -> None:
    file = tmp_path / "params.json"
    file.write_text(there, encoding="latin-1")
    with pytest.raises(gradsurgeon.RecordError, match=r"is there already and is no params\.json"):
        manifest_file.write(planning.from_model(models.Mlp()), file)
    assert file.read_text(encoding="latin-1") == there
    assert list(tmp_path.iterdir()) == [file]
