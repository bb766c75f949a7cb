"""`gradsurgeon.integrations` in the real trainers: when the rules act, and what the trainers' own logs show."""

from __future__ import annotations

import logging
import math
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from commands import ROOT, forked
from lightning.pytorch.loggers.logger import Logger
from models import data
from ranks import Json, run_ranks
from small import linears, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers.own_warnings import OWN_WARNINGS
from transformers import Trainer, TrainerCallback, TrainingArguments

import gradsurgeon
from gradsurgeon import GradSurgeonError, GradSurgeonWarning, RuleFileError, runtime
from gradsurgeon.integrations import LightningCallback, TransformersCallback

# Whole trainers: with what they leave for the collector they are kept apart from the tests of the quick suite.
pytestmark = [pytest.mark.slow, *OWN_WARNINGS]

NORMS = {"id": "norms", "action": "norm-log", "params": "*"}
TRAP = {"id": "trap", "action": "nan-trap", "params": "*"}
STEPS, BAD = 6, 2
TOTAL, MEDIAN, NOT_FINITE = (
    f"gradsurgeon/norms/{name}" for name in ("total", "median", "not finite")
)
CHOSEN = "gradsurgeon/norms/net.0.weight/l2"
NET = ("net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias")
BOTH = pytest.mark.parametrize("callback", [LightningCallback, TransformersCallback])


def rules(*given: Json) -> Json:
    return {"version": 1, "rules": list(given or [NORMS])}


def total(session: Any, step: int, names: Sequence[str] = NET) -> float:
    """Return the whole norm of a step, from the records of the session."""
    return math.hypot(*(dict(session.history(name))[step] for name in names))


def steps_of(session: Any, name: str = "net.0.weight") -> list[int]:
    return [step for step, _ in session.history(name)]


def is_free(model: nn.Module) -> bool:
    """Return whether no session is on a model, and none of its hooks."""
    tables = [module._forward_pre_hooks for module in model.modules()]
    return runtime.find(model) is None and not any(tables)


@BOTH
def test_mistakes_show_before_any_training(callback: Any) -> None:
    with pytest.raises(RuleFileError, match="norm-lg"):
        callback(rules({**NORMS, "action": "norm-lg"}))
    with pytest.raises(TypeError, match="start_step"):
        callback(rules(), start_step=3)
    with pytest.raises(TypeError, match="recrod"):
        callback(rules(), recrod="runs/1")


def test_the_package_imports_no_trainer_and_no_torch() -> None:
    code = (
        "import sys, gradsurgeon.integrations as i; print(dir(i))\n"
        "print([m for m in ('torch', 'lightning', 'transformers') if m in sys.modules])\n"
        "sys.modules['lightning'] = sys.modules['pytorch_lightning'] = sys.modules['transformers'] = None\n"
        "for name in dir(i):\n"
        "    try: getattr(i, name)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "['LightningCallback', 'TransformersCallback']",
        "[]",
        "GradSurgeonError LightningCallback needs the library lightning.pytorch, which cannot be imported "
        "(No module named 'lightning.pytorch'; 'lightning' is not a package): pip install 'gradsurgeon[lightning]'",
        "GradSurgeonError TransformersCallback needs the library transformers, which cannot be imported "
        "(import of transformers halted; None in sys.modules): pip install 'gradsurgeon[transformers]'",
    ]


class Net(lightning.LightningModule):
    """Two layers, with a loss that is NaN, or an error, in one batch."""

    def __init__(self, *, bad: int = -1, broken: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = linears(4, 3, 1)
        self._bad, self._broken = bad, broken

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == self._broken:
            raise ZeroDivisionError
        loss: Tensor = self.net(batch).square().mean() * (math.nan if index == self._bad else 1.0)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self)


