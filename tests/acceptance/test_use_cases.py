"""The page of what people do with gradients: each rule ends as the code by hand does, here or in the test that is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import guide
import pytest
import torch
from migration import Loop, Net, agree
from torch import Tensor

from gradsurgeon import Edit, EditRule, actions

pytestmark = pytest.mark.slow

# By use case: where a script has the code, and the code.
BY_HAND = {
    "global clip, inf-norm": ("after backward", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, float('inf'))"),
    "clip every second step": ("after backward", "step % 2 or torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"),
    "no gradient for biases": ("after backward", "for m in (model.body, model.head): m.bias.grad.zero_()"),
    "layer-wise decay of gradients": ("after backward", "for p in model.body.parameters(): p.grad *= 0.5"),
    "layer-wise learning rates that Adam does not undo": (
        "before forward",
        """
if step == 0:
    old = {}
    def before(*_):
        old.update({p: p.detach().clone() for p in model.body.parameters()})
    def after(*_):
        for p, was in old.items():
            p.data.copy_(was + (p.data - was) * 0.5)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
""",
    ),
    "gradual unfreezing": ("before forward", "for p in model.body.parameters(): p.requires_grad_(step >= 2)"),
    "scale, then clip": (
        "after backward",
        "for p in model.body.parameters(): p.grad *= 0.5\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
    ),
    "half the gradient of a hidden state": ("before forward", "on_output(lambda g: g * 0.5)"),
    "gradient reversal": ("before forward", "on_output(lambda g: -g)"),
    "gradient reversal, scheduled": (
        "before forward",
        "factor = -1 if step >= 3 else 1 - 2 / (1 + math.exp(-10 * step / 3))\non_output(lambda g: g * factor)",
    ),
    "clamp the gradient of an LSTM state": ("before forward", "on_output(lambda g: g.clamp(-0.1, 0.1))"),
    "guided backpropagation": ("before forward", "on_output(lambda g: g.clamp(min=0))"),
    "zero ablation": ("before forward", "hooked(lambda module, inputs, out: torch.zeros_like(out))"),
    "clamp outputs for float16": ("before forward", "hooked(lambda module, inputs, out: out.clamp(-0.5, 0.5))"),
    "weight clipping (WGAN)": (
        "before forward",
        "step or optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()] and None)",
    ),
    "max-norm": (
        "before forward",
        """
def after(*_):
    for m in (model.body, model.head):
        m.weight.data.copy_(torch.renorm(m.weight.data, 2, 0, 0.3))
step or optimizer.register_step_post_hook(after)
""",
    ),
    "rows that nothing moves": (
        "before forward",
        """
if step == 0:
    w = model.body.weight
    first = w[0].detach().clone()
    def after(*_):
        w.data[0] = first
        optimizer.state[w]["momentum_buffer"][0] = 0
    optimizer.register_step_post_hook(after)
