"""Files of `torch.save` from anywhere: what they may hold is loaded, all else is refused before it takes memory."""

from __future__ import annotations

import io
import math
import os
import pickle
import resource
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import slow
from torch import nn

from gradsurgeon.tensors import _bounded_load
from gradsurgeon.tensors._bounded_load import RefusedError

pytestmark = pytest.mark.slow

MOST = 2**30
ran: list[str] = []


def load(path: Path) -> Any:
    return _bounded_load.load(path, MOST)


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def rebuilt(path: Path, pickled: bytes | None = None, *, more: int = 0, method: int = 0) -> Path:
    """Write a file of torch anew, with another pickle, more members, or compressed."""
    with zipfile.ZipFile(path) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    root = next(iter(members)).partition("/")[0]
    if pickled is not None:
        members[f"{root}/data.pkl"] = pickled
    members |= {f"{root}/data/more{number}": b"" for number in range(more)}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    content = {
        "numbers": (1, -(2**40), True, None, math.inf, "text"),
        "nested": OrderedDict(a=[{1: [(), []]}]),
        "views": [whole, whole.t(), whole[1:]],
        "dtypes": [torch.ones(2, dtype=d) for d in (torch.uint16, torch.bfloat16, torch.bool)],
        "grad": torch.ones(2, requires_grad=True),
        "empty": torch.empty(0, 3),
        "dtype": torch.float16,
        "size": torch.Size([2]),
        "random": torch.get_rng_state(),
    }
    found = load(saved(tmp_path / "a.pt", content))
    assert list(found) == list(content)
    assert found["numbers"] == content["numbers"]
    assert found["nested"] == content["nested"]
    assert found["views"][1].stride() == (1, 4)
    assert found["views"][0].data_ptr() == found["views"][1].data_ptr()
    assert [one.dtype for one in found["dtypes"]] == [torch.uint16, torch.bfloat16, torch.bool]
    assert found["grad"].requires_grad
    assert found["dtype"] is torch.float16


class Evil:
    def __reduce__(self) -> Any:
        return ran.append, ("ran",)


def code(path: Path) -> Path:
    return saved(path, [Evil()])


def code_by_an_object(path: Path) -> Path:
    return saved(path, nn.Linear(1, 1))


def legacy(path: Path) -> Path:
    return saved(path, [torch.ones(2)], _use_new_zipfile_serialization=False)


def plain_pickle(path: Path) -> Path:
    path.write_bytes(pickle.dumps(Evil()))
    return path


def deflated(path: Path) -> Path:
    return rebuilt(saved(path, torch.zeros(50_000_000)), method=zipfile.ZIP_DEFLATED)


def deflated_a_little(path: Path) -> Path:
    return rebuilt(saved(path, torch.randn(10)), method=zipfile.ZIP_DEFLATED)


def expanded(path: Path) -> Path:
    return saved(path, torch.zeros(1).expand(10**11))


def many_views(path: Path) -> Path:
    whole = torch.zeros(2**20)
    return saved(path, [whole.view(-1) for _ in range(128)])


def out_of_bounds(path: Path) -> Path:
    saved(path, torch.zeros(3, 7))
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        raw = archive.read(name)
    # The sizes are 3 and 7, the strides 7 and 1.
    return rebuilt(path, raw.replace(b"K\x03K\x07", b"K\x03K\xff"))


def other_storage(path: Path) -> Path:
    saved(path, torch.zeros(200))
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        raw = archive.read(name)
    return rebuilt(path, raw.replace(b"FloatStorage", b"LongStorage"))


def truncated(path: Path) -> Path:
    whole = saved(path, {"a": torch.ones(1000)}).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def doubled(path: Path) -> Path:
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    return saved(path, laughs)


def many_members(path: Path) -> Path:
    return rebuilt(saved(path, 1), more=_bounded_load.MOST_MEMBERS)


def comment(path: Path) -> Path:
    with zipfile.ZipFile(saved(path, 1), "a") as archive:
        archive.comment = b"more"
    return path


def prepended(path: Path) -> Path:
    path.write_bytes(b"more" + saved(path, 1).read_bytes())
    return path


def twice(path: Path) -> Path:
    with zipfile.ZipFile(saved(path, 1), "a") as archive, pytest.warns(UserWarning, match="Dupl"):
        archive.writestr(archive.namelist()[0], b"")
    return path


def twice_but_for_the_case(path: Path) -> Path:
    with zipfile.ZipFile(saved(path, torch.ones(1000)), "a") as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data/0"))
        archive.writestr(name.replace("/data/", "/DATA/"), b"")
    return path


def no_members(path: Path) -> Path:
    zipfile.ZipFile(path, "w").close()
    return path


def empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link_to_a_device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


# Pickles that torch never writes, in the place of the one in a file.
PICKLES = {
    "truncated": b"\x80\x02](K\x01",
    "nested": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "many values": b"\x80\x02]" + b"(" + b"]" * 4_000_000 + b"e.",
    "far memo": b"\x80\x02]r" + struct.pack("<I", 2**24) + b".",
    "long number": b"\x80\x02\x8b" + struct.pack("<I", 2**20) + b"\x01" * 2**20 + b".",
    "global of Python": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "state of a function": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb."
    ),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_could_do_harm_is_refused_before_it_is_loaded(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rebuilt(saved(tmp_path / "a.pt", 1), PICKLES[name])
    refuse(path, monkeypatch)


@pytest.mark.parametrize(
    "make",
    [
        code,
        code_by_an_object,
        legacy,
        plain_pickle,
        deflated_a_little,
        expanded,
        many_views,
        out_of_bounds,
        other_storage,
        truncated,
        comment,
        prepended,
        twice,
        twice_but_for_the_case,
        no_members,
        empty,
        folder,
        pipe,
        link_to_a_device,
        *slow(deflated, doubled, many_members),
    ],
)
def test_what_could_do_harm_is_refused_before_it_is_loaded(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "a.pt")
    refuse(path, monkeypatch)


def refuse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold that a file is refused before it takes memory or runs code."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    before = peak()
    with pytest.raises((RefusedError, IsADirectoryError)):
        load(path)
    assert peak() - before < 64 * 2**20
    assert not ran


def test_a_file_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", torch.ones(1000))
    with pytest.raises(RefusedError, match=r"at most 4,000 are read"):
        _bounded_load.load(path, 4000)


@pytest.mark.slow
def test_whatever_byte_is_changed_it_is_loaded_or_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save({"a": [1, 2.5, "text"], "b": torch.ones(3)}, file)
    whole, path = file.getvalue(), tmp_path / "a.pt"
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            load(path)
        except RefusedError:
            continue
