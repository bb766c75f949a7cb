"""The graph of a loss shows a sigmoid or softmax too many, a softmax of one number, and shapes that broadcast."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from ranks import Json
from small import rule_file, sgd, take_step
from torch import Tensor, nn

import gradsurgeon

RULE: Json = {"id": "structure", "action": "check-structure", "params": "*"}
UPDATES: Json = {"id": "updates", "action": "check-update", "params": "*"}
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
TARGET = torch.linspace(0.1, 0.9, 6)


class Gate(nn.Module):
    """Mixes experts by a softmax over the chosen ones."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        if self.before:
            weights, chosen = logits.softmax(-1).topk(1)
        else:
            top, chosen = logits.topk(1)
            weights = top.softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        picked = outputs.gather(1, chosen[:, :, None].expand(-1, -1, 3)).squeeze(1)
        return torch.as_tensor(picked * weights)


class Attention(nn.Module):
    """Attends to one token only, as at the first step of a generation."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.value = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None]
        scores = (self.query(tokens) @ tokens.transpose(1, 2)).softmax(-1)
        return torch.as_tensor((F.dropout(scores, 0.1) @ self.value(tokens)).squeeze(1))


class Neighbours(nn.Module):
    """Attends to the neighbours of each node of a graph, and each node has only one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.score = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        nodes = self.layer(x)
        neighbours = nodes.roll(1, 0)[:, None]
        pairs = torch.cat([nodes[:, None], neighbours], -1)
        weights = self.score(pairs).squeeze(-1).softmax(1)
        return torch.as_tensor((weights.unsqueeze(-1) * neighbours).sum(1))


Case = tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], str]

FAULTY: dict[str, Case] = {
    "sigmoid twice": (
        lambda: nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()),
        lambda out: F.binary_cross_entropy_with_logits(out.squeeze(1), TARGET),
        "is given the result of a sigmoid",
    ),
    "softmax into cross entropy": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)),
        lambda out: F.cross_entropy(out, LABELS),
        "`cross_entropy` or `log_softmax` is given the result of a softmax, and applies another",
    ),
    "softmax into nll": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)),
        lambda out: F.nll_loss(out, LABELS),
        "`nll_loss` is given the result of a softmax, not of a log_softmax",
    ),
    "cross entropy of one class": (
        lambda: nn.Linear(4, 1),
        lambda out: F.cross_entropy(out, TARGET[:, None]),
        "a log_softmax runs over a dimension of size 1 (shape [6, 1], dim 1): its result is always 0",
    ),
    "soft labels of one class": (
        lambda: nn.Linear(4, 1),
        lambda out: -(TARGET[:, None] * out.log_softmax(-1)).sum(1).mean(),
        "a log_softmax runs over a dimension of size 1 (shape [6, 1], dim 1): its result is always 0",
    ),
    "softmax of one logit": (
        lambda: nn.Sequential(nn.Linear(4, 1), nn.Softmax(-1)),
        lambda out: F.binary_cross_entropy(out.squeeze(1), TARGET),
        "a softmax runs over a dimension of size 1 (shape [6, 1], dim 1): its result is always 1",
    ),
    "router of one": (
        lambda: Gate(before=False),
        lambda out: F.cross_entropy(out, LABELS),
        "a softmax runs over a dimension of size 1 (shape [6, 1], dim 1)",
    ),
    "column with row": (
        lambda: nn.Linear(4, 1),
        lambda out: F.mse_loss(out, TARGET),
        "`mse_loss` compares a prediction of shape [6, 1] with a target of another shape: both were broadcast to [6, 6]",
    ),
    "a column less a row": (
        lambda: nn.Linear(4, 1),
        lambda out: (out - TARGET).square().mean(),
        "a prediction of 6 elements was subtracted from a target of another shape, or a target from it: the difference was "
        "broadcast to [6, 6], so each prediction is compared with each target",
    ),
    "a row less a column": (
        lambda: nn.Linear(4, 1),
        lambda out: ((TARGET[:, None] - out.squeeze(1)) ** 2).sum(),
        "broadcast to [6, 6]",
    ),
    "a bounded column less a row": (
        lambda: nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()),
        lambda out: (out - TARGET).pow(2).mean(),
        "broadcast to [6, 6]",
    ),
    "row with column": (
        lambda: nn.Linear(4, 1),
        lambda out: F.smooth_l1_loss(out.squeeze(1), TARGET[:, None], reduction="sum"),
        "`smooth_l1_loss` compares a prediction of shape [6] with",
    ),
    "column with row, by magnitude": (
        lambda: nn.Linear(4, 1),
        lambda out: F.l1_loss(out, TARGET),
        "a prediction of 6 elements was subtracted from a target of another shape",
    ),
    "row minus column": (
        lambda: nn.Linear(4, 1),
        lambda out: (TARGET - out).abs().sum(),
        "a prediction of 6 elements was subtracted from a target of another shape",
    ),
}

BATCHES = count()

