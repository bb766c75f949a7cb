"""Models as people write them: kept calls never disturb healthy training, a replay disturbs nothing, and blames what did it."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from laws.test_forensics import LOG, RULE, TRAP, Net, batch, brief, diagnosed, mean, stopped
from pairs import singly
from small import attach, linears, messages, rule_file, sgd, take_step
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gradsurgeon
from gradsurgeon.forensics.kept_step import fingerprint
from gradsurgeon.forensics.undisturbed import RandomState

INF, NAN = float("inf"), float("nan")


def linear(x: Tensor) -> Tensor:
    """Return numbers of both signs that have a gradient."""
    weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
    return x @ weight


# Healthy training.


def with_buffer(buffer: Tensor) -> nn.Module:
    model = Net()
    model.register_buffer("extra", buffer)
    return model


def inference(shape: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        return torch.ones(shape)


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "a sparse buffer": lambda: with_buffer(torch.eye(4).to_sparse()),
    "a buffer in rows": lambda: with_buffer(torch.eye(4).to_sparse_csr()),
    "a buffer that is a view": lambda: with_buffer(torch.ones(4, 6).t()),
    "a buffer made for inference": lambda: with_buffer(inference((3,))),
    "a quantized buffer": lambda: with_buffer(
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    ),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4))),
}


@pytest.mark.parametrize("case", HEALTHY)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize")
def test_healthy_training_goes_on(case: str) -> None:
    model = HEALTHY[case]()
    optimizer = sgd(model)
    with gradsurgeon.apply(model, TRAP, optimizer=optimizer):
        for number in range(3):
            take_step(optimizer, mean(model(batch(number))))


# The right culprit.


def repaired(x: Tensor) -> Tensor:
    first = x.log()
    first.nan_to_num_()
    return first.detach().add_(linear(x).sqrt())


def with_a_healthy_mask(x: Tensor) -> Tensor:
    mask = torch.ones(4, 4).tril().log()
    return linear(x)[:4].sqrt() + mask


def filled_later(x: Tensor) -> Tensor:
    out = torch.empty(2, *x.shape).fill_(NAN)
    out = torch.empty_like(out)
    out[0] = x
    out[1] = linear(x).sqrt()
    return out[1]


def complex_numbers(x: Tensor) -> Tensor:
    out: Tensor = torch.fft.fft(linear(x).sqrt()).conj().abs()
    return out


def masked(x: Tensor) -> Tensor:
    left = x.detach().log()
    return torch.where(left.isfinite(), left.nan_to_num() * 0 + linear(x).sqrt(), linear(x).sqrt())


CULPRITS = (
    repaired,
    masked,
    with_a_healthy_mask,
    filled_later,
    complex_numbers,
)


@singly(act=CULPRITS, deterministic=[False, True])
def test_memory_that_is_shared_or_written_again_does_not_mislead(
    act: Callable[[Tensor], Tensor], deterministic: bool
) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        diagnosis = diagnosed(Net(act), batch())
    finally:
        torch.use_deterministic_algorithms(False)
    assert brief(diagnosis)[0::4][:2] == ("reproduced", diagnosis.operation)
    assert diagnosis.operation in ("aten.sqrt", "aten.sqrt_")


def test_a_sparse_gradient_is_followed() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, x: Tensor) -> Any:
            return self.table(x).sqrt()

    torch.manual_seed(0)
    diagnosis = diagnosed(Sparse(), torch.tensor([1, 2, 3]))
    assert brief(diagnosis) == ("reproduced", "NaN", "forward", ".", "aten.sqrt", "mathematics")


@pytest.mark.parametrize(
    "act", [lambda x: torch.atanh(x * 0 + 1), lambda x: torch.log1p(x * 0 - 1), torch.logit]
)
def test_a_pole_is_no_overflow(act: Callable[[Tensor], Tensor]) -> None:
    diagnosis = diagnosed(Net(lambda x: act(x * 0 + 1) if act is torch.logit else act(x)), batch())
    assert brief(diagnosis)[5] == "mathematics"


def test_gradients_that_the_script_has_changed_are_not_laid_on_the_model() -> None:
    model = Net(lambda x: torch.where(x > 0, x.sqrt(), x))

    def repair_and_spoil() -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.nan_to_num_()
        bias = model.last.bias.grad
        assert bias is not None
        bias.div_(0)

    diagnosis = diagnosed(model, batch(), before_step=repair_and_spoil)
    assert diagnosis.certainty == "not reproduced"
    assert "the script changed them after backward" in diagnosis.reasons[0]


def test_a_micro_batch_whose_gradients_were_cleared_is_not_to_blame() -> None:
    bad = batch(1)
    bad[0, 0] = 1e3
    act = lambda x: x.log() if bool(x.detach().abs().max() > 50) else (x * 0) / (x * 0)  # noqa: E731
    model = Net(act)
    optimizer = sgd(model)
    with stopped(model) as diagnoses:
        mean(model(bad)).backward()
        take_step(optimizer, mean(model(batch())))
    assert (diagnoses[0].operation, diagnoses[0].micro_batch) == ("aten.div", 2)


class NotDerived(torch.autograd.Function):
    """Its derivative is NaN, of which a graph shows nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("nan")


