"""A diagnosis says which rows of the batch were non-finite, and which samples these are; as text, and as keys for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.test_forensics import TRAP, diagnosed, mean, stopped
from ranks import Json
from small import attach, events_of, sgd, take_step
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import Diagnosis, NonFiniteGradientError
from gradsurgeon.common.rows import Rows

NAN = float("nan")


class Block(nn.Module):
    """A function between a layer without bias, which keeps a row of zeros, and another layer."""

    def __init__(self, act: Callable[[Tensor], Tensor], first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first or nn.Linear(4, 4, bias=False)
        self.act = act
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.act(self.first(x)))


class Transformer(nn.Module):
    """Attention over documents; inside of it the time may come first, and samples and heads are one dimension."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.last = nn.Linear(8, 2)

    def forward(self, tokens: Tensor, padding: Tensor) -> Any:
        x = self.embed(tokens)
        if not self.attention.batch_first:
            x = x.transpose(0, 1)
        attended, _ = self.attention(x, x, x, key_padding_mask=padding)
        return self.last(attended.mean(int(self.attention.batch_first)))


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4, bias=False)
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        out, _ = self.rnn(unit(self.project(x)))
        return out


def unit(x: Tensor) -> Tensor:
    out: Tensor = x / x.norm(dim=-1, keepdim=True)
    return out


def folded(x: Tensor) -> Tensor:
    """Work on time and samples in one dimension, the time first."""
    flat = unit(x.transpose(0, 1).reshape(-1, x.size(-1)))
    return flat.view(x.size(1), x.size(0), -1).transpose(0, 1)


def zeros_at(shape: tuple[int, ...], *places: Any) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for place in places:
        tensor[place] = 0
    return tensor


def documents(batch: int, length: int, empty: int) -> dict[str, Tensor]:
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[empty] = True
    return {"tokens": torch.arange(batch * length).view(batch, length) % 20, "padding": padding}


def weighted(out: Tensor) -> Tensor:
    """Return a loss outside of the model, whose weight of one sample is NaN."""
    weights = torch.ones(len(out), 1)
    weights[5] = NAN
    return (out * weights).mean()


@dataclass
class Case:
    """A training step, the rows of the blamed tensor, and the rows of the input if a replay has shown them."""

    model: Callable[[], nn.Module]
    given: Any
    rows: tuple[int, ...] | None
    of: int = 0
    columns: tuple[int, ...] = ()
    input_rows: tuple[int, ...] = ()
    loss: Callable[[Tensor], Tensor] = mean


def only_zeros(x: Tensor) -> Tensor:
    if bool(x[3].any()):
        raise ValueError("row 3 must be 0")
    return unit(x)


def broken() -> nn.Module:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight[2] = NAN
    return layer


def logs(x: Tensor) -> Tensor:
    return x.abs().log()