HEALTHY: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "logits": (
        lambda: nn.Linear(4, 1),
        lambda out: F.binary_cross_entropy_with_logits(out.squeeze(1), TARGET),
    ),
    "mutual distillation": (
        lambda: nn.Linear(4, 2),
        lambda out: F.binary_cross_entropy_with_logits(out[:, 0], out[:, 1].sigmoid()),
    ),
    "distillation by divergence": (
        lambda: nn.Linear(4, 3),
        lambda out: F.kl_div(out.log_softmax(-1), out.detach().softmax(-1), reduction="batchmean"),
    ),
    "softmax into a mean of squares": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)),
        lambda out: F.mse_loss(out, F.one_hot(LABELS).float()),
    ),
    "attention to one token": (Attention, lambda out: out.square().mean()),
    "a graph attention to one neighbour": (Neighbours, lambda out: F.cross_entropy(out, LABELS)),
    "heads of one and of three choices": (
        lambda: nn.Linear(4, 4),
        lambda out: F.cross_entropy(out[:, :3], LABELS) - out[:, 3:].log_softmax(-1).mean(),
    ),
    "router before the choice": (
        lambda: Gate(before=True),
        lambda out: F.cross_entropy(out, LABELS),
    ),
    "every pair of quantiles": (
        lambda: nn.Linear(4, 6),
        lambda out: F.smooth_l1_loss(
            out[:, :, None].expand(-1, -1, 6), TARGET.expand(6, 6)[:, None].expand(-1, 6, -1), reduction="none"
        ).mean(),
    ),
    "every pair, trained on both sides": (
        lambda: nn.Linear(4, 1),
        lambda out: F.mse_loss(out.expand(6, 6), out.squeeze(1).expand(6, 6)),
    ),
    "a batch of one": (
        lambda: nn.Linear(4, 1),
        lambda out: F.mse_loss(out[:1], TARGET[:1]),
    ),
    "a batch with one choice": (
        lambda: nn.Linear(4, 2),
        lambda out: -out[:, : 1 + next(BATCHES) % 2].log_softmax(-1).mean(),
    ),
    "a mixture of one": (
        lambda: nn.Linear(4, 1),
        lambda out: -(out.log_softmax(-1) + out.square().neg()).logsumexp(-1).mean(),
    ),
    "a column for a matrix": (
        lambda: nn.Linear(4, 1),
        lambda out: F.mse_loss(out.expand(6, 6), torch.eye(6)),
    ),
    "a column less a matrix": (
        lambda: nn.Linear(4, 1),
        lambda out: (out - torch.eye(6)).square().mean(),
    ),
    "a matrix less a matrix of one row": (
        lambda: nn.Linear(4, 6),
        lambda out: (out - TARGET).square().mean(),
    ),
    "distances of all pairs": (
        lambda: nn.Linear(4, 1),
        lambda out: (out - out.squeeze(1)).square().mean(),
    ),
    "an energy distance": (
        lambda: nn.Linear(4, 1),
        lambda out: 2 * (out - TARGET).abs().mean() - (out - out.t()).abs().mean(),
    ),
    "an energy distance of squares": (
        lambda: nn.Linear(4, 1),
        lambda out: 2 * (out - TARGET).square().mean() - (out - out.T).square().mean(),
    ),
    "distances to the pairs of an earlier network": (
        lambda: nn.Linear(4, 1),
        lambda out: (out.squeeze(1)[:, None] - out.detach().squeeze(1)).square().mean(),
    ),
    "a kernel over all pairs": (
        lambda: nn.Linear(4, 1),
        lambda out: (out - TARGET).square().neg().exp().mean(),
    ),
    "a contrast of all pairs": (
        lambda: nn.Linear(4, 1),
        lambda out: F.cross_entropy(-(out[:, 0][:, None] - TARGET[None]) ** 2, torch.arange(6)),
    ),
    "a column minus a column": (
        lambda: nn.Linear(4, 1),
        lambda out: (out - TARGET[:, None]).square().mean(),
    ),
    "distances to centres": (
        lambda: nn.Linear(4, 1),
        lambda out: (out - TARGET).square().amin(1).mean(),
    ),
    "a factorized layer": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)),
        lambda out: out.square().mean(),
    ),
    "pairs that the script makes": (
        lambda: nn.Linear(4, 1),
        lambda out: F.smooth_l1_loss(out[:, 0, None].expand(6, 6), TARGET.expand(6, 6)),
    ),
    "shapes that fit": (
        lambda: nn.Linear(4, 1),
        lambda out: F.mse_loss(out, TARGET[:, None]),
    ),
}  # fmt: skip


def findings(
    make: Callable[[], nn.Module],
    loss: Callable[[Tensor], Tensor],
    steps: int = 6,
    rules: tuple[Json, ...] = (RULE,),
) -> list[gradsurgeon.Event]:
    torch.manual_seed(0)
    model = make()
    optimizer = sgd(model, 0.01)
    with gradsurgeon.apply(model, rule_file(*rules), optimizer=optimizer) as session:
        for _ in range(steps):
            take_step(optimizer, loss(model(torch.randn(6, 4))))
        return session.events


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", FAULTY)
def test_a_loss_that_does_not_fit_together_is_found_once_with_its_line(name: str) -> None:
    make, loss, text = FAULTY[name]
    check, line = findings(make, loss)
    # One choice is told once three passes in a row had no more.
    step = 2 * ("dimension of size 1" in text)
    assert (check.kind, check.rule, check.step, check.name) == ("check", "structure", step, "")
    assert text in check.message
    assert (line.kind, line.step) == ("notice", step)
    assert f": {__file__}:" in line.message