@pytest.mark.parametrize("bad", [1, 2])
def test_two_passes_through_one_output(bad: int) -> None:
    for act, where, number in (
        (lambda x: (x - x).sqrt(), "backward", bad),
        (NotDerived.apply, "output gradient", 0),
    ):
        model = Net()
        optimizer = sgd(model)
        with stopped(model) as diagnoses:
            out = model(batch())
            for passed in (1, 2):
                loss = act(out) if passed == bad else out
                loss.sum().backward(retain_graph=True)
            optimizer.step()
        assert (diagnoses[0].where, diagnoses[0].micro_batch) == (where, number)
        assert ("the loss of each may be to blame" in diagnoses[0].reasons[0]) is (number == 0)


def test_an_infinity_that_may_be_meant_leaves_a_doubt() -> None:
    model = Net()
    model.last = nn.Sequential(model.last, nn.ReLU())  # type: ignore[assignment]

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Any:
            return self.net(x).log()

    diagnosis = diagnosed(Logs(), batch(), loss=lambda out: (out.exp() * 0).sum() / (out * 0).sum())
    assert diagnosis.certainty == "partial"
    # The loss uses the infinities as they are meant, and divides 0 by 0 by itself.
    diagnosis = diagnosed(
        Logs(), batch(), loss=lambda out: out.exp().sum() * 0 / (out.exp().sum() * 0)
    )
    assert brief(diagnosis)[1:5] == ("NaN", "forward", "", "aten.div")


