"""`mask` with `file`: the elements that a file names train, the others get no gradient, or stay bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small import net, sgd, take_step
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import gradsurgeon

Masks = dict[str, Tensor]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: SGD(params, 0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda params: Adam(params, 0.1, weight_decay=0.1),
}
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.uint32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32]


def masks_of(model: nn.Module, dtype: torch.dtype = torch.bool) -> Masks:
    torch.manual_seed(3)
    return {name: (torch.rand_like(p) > 0.5).to(dtype) for name, p in model.named_parameters()}


def rules_in(folder: Path, masks: Masks | None, **options: str) -> Path:
    """Write a rule file, and the masks that it names beside it."""
    if masks is not None:
        save_file(masks, folder / "masks.safetensors")
    rule = {"id": "ticket", "action": "mask", "params": "*", "file": "masks.safetensors"}
    path = folder / "rules.yaml"
    path.write_text(json.dumps({"version": 1, "rules": [{**rule, **options}]}, indent=1))
    return path


def steps(model: nn.Module, optimizer: Optimizer, count: int = 3) -> None:
    for step in range(count):
        torch.manual_seed(step)
        take_step(optimizer, model(torch.randn(5, 4)).square().mean())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_does_what_a_hook_does(
    tmp_path: Path, kind: str, at: str, dtype: torch.dtype
) -> None:
    by_hand = net()
    masks = masks_of(by_hand, dtype)
    for name, param in by_hand.named_parameters():
        param.register_hook(lambda grad, mask=masks[name]: grad * mask.to(grad.dtype))
    steps(by_hand, OPTIMIZERS[kind](by_hand.parameters()))
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with gradsurgeon.apply(model, rules_in(tmp_path, masks, at=at), optimizer=optimizer):
        steps(model, optimizer)
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(one, other)


class Fails(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # it returns nothing
        super().step(closure)
        raise RuntimeError("later")


def test_frozen_elements_stay_in_a_step_that_raises(tmp_path: Path) -> None:
    model = net()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    masks = masks_of(model)
    optimizer = Fails(model.parameters(), 0.1, weight_decay=0.1)
    with gradsurgeon.apply(model, rules_in(tmp_path, masks, then="freeze"), optimizer=optimizer):
        with pytest.raises(RuntimeError, match="later"):
            steps(model, optimizer)
        for name, param in model.named_parameters():
            assert torch.equal(param[~masks[name]], before[name][~masks[name]]), name


def test_what_does_not_train_gets_0_in_the_place_of_nan_also_a_single_number(
    tmp_path: Path,
) -> None:
    model: Any = nn.Linear(2, 1, bias=False)
    model.scale = nn.Parameter(torch.tensor(2.0))
    masks = {"weight": torch.tensor([[0.0, 1.0]]), "scale": torch.tensor(0.0)}
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules_in(tmp_path, masks), optimizer=optimizer):
        take_step(optimizer, model(torch.tensor([torch.nan, 2.0])).sum() + model.scale * 3)
    assert [param.grad.tolist() for param in model.parameters()] == [[[0.0, 2.0]], 0.0]


def test_the_stored_rows_of_a_sparse_gradient_differ_from_step_to_step(tmp_path: Path) -> None:
    table = nn.Embedding(6, 2, sparse=True)
    mask = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [0, 1]])
    optimizer = sgd(table)
    with gradsurgeon.apply(table, rules_in(tmp_path, {"weight": mask}), optimizer=optimizer):
        for rows in ([1, 4, 4], [0, 1, 3], [5, 2]):
            take_step(optimizer, table(torch.tensor(rows)).sum())
            assert table.weight.grad is not None
            counts = torch.bincount(torch.tensor(rows), minlength=6).view(-1, 1)
            assert torch.equal(table.weight.grad.to_dense(), (counts * mask).float())


def tied() -> Any:
    model: Any = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("names", [["0.weight"], ["1.weight"], ["0.weight", "1.weight"]])
def test_the_mask_of_a_tied_weight_has_any_of_its_names(tmp_path: Path, names: list[str]) -> None:
    model = tied()
    mask = torch.tensor([[1, 0], [0, 1], [1, 1]])
    rules = rules_in(tmp_path, {name: mask.clone() for name in names})
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules, optimizer=optimizer):
        take_step(optimizer, model(torch.arange(3)).square().sum())
    assert torch.equal(model[0].weight.grad != 0, mask.bool())


def test_unlike_masks_of_a_tied_weight_are_refused(tmp_path: Path) -> None:
    masks = {"0.weight": torch.ones(3, 2), "1.weight": torch.zeros(3, 2)}
    with pytest.raises(gradsurgeon.BindError, match=r"0\.weight has unlike masks under its names"):
        gradsurgeon.plan(tied(), rules_in(tmp_path, masks))


def test_the_hash_of_rules_has_the_content_of_their_masks(tmp_path: Path) -> None:
    masks = masks_of(net())
    rules = rules_in(tmp_path, masks)
    first, again = (gradsurgeon.load(rules).sha256 for _ in range(2))
    assert first == again
    masks["0.bias"] = ~masks["0.bias"]
    rules_in(tmp_path, masks)
    assert gradsurgeon.load(rules).sha256 != first


def test_masks_are_refused_all_at_once_by_place_and_name(tmp_path: Path) -> None:
    model = net()
    masks = masks_of(model, torch.float32)
    del masks["0.weight"]
    masks["0.bias"] = torch.ones(5)
    masks["2.bias"] = torch.full((2,), 0.5)
    rules = rules_in(tmp_path, masks)
    with pytest.raises(gradsurgeon.BindError) as refused:
        gradsurgeon.plan(model, rules)
    place = f"{rules}:5:10: rule ticket:"
    out = "; leave it out by `exclude`"
    assert list(refused.value.complaints) == [
        f"{place} 0.weight has no mask in masks.safetensors{out}",
        f"{place} 0.bias has the shape [6], and its mask [5]{out}",
        f"{place} 2.bias has a mask in masks.safetensors whose elements are not all 0 or 1{out}",
    ]


def test_masks_of_another_model_are_not_refused_by_each_name(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(6)])
    with pytest.raises(gradsurgeon.BindError) as refused:
        gradsurgeon.plan(model, rules_in(tmp_path, {"h.weight": torch.ones(1)}))
    assert len(refused.value.complaints) == 9
    assert refused.value.complaints[-1].endswith(
        "rule ticket: 4 more parameters cannot have the rule for such reasons"
    )


CUT_OFF = "this is no safetensors file, or one that is cut off"
ABSENT = "there is no file `masks.safetensors` in the folder of the rule file"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (CUT_OFF, b"text"),
        (CUT_OFF, b""),
        (CUT_OFF, b"\2\0\0\0\0\0\0\0[]"),
        (CUT_OFF, b'\7\0\0\0\0\0\0\0{"a":1}'),
        (
            CUT_OFF,
            b'<\0\0\0\0\0\0\0{"0.bias":{"dtype":"BOOL","shape":[6],"data_offsets":[6,0]}}......',
        ),
        (ABSENT, None),
    ],
)
def test_what_is_no_file_of_masks_is_refused(
    tmp_path: Path, text: str, content: bytes | None
) -> None:
    rules = rules_in(tmp_path, None)
    if content is not None:
        (tmp_path / "masks.safetensors").write_bytes(content)
    with pytest.raises(gradsurgeon.RuleFileError) as refused:
        gradsurgeon.apply(net(), rules)
    (problem,) = refused.value.problems
    assert (problem.place.line, problem.check, problem.message) == (8, "bad-include", text)


@pytest.mark.parametrize("cut", [1, 40])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    rules = rules_in(tmp_path, masks_of(net(), torch.float32))
    file = tmp_path / "masks.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(gradsurgeon.RuleFileError, match=CUT_OFF):
        gradsurgeon.plan(net(), rules)


def test_masks_are_read_before_training(tmp_path: Path) -> None:
    model: Any = net()
    model.none = nn.Parameter(torch.empty(0, 3))
    masks = masks_of(model)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, rules_in(tmp_path, masks)):
        (tmp_path / "masks.safetensors").unlink()
        take_step(optimizer, model(torch.randn(5, 4)).sum() + model.none.sum())
    for name, param in model.named_parameters():
        assert not param.grad[~masks[name]].any(), name


def test_masks_lie_beside_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    rules_in(tmp_path / "parts", masks_of(net()))
    top = tmp_path / "top.yaml"
    top.write_text('version: 1\ninclude: ["parts/rules.yaml"]\n')
    assert len(gradsurgeon.plan(net(), top).bindings) == 4


def test_rules_without_a_file_have_no_masks() -> None:
    rule = {"id": "ticket", "action": "mask", "params": "*", "file": "masks.safetensors"}
    with pytest.raises(gradsurgeon.RuleFileError, match="relative to the rule file, and there is"):
        gradsurgeon.load({"version": 1, "rules": [rule]})
    built = gradsurgeon.Mask(id="ticket", params=("*",), file="masks.safetensors")
    with pytest.raises(gradsurgeon.BindError, match="load the rule from one"):
        gradsurgeon.apply(net(), [built])


EDITS: list[dict[str, Any]] = [
    {"action": "clamp", "tensor": "value", "max": -0.9},
    {"action": "clip-norm", "tensor": "value", "per": "unit", "max_norm": 1e-3},
    {"action": "scale", "tensor": "update", "factor": -7.0},
    {"action": "clip-norm", "tensor": "update", "per": "unit", "max_norm": 1e-3},
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit['action']} {edit['tensor']}")
def test_frozen_elements_stay_bit_for_bit(tmp_path: Path, edit: dict[str, Any]) -> None:
    model = net()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    masks = masks_of(model)
    path = rules_in(tmp_path, masks, then="freeze")
    rules = json.loads(path.read_text())
    rows = {"id": "rows", "action": "mask", "params": "2.weight", "rows": ":1", "then": "freeze"}
    # Rules on weights act after the mask, wherever they stand.
    rules["rules"] = [{"id": "edit", "params": "*", **edit}, *rules["rules"], rows]
    path.write_text(json.dumps(rules))
    masks["2.weight"][1:] = False
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    with gradsurgeon.apply(model, path) as session:
        steps(model, optimizer)
    assert session.status()["edit"].fired == 3 * 4
    for name, param in model.named_parameters():
        assert torch.equal(param[~masks[name]], before[name][~masks[name]]), name
        if masks[name].any():
            assert (param[masks[name]] != before[name][masks[name]]).any(), name
        # What Adam keeps of them is as it was made.
        for moment in ("exp_avg", "exp_avg_sq"):
            assert not optimizer.state[param][moment][~masks[name]].any()