@pytest.mark.parametrize(
    ("rules", "kinds"),
    [((RULE, UPDATES), ["check", "notice"]), ((UPDATES,), ["fact"])],
    ids=["of the graph and of updates", "of updates"],
)
def test_a_softmax_of_one_number_is_told_by_one_check(
    rules: tuple[Json, ...], kinds: list[str]
) -> None:
    make, loss, _ = FAULTY["softmax of one logit"]
    assert [event.kind for event in findings(make, loss, 16, rules)] == kinds


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", HEALTHY)
def test_a_loss_that_fits_together_is_silent(name: str) -> None:
    make, loss = HEALTHY[name]
    assert findings(make, loss) == []


def float32_inside(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = model[:2](x)
            with torch.autocast("cpu", enabled=False):
                x = model[2:4](x.float())
            return torch.as_tensor(model[4](x))

    return run


def stack_of(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), activation(), nn.Linear(8, 6), activation(), nn.Linear(6, 1)
    )


@pytest.mark.parametrize(
    ("activation", "run", "fact"),
    [
        (nn.Identity, lambda model: model, "3 linear layers (4 to 8 to 6 to 1) follow one another"),
        (nn.ReLU, float32_inside, "linear layers compute in bfloat16, but 1 of 3 in float32"),
        (nn.ReLU, lambda model: model, ""),
    ],
)
def test_what_linear_layers_have_between_them_and_compute_in_is_a_fact(
    activation: Callable[[], nn.Module],
    run: Callable[[nn.Sequential], Callable[[Tensor], Tensor]],
    fact: str,
) -> None:
    model = stack_of(activation)
    optimizer = sgd(model, 0.01)
    with gradsurgeon.apply(model, rule_file(RULE), optimizer=optimizer) as session:
        for _ in range(4):
            take_step(optimizer, run(model)(torch.randn(6, 4)).float().square().mean())
        events = session.events
    assert [event.kind for event in events] == ["fact"] * bool(fact)
    assert all(fact in event.message for event in events)


@pytest.mark.parametrize(
    ("share", "passes", "facts"), [(None, 4, 1), (0.25, 4, 0), (None, 2, 0), (None, 1, 0)]
)
def test_passes_that_are_added_up_are_a_fact(share: float | None, passes: int, facts: int) -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model, 0.01)
    with gradsurgeon.apply(model, rule_file(RULE), optimizer=optimizer) as session:
        for _ in range(4):
            for _ in range(passes):
                loss = model(torch.randn(6, 4)).square().mean()
                if share is not None:
                    loss = loss * share
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        texts = [event.message for event in session.events if event.kind == "fact"]
    assert len(texts) == facts
    assert all("losses are not divided by a number" in text for text in texts)


def test_passes_that_the_script_clears_are_not_added_up() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model, 0.01)
    with gradsurgeon.apply(model, rule_file(RULE), optimizer=optimizer) as session:
        for _ in range(4):
            for _ in range(3):
                model(torch.randn(6, 4)).square().mean().backward()
            take_step(optimizer, model(torch.randn(6, 4)).square().mean())
        assert session.events == []


@pytest.mark.parametrize("detached", [True, False])
def test_a_fault_is_told_of_one_of_two_models(detached: bool) -> None:
    judge = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    maker = nn.Linear(4, 4)
    optimizers = [sgd(model, 0.01) for model in (maker, judge)]
    with (
        gradsurgeon.apply(maker, rule_file(RULE), optimizer=optimizers[0]) as first,
        gradsurgeon.apply(judge, rule_file(RULE), optimizer=optimizers[1]) as second,
    ):
        for _ in range(4):
            made = maker(torch.randn(6, 4))
            if detached:
                made = made.detach()
            loss = F.binary_cross_entropy_with_logits(judge(made).squeeze(1), TARGET)
            take_step(optimizers[1], loss)
            take_step(optimizers[0], maker(torch.randn(6, 4)).square().mean())
        counts = [
            len([event for event in session.events if event.kind == "check"])
            for session in (first, second)
        ]
    assert sum(counts) == 1
    # The one whose parameters are in the pass.
    assert counts[1] == 1 or not detached


def test_a_check_that_raises_waits_for_no_line() -> None:
    make, loss, text = FAULTY["softmax into nll"]
    model = make()
    optimizer = sgd(model)
    rules = rule_file({**RULE, "then": "raise"})
    with (
        gradsurgeon.apply(model, rules, optimizer=optimizer),
        pytest.raises(gradsurgeon.CheckError) as caught,
    ):
        take_step(optimizer, loss(model(torch.randn(6, 4))))
    assert text in str(caught.value)
    assert not torch.is_anomaly_enabled()
