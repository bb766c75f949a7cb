"""After a diagnosis the step is run again under the remedies that fit, and the report says which of them help."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from laws.test_forensics import Net, batch, diagnosed
from models import same
from small import attach, rule_file, sgd, take_step
from torch import Tensor, nn

from gradsurgeon.common.tried import Tried, in_words

INF = float("inf")
EIGHT = torch.arange(1.0, 33).view(8, 4)
ONE_ZERO_ROW = EIGHT * (torch.arange(8) != 3)[:, None]
HELPED = (True, True)


class Returned(nn.Module):
    """A model that returns its loss, and a finite tensor to know a replay by."""

    def __init__(self, act: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))
        self.act = act

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.act(x * self.weight).float().square().mean(), x.detach().nan_to_num()


def tried(
    act: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tried, ...]:
    return diagnosed(Returned(act, dtype), x.to(dtype), loss=lambda outputs: outputs[0]).tried


def rooted(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.sqrt(), torch.zeros_like(x))


def attended(x: Tensor) -> Tensor:
    return x * x.masked_fill(x == 0, -INF).softmax(-1)


AT_BOUND = torch.zeros((), requires_grad=True)
# Since 2.14 the clamp of torch passes no gradient at its bound, so the infinite one of a root of 0 ends there.
CLAMPS_GRADIENT = not torch.autograd.grad(AT_BOUND.clamp(min=0), AT_BOUND)[0]
# By cause: what runs, on what, and the remedies with what they do to outputs and gradients.
CAUSES: dict[
    str, tuple[Callable[[Tensor], Tensor], Tensor, dict[str, tuple[bool, bool]]]
] = {
    "the root of negatives that a mask hides": (
        rooted,
        EIGHT - 9.5,
        {"without rows 0, 1 and 2 of the input": HELPED, "with `clamp(min=0)`": HELPED},
    ),
    "the root of negatives and of 0": (rooted, EIGHT - 9, {"with `clamp(min=0)`": (True, CLAMPS_GRADIENT)}),
    "the root of 0": (
        Tensor.sqrt,
        ONE_ZERO_ROW,
        {"without row 3 of the input": HELPED, "with `(x + 1e-08)`": HELPED},
    ),
    "the logarithm of 0": (
        Tensor.log,
        ONE_ZERO_ROW,
        {"without row 3 of the input": HELPED, "with `clamp(min=1e-08)`": HELPED},
    ),
    "a division by a norm of 0": (
        lambda x: x / x.norm(dim=-1, keepdim=True),
        ONE_ZERO_ROW,
        {"without row 3 of the input": HELPED, "with `clamp(min=1e-08)`": HELPED},
    ),
    "1 over the root of 0": (
        lambda x: x * x.square().mean(-1, keepdim=True).rsqrt(),
        ONE_ZERO_ROW,
        {"without row 3 of the input": HELPED, "with `(x + 1e-08)`": HELPED},
    ),
    "a fraction as exponent": (lambda x: (x - 40) ** 0.3, EIGHT, {"with `clamp(min=1e-08)`": HELPED}),
    "an angle of vectors that are alike": (
        lambda x: (x / x.detach()).acos(),
        EIGHT,
        {"with `clamp(-1 + 1e-06, 1 - 1e-06)`": HELPED},
    ),
    "an exponential": (lambda x: (x * 10).exp(), EIGHT, {"with `clamp(max=10)`": HELPED, "in float64 from there on": (False, False)}),
    "a row that is masked completely": (
        attended,
        ONE_ZERO_ROW,
        {"without row 3 of the input": HELPED},
    ),
    "a matrix without an inverse": (
        lambda x: x @ torch.linalg.inv_ex(x.T @ x * 0 + 1)[0],
        EIGHT,
        {"with `1e-06 * torch.eye(n)`": HELPED},
    ),
    "an input that is not finite": (
        lambda x: x,
        ONE_ZERO_ROW / ONE_ZERO_ROW,
        {"without row 3 of the input": HELPED},
    ),
    "a product beyond float32": (
        lambda x: (x * 1e30 * (x * 1e30)).log(),
        EIGHT,
        {"in float64 from there on": HELPED},
    ),
    "two faults, of which the first is mended": (
        lambda x: (x - 40).log() / (x * 0),
        EIGHT,
        {"with `clamp(min=1e-08)`": (False, False)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_each_remedy_that_fits_is_tried(name: str) -> None:
    act, x, expected = CAUSES[name]
    made = tried(act, x)
    told = {one.remedy: (one.outputs_finite, one.gradients_finite) for one in made}
    assert told == expected
    for one in made:
        assert one.loss is not None
        assert (abs(one.loss) < INF) == one.outputs_finite


def test_an_overflow_of_half_precision_is_tried_in_a_wider_format() -> None:
    def act(x: Tensor) -> Tensor:
        scores = (x * 300) @ (x.T * 300)
        # What follows has operands of both formats.
        return scores.softmax(-1) @ torch.eye(8, dtype=x.dtype)

    (one,) = tried(act, EIGHT, torch.float16)
    assert (one.remedy, one.outputs_finite, one.gradients_finite) == (
        "in float32 from there on",
        True,
        True,
    )
    assert one.loss == pytest.approx(1 / 8, rel=0.1)


def test_a_loss_outside_is_not_tried_and_that_is_said() -> None:
    diagnosis = diagnosed(Net(lambda x: (x - 100).log()), batch())
    (one,) = diagnosis.tried
    # The gradients that came back are NaN.
    assert one == Tried("with `clamp(min=1e-08)`", True)
    assert (
        "  tried in the replay: with `clamp(min=1e-08)` the outputs are finite; "
        "the loss is made outside of the model and was not tried"
    ) in str(diagnosis).splitlines()
    assert diagnosis.to_json()["tried"] == [
        {
            "remedy": "with `clamp(min=1e-08)`",
            "outputs_finite": True,
            "gradients_finite": None,
            "loss": None,
        }
    ]


def test_a_number_that_is_not_yet_the_loss_is_not_told_as_the_loss() -> None:
    model = Returned(lambda x: (x - 100).log(), torch.float32)
    (one,) = diagnosed(model, EIGHT, loss=lambda outputs: outputs[0] * 2).tried
    assert one == Tried("with `clamp(min=1e-08)`", True, True)


def test_gradients_of_rows_that_are_left_out_are_left_out() -> None:
    x = batch()
    x[2] = float("nan")
    (one,) = diagnosed(Net(), x).tried
    assert one == Tried("without row 2 of the input", True, True)


def test_what_writes_into_its_input_is_not_changed() -> None:
    assert tried(lambda x: (x * 0).log_() * x, EIGHT) == ()


def test_a_remedy_that_the_model_refuses_is_said() -> None:
    def act(x: Tensor) -> Tensor:
        return x.log() + torch.zeros(8, 4)

    without, clamped = tried(act, ONE_ZERO_ROW)
    assert str(without).startswith(
        "without row 3 of the input the call raises RuntimeError: The size"
    )
    assert without.to_json()["outputs_finite"] is None
    # The loss of a step that did not run again may well be inside.
    assert in_words([without]) == str(without)
    assert clamped.gradients_finite


class Drawn(nn.Module):
    """Draws numbers, counts its calls and keeps a buffer; a 0 in its input divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = nn.functional.dropout(self.norm(self.layer(x)), 0.1)
        return out / (x[:, :1] != 0)