class Tied(nn.Module):
    """Reads words by a recurrent layer, and writes them with the weight that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(8, 6)
        self.layer = nn.LSTM(6, 6)
        self.write = nn.Linear(6, 8, bias=False)
        self.write.weight = self.read.weight

    def forward(self, words: Tensor) -> Any:
        states: Tensor = self.layer(self.read(words))[0]
        return self.write(states.log())


def test_a_tied_weight_has_one_name_and_is_tied_again() -> None:
    model = Tied()
    before = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    flat = [id(weight) for weight in model.layer._flat_weights]
    diagnosis = diagnosed(model, torch.arange(8)[None])
    # The whole output is NaN, so nothing shows that the replay is alike.
    assert brief(diagnosis) == ("partial", "NaN", "forward", ".", "aten.log", "mathematics")
    after = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    assert after == before
    assert [id(weight) for weight in model.layer._flat_weights] == flat


# The run is undisturbed.


def reentrant(act: Callable[[Tensor], Tensor]) -> nn.Module:
    return Net(lambda x: checkpoint(act, x, use_reentrant=True))


def test_the_backward_pass_of_a_reentrant_checkpoint_is_refused_with_a_remedy() -> None:
    beside = nn.Parameter(torch.ones(4))
    beside.grad = torch.full((4,), 5.0)
    wanted: list[Tensor] = []

    def note() -> None:
        assert beside.grad is not None
        wanted.append(beside.grad.clone())

    model = reentrant(lambda x: (x * beside * 0).square().sqrt())
    diagnosis = diagnosed(model, batch(), before_step=note)
    assert diagnosis.certainty == "not reproduced"
    assert "use_reentrant=False" in diagnosis.reasons[0]
    assert beside.grad is not None
    assert torch.equal(beside.grad.isnan(), wanted[0].isnan())


def test_the_forward_pass_of_a_reentrant_checkpoint_is_judged() -> None:
    diagnosis = diagnosed(reentrant(torch.log), batch())
    assert brief(diagnosis) == ("partial", "NaN", "forward", "body", "aten.log", "mathematics")
    assert diagnosis.tried == ()
    assert diagnosis.reasons[0].endswith("pass `use_reentrant=False`")


def test_a_model_that_trains_another_one_inside_does_not_hang() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            inner = nn.Linear(4, 4)
            optimizer = sgd(inner)
            rules = rule_file({**RULE, "then": "warn"})
            with torch.enable_grad(), gradsurgeon.apply(inner, rules, optimizer=optimizer):
                (inner(x.detach()) - 1e9).sqrt().sum().backward()
                optimizer.step()
            out: Tensor = self.layer(x)
            return out.log()

    torch.manual_seed(0)
    with pytest.warns(gradsurgeon.GradSurgeonWarning):
        diagnosis = diagnosed(Outer(), batch())
    assert diagnosis.operation in ("aten.log", "")


# The loss.


def test_what_the_loss_was_given_is_told_from_what_its_operations_made() -> None:
    weight = torch.tensor(NAN)
    diagnosis = diagnosed(Net(), batch(), loss=lambda out: mean(out) * weight)
    assert (diagnosis.certainty, diagnosis.where) == ("partial", "loss input")
    assert diagnosis.name == "the second input of MulBackward0"
    assert "the loss was given NaN: the second input of MulBackward0" in str(diagnosis)
    assert "\n  is   [] float32: NaN\n" in str(diagnosis)
    target = torch.full((6, 2), NAN)
    diagnosis = diagnosed(Net(), batch(), loss=lambda out: nn.functional.mse_loss(out, target))
    name = "the target of MseLossBackward0"
    assert (diagnosis.where, diagnosis.name) == ("loss input", name)


def test_a_weight_of_a_network_inside_the_loss_is_no_result_of_the_operation_before() -> None:
    judge = nn.Linear(2, 3).requires_grad_(False)
    judge.weight[1, 0] = NAN
    diagnosis = diagnosed(Net(), batch(), loss=lambda out: judge(out.relu()).sum())
    name = "the second matrix of AddmmBackward0"
    assert (diagnosis.where, diagnosis.name) == ("loss input", name)
    weight = judge.weight.requires_grad_()
    diagnosis = diagnosed(Net(), batch(), loss=lambda out: (out.relu() @ weight.T).sum())
    assert (diagnosis.where, diagnosis.name) == ("loss input", "the input of PermuteBackward0")


# What a replay puts back.


class Moving(nn.Module):
    """Reads and changes what it keeps, of all kinds, in its forward pass, and fails at one call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.norm = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.3))
        self.average = torch.zeros(2)
        self.last = torch.zeros(6, 2)
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.counts: defaultdict[str, list[int]] = defaultdict(list, seen=[0])
        self.nested = {"inner": [{"calls": 0}]}
        self.array = np.zeros(2)
        self.chance = torch.Generator().manual_seed(1)
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.state = np.random.RandomState(0)

    def drawn(self) -> float:
        ours = self.random.random() + self.numpy.random() + float(self.state.rand())
        return ours + float(torch.rand((), generator=self.chance)) + random.random()

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(len(self.counts["seen"]))
        self.counts["seen"].append(self.random.randrange(100))
        self.counts["new"].append(1)
        self.nested["inner"][0]["calls"] += 1
        self.array += 1
        out: Tensor = self.norm(self.linear(x)) * (
            self.drawn() + sum(self.recent) + float(self.array.sum())
        )
        out = out + self.average + self.last
        self.last = out.detach()
        self.average.mul_(0.9).add_(self.last.mean(0))
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return (-out.abs()).sqrt() if self.nested["inner"][0]["calls"] == 2 else out