CASES = {
    "one column of a row": Case(
        lambda: Block(logs, nn.Identity()), zeros_at((9, 4), (3, 1)), (3,), 9, (1,), (3,)
    ),
    "in backward": Case(
        lambda: Block(lambda x: x.square().sum(-1, keepdim=True).sqrt().expand_as(x)),
        zeros_at((9, 4), 2), (2,), 9, (), (2,),
    ),
    "an empty document": Case(
        lambda: Transformer(batch_first=True), documents(6, 5, 3), (6, 7), 12, (), (3,)
    ),
    "an empty document where the time is first inside": Case(
        lambda: Transformer(batch_first=False), documents(6, 5, 3), (6, 7), 12, (), (3,)
    ),
    "as many documents as positions": Case(
        lambda: Transformer(batch_first=False), documents(5, 5, 3), (6, 7), 10, (), (3,)
    ),
    "time and samples in one dimension, time first": Case(
        lambda: Block(folded), zeros_at((3, 5, 4), (1, 2)), (7,), 15, (), (1,)
    ),
    "an RNN whose first dimension is time": Case(
        Rnn, zeros_at((7, 4, 4), (3, 2)), (3,), 7, (), (3,)
    ),
    "a loss outside of the model": Case(
        lambda: nn.Linear(4, 2), zeros_at((9, 4)), (5,), 9, loss=weighted
    ),
    "all rows": Case(lambda: Block(unit), torch.zeros(6, 4), None),
    "a model that refuses other rows": Case(lambda: Block(only_zeros, nn.Identity()), zeros_at((9, 4), 3), (3,), 9),
    "a tensor of another size": Case(lambda: Block(lambda x: x * unit(x[:5] * 0).mean()), zeros_at((9, 4)), None),
    "made of nothing": Case(lambda: Block(lambda x: x * torch.full((4,), NAN)), zeros_at((4, 4)), None),
    "a weight": Case(lambda: Block(unit, broken()), zeros_at((4, 4)), (2,), 4),
    "a number": Case(lambda: Block(lambda x: x * (x.mean() * 0).sqrt()), zeros_at((4, 4)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_of_the_fault(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    rows = diagnosed(case.model(), case.given, loss=case.loss).rows
    if case.rows is None:
        assert rows is None
        return
    assert rows is not None
    assert (rows.rows, rows.size) == (case.rows, case.of)
    assert rows.columns == case.columns
    assert rows.input_rows == case.input_rows


def test_an_input_that_was_nan_has_the_id_of_its_sample() -> None:
    model = Block(unit)
    optimizer = sgd(model)
    x = zeros_at((9, 4))
    x[3, 2] = NAN
    with stopped(model) as diagnoses:
        mean(tag_before(model, x)).backward()
        optimizer.step()
    text = "\n  all in row 3 of 9, column 2, from row 3 of the input (sample_id 30)\n"
    assert text in str(diagnoses[0])


def test_more_than_a_hundred_rows_are_not_named() -> None:
    x = zeros_at((300, 4), *range(150))
    assert diagnosed(Block(unit), x).rows is None


WORDS = {
    "all in row 11 of 16": Rows((11,), 16),
    "all in rows 3 and 7 of 16, column 5": Rows((3, 7), 16, (5,)),
    "all in rows 0, 2, 4, 6, 8, 10 and 2 more of 16": Rows(tuple(range(0, 16, 2)), 16),
    "all in rows 0, 1, 2, 3, 4, 5 and 94 more of 512": Rows(tuple(range(100)), 512),
    "all in row 3 of 16, from row 3 of the input (sample_id 4711)": Rows((3,), 16, (), (3,), (4711,)),
    "all in rows 6 and 7 of 12, from row 3 of the input": Rows((6, 7), 12, (), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
def test_rows_have_words(words: str) -> None:
    assert str(WORDS[words]) == words


IDS = torch.arange(9) * 10


def tag_before(model: nn.Module, x: Tensor) -> Tensor:
    gradsurgeon.tag(IDS, "sample_ids")
    out: Tensor = model(x)
    return out


def tag_after(model: nn.Module, x: Tensor, number: int = 0) -> Tensor:
    out: Tensor = model(x)
    gradsurgeon.tag(IDS + number, "sample_ids")
    return out


def tag_first(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """Tag the first batch of a step alone."""
    if not number:
        gradsurgeon.tag(IDS, "sample_ids")
    out: Tensor = model(x)
    return out


def tag_and_write(model: nn.Module, x: Tensor) -> Tensor:
    ids = IDS.clone()
    gradsurgeon.tag(ids, "sample_ids")
    ids.zero_()
    out: Tensor = model(x)
    return out


def tag_words(model: nn.Module, x: Tensor) -> Tensor:
    words: Any = ["a", "list"]
    gradsurgeon.tag(words, "sample_ids")
    gradsurgeon.tag(torch.arange(9, device="meta"), "sample_ids")
    gradsurgeon.tag(torch.arange(9).to_sparse(), "sample_ids")
    gradsurgeon.tag(IDS.float(), "sample_ids")
    gradsurgeon.tag(IDS, "other")
    out: Tensor = model(x)
    return out


def tag_few(model: nn.Module, x: Tensor) -> Tensor:
    gradsurgeon.tag(IDS[:8], "sample_ids")
    out: Tensor = model(x)
    return out


TAGGED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], tuple[int, ...]]] = {
    "before the call": (tag_before, (30, 70)),
    "between call and backward": (tag_after, (30, 70)),
    "written over later": (tag_and_write, (30, 70)),
    "no integers, or another name": (tag_words, ()),
    "too few": (tag_few, ()),
}


@pytest.mark.parametrize("case", TAGGED)
def test_samples_are_named_by_the_ids_that_the_script_tags(case: str) -> None:
    call, ids = TAGGED[case]
    model = Block(unit)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, TRAP, optimizer=optimizer) as session:
        # The ids of an earlier batch are those of no later one.
        gradsurgeon.tag(IDS + 1000, "sample_ids")
        mean(model(zeros_at((9, 4)))).backward()
        optimizer.step()
        with pytest.raises(NonFiniteGradientError) as caught:
            mean(call(model, zeros_at((9, 4), 3, 7))).backward()
            optimizer.step()
    rows = caught.value.diagnosis.rows
    assert rows.ids == ids
    (event,) = session.events
    if ids:
        assert event.sample_ids == tuple(IDS.tolist())
        samples = "sample_ids 0, 10, 20, 30, 40, 50 and 3 more"
        assert f"\nsamples of this step: {samples}\n" in event.message
    assert event.diagnosis is not None
    assert tuple(event.diagnosis["rows"]["ids"]) == ids


def test_rows_that_may_be_steps_of_time_have_no_ids() -> None:
    model = Block(unit)
    optimizer = sgd(model)
    # The first of two dimensions with as many places as there are samples.
    x = torch.ones(9, 9, 4)
    x[3, 5] = 0
    with stopped(model) as diagnoses:
        mean(tag_before(model, x)).backward()
        optimizer.step()
    rows = diagnoses[0].rows
    assert rows is not None
    assert (rows.rows, rows.ids) == ((3,), ())


@pytest.mark.parametrize(("tags", "ids"), [(tag_after, (41,)), (tag_first, ())])
def test_each_micro_batch_has_its_own_ids(tags: Any, ids: tuple[int, ...]) -> None:
    model = Block(unit)
    optimizer = sgd(model)
    with (
        gradsurgeon.apply(model, TRAP, optimizer=optimizer) as session,
        pytest.raises(NonFiniteGradientError) as caught,
    ):
        for number in range(3):
            x = zeros_at((9, 4), *([4] if number == 1 else []))
            mean(tags(model, x, number)).backward()
        optimizer.step()
    assert caught.value.diagnosis.rows.ids == ids
    (event,) = session.events
    assert len(event.sample_ids) == (27 if ids else 9)


def test_the_event_of_a_spike_has_the_ids() -> None:
    rule = {"id": "spikes", "action": "spike-trap", "params": "*", "then": "skip-step"}
    above = {"times": 3, "beta": 0.5, "warmup": 2}
    model = nn.Linear(4, 2)
    optimizer = sgd(model)
    with attach(model, {**rule, "above": above}, optimizer=optimizer) as session:
        for number in range(5):
            gradsurgeon.tag(IDS + number, "sample_ids")
            take_step(optimizer, mean(model(zeros_at((9, 4)) * (1 if number < 4 else 10000.0))))
    (spike,) = events_of(session, "spike")
    assert spike.sample_ids == tuple((IDS + 4).tolist())
    assert spike.diagnosis is None


KEYS: Json = {
    "certainty": "reproduced",
    "reasons": [],
    "headline": "NaN born in the forward pass of the root (Block): aten.div",
    "what": "NaN",
    "where": "forward",
    "op": "aten.div",
    "module": ".",
    "direction": "forward",
    "name": "",
    "file": __file__,
    "line": unit.__code__.co_firstlineno + 1,
    "cause": "mathematics",
    "evidence": ["in float64 the result is NaN as well"],
    "remedy": "a division by 0: `clamp(min=eps)` the divisor",
    "rank": 0,
}


def test_programs_read_the_same_keys_everywhere(tmp_path: Path) -> None:
    model = Block(unit)
    optimizer = sgd(model)
    with stopped(model, optimizer=optimizer, record=tmp_path / "run") as diagnoses:
        mean(tag_before(model, zeros_at((9, 4), 3))).backward()
        optimizer.step()
    (diagnosis,) = diagnoses
    values = json.loads(json.dumps(diagnosis.to_json(), allow_nan=False))
    assert {key: values[key] for key in KEYS} == KEYS
    rows = values["rows"]
    assert (rows["rows"], rows["size"], rows["input_rows"], rows["ids"]) == ([3], 9, [3], [30])
    dividend, divisor = values["inputs"]
    (output,) = values["outputs"]
    assert (dividend["name"], divisor["name"]) == ("self", "other")
    assert (divisor["shape"], divisor["dtype"], divisor["low"]) == ([9, 1], "float32", 0.0)
    assert (output["nan"], output["inf"], output["numel"]) == (4, 0, 36)
    with gradsurgeon.open_run(tmp_path / "run") as run:
        (event,) = run.events
    assert event.diagnosis == values
    assert event.sample_ids == tuple(IDS.tolist())
    assert gradsurgeon.replay(values["bundle"], Block(unit)).rows == diagnosis.rows
    step = json.loads((Path(values["bundle"]) / "step.json").read_text())
    assert step["diagnosis"] == {**values, "bundle": ""}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_ragged_dimension_is_no_obstacle(tmp_path: Path) -> None:
    model = Block(lambda x: (x - 100).sqrt())
    optimizer = sgd(model)
    parts = [torch.ones(2, 4), torch.zeros(4, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with (
        gradsurgeon.apply(model, TRAP, optimizer=optimizer, record=tmp_path / "run"),
        pytest.raises(NonFiniteGradientError),
    ):
        first, second = model(nested).unbind()
        (first.sum() + second.sum()).backward()
        optimizer.step()
    with gradsurgeon.open_run(tmp_path / "run") as run:
        (event,) = run.events
    assert event.diagnosis is not None
    assert event.diagnosis["outputs"][0]["shape"] == [2, -1, 4]


def test_a_diagnosis_without_a_culprit_has_all_keys() -> None:
    nobody = Diagnosis("not reproduced", ("the model has changed",), 7, 1).to_json()
    assert (nobody["certainty"], nobody["op"], nobody["rows"]) == ("not reproduced", "", None)
    assert set(nobody) > set(KEYS)