def trained(*, forensics: bool) -> tuple[list[Tensor], int]:
    torch.manual_seed(3)
    model = Drawn()
    optimizer = sgd(model)
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    with attach(model, {**rule, "forensics": forensics}, optimizer=optimizer) as session:
        for number in range(5):
            x = batch(number)
            x[4, 0] *= number != 2
            take_step(optimizer, model(x).square().mean())
    assert any("tried in the replay" in event.message for event in session.events) == forensics
    return [*model.state_dict().values(), torch.get_rng_state()], model.calls


@pytest.mark.filterwarnings("ignore::gradsurgeon.GradSurgeonWarning")
def test_the_training_goes_on_as_if_nothing_had_been_tried() -> None:
    tensors, calls = trained(forensics=True)
    others, other_calls = trained(forensics=False)
    assert same(tensors, others)
    assert calls == other_calls == 5
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_rule_of_the_file_that_made_it_is_off_in_the_replay() -> None:
    trap = {"id": "trap", "action": "nan-trap", "params": "*"}
    boost = {"id": "boost", "action": "scale", "modules": "body", "tensor": "output"}
    rules = rule_file(trap, {**boost, "factor": 1e39})
    (one,) = diagnosed(Net(), batch(), rules=rules).tried
    assert one == Tried("without the rules boost", True)


def test_at_most_three_more_replays_run() -> None:
    ran = []

    def act(x: Tensor) -> Tensor:
        ran.append(len(x))
        return (x.half() * 6e4).log()

    tried(act, ONE_ZERO_ROW - 1)
    # The call, its replay, the search for the samples, and what was tried.
    assert len(ran) <= 3 + 3