def _moved(*, forensics: bool) -> list[Any]:
    random.seed(0)
    torch.manual_seed(0)
    model = Moving()
    optimizer = sgd(model, 0.01)
    rule = {**RULE, "then": "skip-step", "forensics": forensics}
    hook = model.linear.register_forward_hook(lambda *_: None)
    drawn = []
    with attach(model, rule, optimizer=optimizer) as session:
        for _ in range(4):
            optimizer.zero_grad()
            mean(model(batch())).backward()
            grads = [param.grad for param in model.parameters()]
            # The replay begins with the random numbers of the call, and the training goes on with later ones.
            drawn.append(float(torch.rand(())))
            optimizer.step()
            assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
            drawn.append(float(torch.rand(())))
        (message,) = messages(session, "trap")
    assert list(model.linear._forward_hooks) == [hook.id]
    # It runs as the third call would: what it has kept of Python has moved on, which is said.
    assert ("not reproduced" in message) is forensics
    tensors = [*model.state_dict().values(), model.average, model.last]
    kept = [list(model.recent), dict(model.counts), model.nested, model.array.tolist()]
    return [*[tensor.tolist() for tensor in tensors], *kept, model.drawn(), drawn]


def test_what_a_module_keeps_of_itself_is_put_back() -> None:
    assert _moved(forensics=True) == _moved(forensics=False)


class Mapped(nn.Module):
    """Maps a module over its batch."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        # All that comes out is NaN.
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average.lerp(x.mean(0), 0.1)
        rows: Tensor = torch.func.vmap(lambda row: self.linear(row).sum())(x)
        return (-rows.abs()).sqrt()


def test_modules_below_vmap_are_run_again() -> None:
    diagnosis = diagnosed(Mapped(), batch())
    assert brief(diagnosis)[:5] == ("reproduced", "NaN", "forward", ".", "aten.sqrt")


# What the script gives its model.


class Takes(Net):
    """Takes things out of what it is given, and writes into it."""

    def forward(self, given: Any) -> Any:
        inner = given.pop("inner")
        given["seen"] = inner[0].pop()
        inner.append(given)
        return self.last(self.body(self.first(given["seen"])))


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, lambda g: defaultdict(list, g)])
@pytest.mark.parametrize("cleared", [False, True])
def test_what_the_call_was_given_is_given_to_the_replay(
    kind: Callable[[Any], Any], cleared: bool
) -> None:
    inner: list[Any] = [[batch(1), batch()]]
    given = kind({"inner": inner})
    model = Takes(torch.log)
    optimizer = sgd(model)
    with stopped(model) as diagnoses:
        mean(model(given)).backward()
        if cleared:
            given.clear()
        optimizer.step()
    assert brief(diagnoses[0]) == LOG
    # One call has changed them, and no replay.
    assert [len(inner), len(inner[0]), len(given)] == [2, 1, 0 if cleared else 1]


def test_one_tensor_that_is_given_twice_is_one_in_the_replay() -> None:
    class Same(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x.log() if x is y else x)

    torch.manual_seed(0)
    given = batch()
    diagnosis = diagnosed(Same(), {"x": given, "y": given})
    assert brief(diagnosis)[:5] == ("reproduced", "NaN", "forward", ".", "aten.log")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (lambda: iter([batch(), batch(1)]), "list_iterator"),
        (lambda: {"batches": [(number for number in [batch(), batch(1)])]}, "generator"),
        (lambda: zip([batch(), batch(1)], strict=True), "zip"),
    ],
)
def test_a_call_that_was_given_an_iterator_is_not_run_again(
    given: Callable[[], Any], kind: str
) -> None:
    class Draws(Net):
        def forward(self, source: Any) -> Any:
            batches = source["batches"][0] if isinstance(source, dict) else source
            drawn = next(batches)
            return super().forward(drawn[0] if isinstance(drawn, tuple) else drawn)

    torch.manual_seed(0)
    source = given()
    diagnosis = diagnosed(Draws(torch.log), {"source": source})
    assert diagnosis.reasons == (
        f"the model was given an iterator ({kind}), which a replay would use up: give it the items",
    )
    assert (diagnosis.certainty, diagnosis.where) == ("not reproduced", "")
    left = source["batches"][0] if isinstance(source, dict) else source
    assert len(list(left)) == 1


# Several optimizers.


class Root(nn.Module):
    """Gives an infinite gradient to what comes before it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()).sqrt() + x