class Gan(Net):
    """Two optimizers, stepped by hand, the second one in every so many batches."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._every = every

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        for own in self.optimizers()[: 1 + (index % self._every == 0)]:
            own.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            own.step()

    def configure_optimizers(self) -> Any:
        return [sgd(part) for part in self.net]


class Kept(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def having(self, name: str) -> dict[int | None, float]:
        found = [(step, row[name]) for step, row in self.rows if name in row]
        assert len(found) == len(dict(found))
        return dict(found)


class Fit:
    """A trainer of Lightning with the callback, and what its logger got."""

    def __init__(self, callback: LightningCallback, path: Path, **options: Any) -> None:
        self.logger = Kept()
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            logger=self.logger,
            callbacks=[callback],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(path),
            **{"devices": 1, "max_steps": STEPS, "log_every_n_steps": 1, **options},
        )

    def run(self, model: Any, **options: Any) -> Kept:
        loader: Any = DataLoader(data(5, 2 * STEPS, 3, 4), batch_size=None)  # type: ignore[arg-type]
        self.trainer.fit(model, loader, **options)
        return self.logger


class TestLightning:
    def test_its_logger_gets_what_the_session_has_at_the_steps_of_the_loss(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, callback = Net(), LightningCallback(rules(), names=["net.0.w*"])
        caplog.set_level(logging.INFO)
        fit = Fit(callback, tmp_path, log_every_n_steps=2, max_steps=5)
        kept = fit.run(model)
        session: Any = callback.session
        # The last step is not one of the second ones, but the end.
        assert kept.having("loss").keys() == {1, 3}
        assert kept.having(TOTAL) == pytest.approx({s: total(session, s) for s in (1, 3, 4)})
        history = dict(session.history("net.0.weight"))
        assert kept.having(CHOSEN) == pytest.approx({s: history[s] for s in (1, 3, 4)})
        assert kept.having(NOT_FINITE) == {1: 0.0, 3: 0.0, 4: 0.0}
        assert {name for _, row in kept.rows for name in row} - {"loss", "epoch"} == {
            TOTAL,
            MEDIAN,
            "gradsurgeon/norms/largest",
            "gradsurgeon/norms/least",
            NOT_FINITE,
            CHOSEN,
            "gradsurgeon/norms/loss/loss",
            "gradsurgeon/norms/SGD/0/lr",
        }
        (plan,) = [one.message for one in caplog.records if one.message.startswith("plan: ")]
        assert plan == str(session.plan)
        assert "on Net: 1 rule, 4 parameters" in plan
        assert is_free(model)

    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    def test_with_accumulation_it_logs_the_whole_gradient(
        self, precision: Any, tmp_path: Path
    ) -> None:
        callback = LightningCallback(rules({**NORMS, "at": "step"}, {**NORMS, "id": "after"}))
        fit = Fit(callback, tmp_path, accumulate_grad_batches=2, precision=precision)
        kept = fit.run(Net())
        session: Any = callback.session
        assert session.step == STEPS
        wanted = {
            step: math.hypot(*(dict(session.history(n, rule="after"))[step] for n in NET))
            for step in range(STEPS)
        }
        for rule in ("norms", "after"):
            assert kept.having(f"gradsurgeon/{rule}/total") == pytest.approx(wanted), rule

    def test_one_pattern_may_be_a_text_and_one_that_matches_nothing_is_told(
        self, tmp_path: Path
    ) -> None:
        kept = Fit(LightningCallback(rules(), names="net.0.w*"), tmp_path).run(Net())
        assert len(kept.having(CHOSEN)) == STEPS
        astray = LightningCallback(rules(), names=["net.7.*"])
        with pytest.warns(GradSurgeonWarning, match=r'names="net.7.\*" matches no tensor'):
            Fit(astray, tmp_path).run(Net())

    def test_two_optimizers_have_a_name_each_and_their_steps_go_on(self, tmp_path: Path) -> None:
        first = LightningCallback(rules({**NORMS, "at": "step"}))
        fit = Fit(first, tmp_path, max_steps=8)  # of both together
        kept = fit.run(Gan())
        fit.trainer.save_checkpoint(tmp_path / "last.ckpt")
        session: Any = first.session
        assert [steps_of(session, name) for name in NET] == [[0, 1, 2, 3]] * 4
        for name, part in ((TOTAL, NET[:2]), ("gradsurgeon/norms/part-2/total", NET[2:])):
            expected = {s: total(session, s, part) for s in range(4)}
            assert kept.having(name) == pytest.approx(expected)
        second = LightningCallback(rules({**NORMS, "at": "step"}))
        last = str(tmp_path / "last.ckpt")
        kept = Fit(second, tmp_path, max_steps=12).run(Gan(), ckpt_path=last)
        assert [steps_of(second.session, name) for name in NET] == [[4, 5]] * 4
        assert list(kept.having(TOTAL)) == [4, 5]

    def test_an_error_in_training_takes_the_rules_off(self, tmp_path: Path) -> None:
        model, callback = Net(broken=3), LightningCallback(rules())
        fit = Fit(callback, tmp_path, log_every_n_steps=12)
        with pytest.raises(ZeroDivisionError):
            fit.run(model)
        assert is_free(model)
        # What was measured until then is in the log.
        assert list(fit.logger.having(TOTAL)) == [2]
        model._broken = -1
        kept = Fit(callback, tmp_path).run(model)
        assert steps_of(callback.session) == list(range(STEPS))
        assert list(kept.having(TOTAL)) == list(range(STEPS))

    @pytest.mark.parametrize("then", ["skip-step", "raise"])
    def test_events_are_counted_and_told(
        self, then: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        seen: list[gradsurgeon.Event] = []
        callback = LightningCallback(rules(NORMS, {**TRAP, "then": then}), on_event=seen.append)
        fit = Fit(callback, tmp_path)
        if then == "raise":
            with pytest.raises(gradsurgeon.NonFiniteGradientError):
                fit.run(Net(bad=BAD))
        else:
            fit.run(Net(bad=BAD))
            assert callback.session is not None
            assert callback.session.step == STEPS
            assert fit.logger.having(NOT_FINITE) == {s: 4.0 * (s == BAD) for s in range(STEPS)}
            assert math.isnan(fit.logger.having(TOTAL)[BAD])
            (text,) = [one.message for one in caplog.records if one.name == "gradsurgeon"]
            assert text.startswith(f"step {BAD}, rule trap: 4 of 4 gradients are not finite")
        kinds = {"skip-step": ["trap", "skipped-step"], "raise": ["trap"]}[then]
        assert [event.kind for event in seen] == kinds
        for kind in kinds:
            counts = fit.logger.having(f"gradsurgeon/events/{kind}")
            assert counts == dict.fromkeys(range(BAD, BAD + 1 if then == "raise" else STEPS), 1.0)
        assert list(fit.logger.having(TOTAL)) == list(range(BAD + 1 if then == "raise" else STEPS))

    def test_a_second_fit_goes_on_and_another_trainer_begins_anew(self, tmp_path: Path) -> None:
        model, callback = Net(), LightningCallback(rules())
        fit = Fit(callback, tmp_path, max_steps=2)
        fit.run(model)
        fit.trainer.fit_loop.epoch_loop.max_steps = 5
        fit.run(model)
        assert steps_of(callback.session) == [2, 3, 4]
        Fit(callback, tmp_path, max_steps=2).run(model)
        assert steps_of(callback.session) == [0, 1]
        assert is_free(model)

    def test_the_trainer_of_the_other_package(self, tmp_path: Path) -> None:
        script = (
            "import pytorch_lightning as pl, torch\n"
            "from gradsurgeon.integrations import LightningCallback\n"
            "class Net(pl.LightningModule):\n"
            "    def __init__(self): super().__init__(); self.l = torch.nn.Linear(2, 1)\n"
            "    def training_step(self, x, i): return self.l(x).sum()\n"
            "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)\n"
            "c = LightningCallback('version: 1\\nrules: [{id: n, action: norm-log, params: \"*\"}]\\n')\n"
            "pl.Trainer(max_epochs=1, accelerator='cpu', logger=False, enable_checkpointing=False, callbacks=[c])"
            ".fit(Net(), torch.ones(3, 4, 2))\n"
            "print(isinstance(c, pl.Callback), c.session.step)\n"
        )
        (tmp_path / "train.py").write_text(script, encoding="utf-8")
        done = forked("train.py", cwd=tmp_path)
        assert done.stdout.splitlines()[-1:] == ["True 3"], done.stderr


class Reader(nn.Module):
    """Two layers, with a loss that is NaN, or an error, in one call."""

    def __init__(self, *, bad: int = -1, broken: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = linears(4, 3, 1)
        self.calls, self.bad, self.broken = 0, bad, broken

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls - 1 == self.broken:
            raise ZeroDivisionError
        factor = math.nan if self.calls - 1 == self.bad else 1.0
        return {"loss": self.net(x).square().mean() * factor}


def hugging(model: nn.Module, path: Path, *callbacks: Any, **options: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(path),
        per_device_train_batch_size=2,
        use_cpu=True,
        optim="sgd",
        **{
            "max_steps": STEPS,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_nan_inf_filter": False,
            **options,
        },
    )
    rows = [{"x": x} for x in data(5, 4 * STEPS, 4)]
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))


def logged(trainer: Any, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in trainer.state.log_history if name in row}


@pytest.mark.usefixtures("own_environment")
class TestTransformers:
    def test_its_history_console_and_reporters_get_what_the_session_has(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
        callback = TransformersCallback(rules(), names=["net.0.w*"])
        trainer = hugging(
            Reader(), tmp_path, callback, logging_steps=2, max_steps=5, report_to=["tensorboard"]
        )
        before = [one for one in trainer.callback_handler.callbacks if one is not callback]
        trainer.train()
        assert trainer.callback_handler.callbacks == [callback, *before]
        session: Any = callback.session
        # After so many steps; the last one is logged at the end.
        wanted = {step: total(session, step - 1) for step in (2, 4, 5)}
        assert logged(trainer, TOTAL) == pytest.approx(wanted)
        assert logged(trainer, NOT_FINITE) == {2: 0.0, 4: 0.0, 5: 0.0}
        history = dict(session.history("net.0.weight"))
        assert logged(trainer, CHOSEN) == pytest.approx({s: history[s - 1] for s in (2, 4, 5)})
        board = EventAccumulator(str(tmp_path / "board")).Reload()
        found = {one.step: one.value for one in board.Scalars(f"train/{TOTAL}")}
        assert found == pytest.approx(wanted)
        out = capsys.readouterr().out
        assert out.count(f"{session.plan}\n") == 1
        assert out.count(f"'{TOTAL}': '{wanted[4]:.4g}'") == 1
        assert is_free(trainer.model)

    @pytest.mark.parametrize("bf16", [False, True])
    def test_with_accumulation_it_logs_the_whole_gradient(self, bf16: bool, tmp_path: Path) -> None:
        callback = TransformersCallback(rules())
        options = {"gradient_accumulation_steps": 2, "bf16": bf16, "max_grad_norm": 1e9}
        trainer = hugging(Reader(), tmp_path, callback, **options)
        trainer.train()
        session: Any = callback.session
        assert session.step == STEPS
        wanted = {step + 1: total(session, step) for step in range(STEPS)}
        assert logged(trainer, TOTAL) == pytest.approx(wanted)
        # The trainer has measured the same.
        assert logged(trainer, "grad_norm") == pytest.approx(wanted, rel=1e-4)

    def test_after_a_checkpoint_the_steps_go_on(self, tmp_path: Path) -> None:
        options = {"save_strategy": "steps", "save_steps": 3}
        hugging(Reader(), tmp_path, TransformersCallback(rules()), **options).train()
        callback = TransformersCallback(rules())
        trainer = hugging(Reader(), tmp_path, callback, **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert steps_of(callback.session) == [3, 4, 5]
        assert list(logged(trainer, TOTAL)) == list(range(1, STEPS + 1))

    @pytest.mark.parametrize("another", [False, True], ids=["same callback", "another callback"])
    def test_what_an_error_has_left_goes_with_the_next_training(
        self, another: bool, tmp_path: Path
    ) -> None:
        model, callback = Reader(broken=3), TransformersCallback(rules())
        trainer = hugging(model, tmp_path, callback)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert not is_free(model)
        if another:
            callback = TransformersCallback(rules())
            trainer = hugging(model, tmp_path, callback)
        trainer.train()
        assert steps_of(callback.session) == list(range(STEPS))
        assert is_free(model)
        trainer.train()
        assert steps_of(callback.session) == list(range(STEPS))
        assert is_free(model)

    def test_a_session_of_the_scripts_own_is_not_replaced_in_silence(self, tmp_path: Path) -> None:
        model = Reader()
        trainer = hugging(model, tmp_path, TransformersCallback(rules()))
        with (
            gradsurgeon.apply(model, rules()),
            pytest.raises(GradSurgeonError, match="rules are already applied to this model"),
        ):
            trainer.train()
        trainer.train()

    def test_events_are_counted_and_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = Reader(bad=BAD)
        callback = TransformersCallback(rules(NORMS, {**TRAP, "then": "skip-step"}))
        trainer = hugging(model, tmp_path, callback)
        trainer.train()
        counts = logged(trainer, "gradsurgeon/events/skipped-step")
        assert counts == dict.fromkeys(range(BAD + 1, STEPS + 1), 1.0)
        assert logged(trainer, NOT_FINITE)[BAD + 1] == 4.0
        (text,) = [one.message for one in caplog.records if one.name == "gradsurgeon"]
        assert text.startswith(f"step {BAD}, rule trap: 4 of 4 gradients are not finite")

    def test_evaluations_are_left_as_they_are(self, tmp_path: Path) -> None:
        trainer = hugging(Reader(), tmp_path, TransformersCallback(rules()), logging_steps=4)
        trainer.eval_dataset = trainer.train_dataset
        trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
        trainer.train()
        trainer.evaluate()
        evaluations = [row for row in trainer.state.log_history if "eval_runtime" in row]
        assert len(evaluations) == STEPS // 2 + 1
        assert not [name for row in evaluations for name in row if "gradsurgeon" in name]
        assert list(logged(trainer, TOTAL)) == [4, STEPS]

    def test_a_subclass_stands_first_as_well(self, tmp_path: Path) -> None:
        class Mine(TransformersCallback):
            def on_train_begin(self, *args: Any, **options: Any) -> None:
                super().on_train_begin(*args, **options)

        class Reporter(TrainerCallback):
            def __init__(self) -> None:
                self.seen: list[str] = []

            def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
                self.seen.extend(logs)

        trainer = hugging(Reader(), tmp_path, reporter := Reporter(), Mine(rules()), max_steps=1)
        trainer.train()
        assert TOTAL in reporter.seen

    def test_where_it_cannot_stand_first_it_says_so(self, tmp_path: Path) -> None:
        callback, model = TransformersCallback(rules()), Reader()
        trainer = hugging(model, tmp_path)
        with pytest.warns(GradSurgeonWarning, match="may be missing in TensorBoard"):
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
        callback.on_train_end(trainer.args, trainer.state, trainer.control, model=model)
        assert is_free(model)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    worker = Path(__file__).with_name("callbacks_worker.py")
    return run_ranks(worker, tmp_path_factory.mktemp("ranks") / "seen")


@pytest.mark.parametrize("kind", ["lightning", "transformers"])
def test_two_ranks(kind: str, two_ranks: list[Json]) -> None:
    first, second = (rank[kind] for rank in two_ranks)
    assert first["history"] == pytest.approx(second["history"])
    assert len(first["history"]) == STEPS
    # The log is that of the first rank, and so is the plan.
    assert first["logged"] == pytest.approx(first["history"])
    assert (first["plans"], second["plans"]) == (1, 0)
    if kind == "lightning":
        assert second["logged"] == []
    assert first["free"]
    assert second["free"]


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate"])
def test_the_scripts_beside_the_rules(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = ROOT / "rules" / "integrations" / f"train_with_{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 30
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    shown = "".join(capsys.readouterr()) + caplog.text
    if name == "accelerate":
        assert "steps 0..86, 0 events" in shown
        return
    assert "3 rules, 4 parameters, 2,410 elements" in shown
    if name == "lightning":
        (table,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
        shown = table.read_text(encoding="utf-8")
    assert TOTAL in shown