""",
    ),
    "normalised gradients": ("each parameter", "p.register_hook(lambda g: g / (g.norm() + 1e-8))"),
    "the upper half of a gradient alone": ("each parameter", "p.register_hook(lambda g: g * (g.abs() >= g.abs().median()))"),
    "low rank": ("each parameter", "p.dim() < 2 or p.register_hook(rank_one)"),
    "gradient dropout": (
        "each parameter",
        "p.register_hook(lambda g: g * (torch.rand(g.shape, generator=torch.Generator().manual_seed(0)) > 0.5))",
    ),
    "steering of a hidden state": ("before forward", "hooked(lambda module, inputs, out: out + 0.1)"),
    "each sample's activations clipped": (
        "before forward",
        "hooked(lambda module, inputs, out: out / out.norm(dim=1, keepdim=True).clamp(min=0.5) * 0.5)",
    ),
    "FedProx": ("each parameter", "p.register_hook(lambda g: g + 0.1 * (p.detach() - OLD[name]))"),
    "weight decay of one's own": ("each parameter", "p.register_hook(lambda g: g + 0.1 * p.detach())"),
}  # fmt: skip
ELSEWHERE = {
    "skip the step of a loss spike": "tests/laws/test_loss_spikes.py::test_an_update_whose_loss_is_a_spike_does_not_take_place",
    "what Adam keeps": "tests/laws/test_state_records.py::test_records_are_the_numbers_of_the_state",
    "lottery tickets, 2:4 masks": "tests/laws/test_mask_files.py::test_a_mask_does_what_a_hook_does",
    "the same, exact under decay and momentum": "tests/laws/test_mask_files.py::test_frozen_elements_stay_bit_for_bit",
    "MGDA; IMTL-G; CAGrad": "tests/laws/test_combine.py::test_each_method_equals_the_aggregator_of_torchjd",
    "A-GEM": "tests/laws/test_combine.py::test_a_memory_only_constrains",
    "conflict of losses": "tests/laws/test_combine.py::test_a_conflict_is_recorded_of_each_part",
    "per-layer norms": "tests/laws/test_norm_log.py::test_norms_are_those_of_closures",
    "mean, minimum, maximum, zeros; mean of absolutes (`l1` by `numel`)": "tests/unit/test_statistics.py::test_many_at_once_one_by_one_and_by_hand",
    "total norm": "tests/laws/test_whole_norms.py::test_it_is_what_clip_grad_norm_returns_before_and_after_the_clip",
    "update ratio; weight norm": "tests/laws/test_weight_records.py::test_records_are_those_of_copies_by_hand",
    "histogram": "tests/laws/test_histogram.py::test_every_element_is_counted_where_it_belongs",
    "AutoClip": "tests/laws/test_fixed_bounds.py::test_a_percentile_is_autoclip_by_hand",
    "annealed noise": "tests/laws/test_noise_and_centralize.py::test_the_deviation_sinks_as_in_the_paper",
    "a gradient in the middle of a forward pass": "tests/laws/test_modules.py::test_a_tagged_intermediate_result_without_retain_grad",
    "saliency; Grad-CAM; attention maps; Fisher; cosine between steps": "tests/laws/test_modules.py::test_captures_are_what_a_module_took_and_returned_and_what_came_back",
    "a hook on the loss, 1/H (TD-MPC)": "tests/laws/test_modules.py::test_a_tagged_loss_is_scaled_as_by_a_hook_on_it",
    "edits under a gradient penalty (WGAN-GP)": "tests/laws/test_autograd_grad.py::test_a_gradient_penalty_with_rules_on_parameters",
    "sparse embeddings": "tests/laws/test_mask.py::test_rows_of_a_sparse_gradient",
    "an optimizer in backward": "tests/laws/test_optimizer_in_backward.py::test_what_concerns_one_parameter_acts_as_with_one_optimizer",
}


class Row(NamedTuple):
    rule: str
    same: str


def rows() -> dict[str, Row]:
    lines = guide.text("use_cases").partition("| what people do |")[2].partition("\n\n")[0]
    found = {}
    for line in lines.splitlines()[2:]:
        title, rule, same = (cell.strip() for cell in line.strip("| ").split(" | "))
        found[title] = Row(rule, same)
    return found


ROWS = rows()
OLD = {name: param.detach().clone() + 0.5 for name, param in Net().named_parameters()}


def rank_one(grad: Tensor) -> Tensor:
    direction: Tensor = torch.linalg.svd(grad).Vh[:1]
    return grad @ direction.T @ direction


class Script(Loop):
    """A loop whose code finds hooks on the output of the body, registered once, that call what the newest step says."""

    def _do(self, place: str, step: int) -> None:
        import math

        edits: dict[str, Any] = self.names.setdefault("edits", {})

        def hooked(edit: Any) -> None:
            if not edits:
                body = self.names["model"].body
                # The newest edit is looked up at each call.
                body.register_forward_hook(lambda *call: edits["newest"](*call))  # noqa: PLW0108
            edits["newest"] = edit

        def on_output(edit: Any) -> None:
            hooked(lambda _module, _inputs, out: out.register_hook(edit) and None)

        self.names |= {"math": math, "hooked": hooked, "on_output": on_output}
        super()._do(place, step)


@pytest.fixture
def own() -> Iterator[None]:
    known = dict(actions.known_actions)
    yield
    actions.known_actions.clear()
    actions.known_actions.update(known)


def document(rule: str) -> str:
    """Return a row's rules as a file; an edit of one's own becomes an action first."""
    if rule.startswith("`Edit("):
        code = rule.strip("`")
        names = {"Edit": Edit, "torch": torch, "OLD": OLD}

        class Own(EditRule):
            action: Literal["own-edit"] = "own-edit"

            def compile(self) -> Edit:
                edit = eval(code, names)
                assert isinstance(edit, Edit)
                return edit

        rule = '`{id: own, action: own-edit, params: "*", at: step}`'
        if "lambda out" in code:
            rule = '`{id: own, action: own-edit, modules: "body", tensor: output}`'
    entries = re.findall("`([^`]+)`", rule)
    return "version: 1\nrules:\n" + "".join(f"  - {entry}\n" for entry in entries)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("title", BY_HAND)
def test_a_rule_ends_as_the_code_by_hand(title: str) -> None:
    row = ROWS[title]
    place, code = BY_HAND[title]
    names = {"OLD": OLD, "rank_one": rank_one}
    wanted = Script(code, place, names=dict(names)).run()
    assert agree(row.same, Script(names=dict(names)).run(document(row.rule)), wanted)
    assert not agree("rounding", Script(names=dict(names)).run(), wanted)


def test_a_test_is_behind_every_row() -> None:
    linked = {title for title, row in ROWS.items() if row.same == "see there"}
    *_, statistics, noise_scale, logits = ROWS
    assert set(ROWS) == {*BY_HAND, *ELSEWHERE, *linked, statistics, noise_scale, logits}
    for title in linked:
        assert re.fullmatch(r"\[\w+\]\((hooks|own_actions)\.md\)", ROWS[title].rule)
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (guide.ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("title", ELSEWHERE)
def test_the_rules_of_other_tests_are_rules(title: str) -> None:
    (entry,) = re.findall("`([^`]+)`", ROWS[title].rule)
    rule, flaws = actions.check_rule(guide_entry(entry))
    assert rule is not None, flaws


def guide_entry(text: str) -> dict[str, Any]:
    import yaml

    entry = yaml.safe_load(text)
    assert isinstance(entry, dict)
    return entry