_UPDATED = (
    "another optimizer has updated weights since the call, and the replay used the new weights"
)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("order", "reasons"), [((2, 0), (_UPDATED,)), ((0, 2), ()), ((1, 2, 0), (_UPDATED,))]
)
def test_a_step_that_feeds_several_optimizers_is_run_again_for_each(
    given: bool, order: tuple[int, ...], reasons: tuple[str, ...]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Root(), nn.Linear(4, 4)), nn.Linear(4, 2))
    optimizers = [sgd(model[index]) for index in order]
    with stopped(model, optimizer=optimizers if given else None) as diagnoses:
        mean(model(batch())).backward()
        for optimizer in optimizers:
            optimizer.step()
    (diagnosis,) = diagnoses
    assert (diagnosis.where, diagnosis.module, diagnosis.node) == (
        "backward",
        "1.0",
        "SqrtBackward0",
    )
    assert (diagnosis.certainty, diagnosis.reasons) == (
        "partial" if reasons else "reproduced",
        reasons,
    )


@pytest.mark.parametrize("several", [False, True])
def test_calls_are_let_go_of_at_the_next_call(several: bool) -> None:
    model = linears(4, 4, 2)
    optimizers = [sgd(part) for part in (model if several else [model])]

    def called() -> weakref.ref[Tensor]:
        given = batch()
        mean(model(given)).backward()
        return weakref.ref(given)

    with gradsurgeon.apply(model, TRAP, optimizer=optimizers):
        first = called()
        for optimizer in optimizers:
            assert first() is not None
            optimizer.step()
        assert first() is not None
        second = called()
        optimizers[0].step()
        assert second() is not None
        with torch.no_grad():
            model(batch())
        assert second() is None


# What cannot be written.


class OnlyGrows(deque[int]):
    def clear(self) -> None:
        raise TypeError("it only grows")


class Counts(Net):
    """Counts its calls in an attribute that is put back after another one."""

    def __init__(self, held: Any) -> None:
        super().__init__(torch.log)
        self.held, self.calls = held, [0]

    def forward(self, x: Tensor) -> Any:
        self.calls[0] += 1
        if isinstance(self.held, OnlyGrows):
            self.held.append(1)
        return super().forward(x)


@pytest.mark.parametrize(
    "held",
    [
        lambda: np.frombuffer(b"abcd", dtype=np.uint8),
        lambda: [np.broadcast_to(np.ones(1), (2, 3))],
        lambda: MappingProxyType({"a": [1]}),
        OnlyGrows,
    ],
)
def test_what_cannot_be_written_stops_no_other_attribute_from_being_put_back(
    held: Callable[[], Any],
) -> None:
    model = Counts(held())
    diagnosis = diagnosed(model, batch())
    assert model.calls == [1]
    assert len(model.held) == (1 if held is OnlyGrows else len(held()))
    assert (diagnosis.operation, diagnosis.reasons) == ("aten.log", ())
    assert diagnosis.certainty == "reproduced"


# What is held meanwhile.


def test_the_sample_of_a_part_holds_no_more_than_the_part() -> None:
    whole = torch.zeros(64, 1000)
    for part in (whole[:, 0], whole[1], whole[2:3].t()):
        known, of_copy = fingerprint(part), fingerprint(part.clone())
        assert known is not None
        assert of_copy is not None
        assert known[1].untyped_storage().nbytes() == part.nbytes
        assert torch.equal(known[1], of_copy[1])


# How sure it is.


class NegativeRoot(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (-x.square()).sqrt()


class Drops(nn.Module):
    """Leaves blocks out by chance."""

    def __init__(self, chance: Callable[[], float], *, finite: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NegativeRoot() for _ in range(4))
        self.first, self.chance, self.finite = nn.Linear(4, 4), chance, finite
        self.ran: list[int] = []

    def forward(self, x: Tensor) -> Any:
        out = self.first(x)
        for number, block in enumerate(self.blocks):
            if self.chance() >= 0.7:
                self.ran.append(number)
                out = block(out)
        return {"out": out, "first": self.first(x).detach() if self.finite else None}


_NOTHING = "the call returned no finite number to compare the replay with"


@singly(finite=[True, False], seed=[0, 1, 8], chance=[random.random, np.random.random])
def test_random_numbers_of_python_and_numpy_are_those_of_the_step(
    chance: Callable[[], float], seed: int, finite: bool
) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 # what scripts draw from
    model = Drops(chance, finite=finite)
    before = RandomState.now()
    diagnosis = diagnosed(model, batch(), loss=lambda out: mean(out["out"]))
    after = chance()
    before.set()
    # The call has drawn four, and the replay none.
    assert [chance() for _ in range(5)][-1] == after
    assert (diagnosis.operation, diagnosis.module) == ("aten.sqrt", f"blocks.{model.ran[0]}")
    assert diagnosis.reasons == (() if finite else (_NOTHING,))


class Scales(nn.Module):
    """Counts in a buffer, and grows by an attribute that each call moves on."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), 1e30
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.layer(x) * self.scale
        self.scale *= 1e10
        return torch.square(hidden)


def test_a_count_of_calls_is_no_evidence() -> None:
    diagnosis = diagnosed(Scales(), batch())
    assert (diagnosis.certainty, diagnosis.reasons[0]) == ("partial", _NOTHING)


@pytest.mark.parametrize(
    ("layers", "calls", "added"),
    [(nn.BatchNorm1d, 1, 0), (nn.BatchNorm1d, 3, 0), (nn.BatchNorm1d, 1, 1), (nn.LayerNorm, 3, 0)],
)
def test_a_running_mean_is_evidence_unless_it_is_another(
    layers: type[nn.Module], calls: int, added: int
) -> None:
    norm = layers(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, Drops(lambda: 1.0, finite=False))
    diagnosis = diagnosed(
        model,
        *map(batch, range(calls)),
        loss=lambda out: mean(out["out"]),
        before_step=lambda: [buffer.add_(added) for buffer in norm.buffers()],
    )
    assert diagnosis.micro_batch == 1
    is_evidence = layers is nn.BatchNorm1d and not added
    assert diagnosis.reasons == (() if is_evidence else (_NOTHING,))


# Gradients that the script takes for itself.


def with_own_gradients(
    act: Callable[[Tensor], Tensor], use: Callable[[nn.Module, Tensor], Tensor]
) -> gradsurgeon.Diagnosis:
    torch.manual_seed(0)
    model = Net(act)
    optimizer = sgd(model)
    with stopped(model) as diagnoses:
        use(model, batch().requires_grad_()).backward()
        optimizer.step()
    return diagnoses[0]


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return mean(model(x.detach())) + (grad * 0).square().sum(1).sqrt().mean()


def attack(model: nn.Module, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(model(x * 0).sum() / 0, x)
    assert not bool(grad.isfinite().all())
    return (mean(model(x.detach())) - 1e9).sqrt()


def test_a_gradient_penalty_is_blamed_by_its_graph() -> None:
    diagnosis = with_own_gradients(torch.tanh, penalty)
    assert brief(diagnosis) == ("partial", "Inf", "backward", "", "aten.sqrt", "mathematics")


def test_gradients_of_inputs_alone_are_no_gradients_of_the_step() -> None:
    diagnosis = with_own_gradients(torch.tanh, attack)
    assert (diagnosis.certainty, diagnosis.node) == ("partial", "SqrtBackward0")
    # The infinity of the attack has fed nothing.
    assert (diagnosis.micro_batch, diagnosis.micro_batches) == (1, 1)


def test_what_such_a_model_has_made_itself_is_blamed() -> None:
    diagnosis = with_own_gradients(torch.log, penalty)
    assert brief(diagnosis)[1:5] == ("NaN", "forward", "body", "aten.log")
