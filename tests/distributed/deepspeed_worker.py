"""What rules see and do under an engine of DeepSpeed; each rank writes down the answers to the tests."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from ranks import Json
from torch import nn
from worker import work

import gradsurgeon
from gradsurgeon import api
from gradsurgeon.runtime import SessionOptions

STAGES = [int(stage) for stage in os.environ.get("STAGES", "0123")]
PASSES = 8
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
LOGS: dict[str, Json] = {
    "at-accumulated": {"action": "norm-log", "params": "*"},
    "at-step": {"action": "norm-log", "params": "*", "at": "step", "stats": ["l2", "mean"]},
    "together": {"action": "norm-log", "params": "*", "at": "step", "per": "rule"},
    "patterns": {"action": "norm-log", "params": "*", "stats": ["projection"]},
    "weights": {"action": "norm-log", "params": "*", "tensor": "value"},
    "updates": {"action": "norm-log", "params": "*", "tensor": "update"},
    "at-backward": {"action": "scale", "params": "2.*", "at": "backward", "factor": 0.0},
    "outputs": {"action": "norm-log", "modules": "2", "tensor": "output.grad"},
    "trap": {"action": "nan-trap", "params": "*", "then": "warn"},
    "moved": {"action": "check-update", "params": "*"},
}
TRAP = {"trap": {"action": "nan-trap", "params": "*", "then": "raise"}}
QUIET = ("fact", "notice")
REFUSED = {
    "freeze": {"action": "freeze", "params": "*"},
    "skip": {"action": "nan-trap", "params": "*", "then": "skip-step"},
    "clip": {"action": "clip-norm", "params": "*", "per": "rule", "at": "step", "max_norm": 1.0},
    "edit": {"action": "clamp", "params": "*", "at": "step", "min": -1.0},
}


def rules(given: Json) -> Json:
    return {"version": 1, "rules": [{"id": rule, **options} for rule, options in given.items()]}


def engine_of(stage: int, clip: float, precision: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    config: Json = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": clip,
    }
    if precision:
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config[precision] |= {"initial_scale_power": 8, "hysteresis": 1}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


class Training:
    """One training on this rank."""

    def __init__(self, stage: int, clip: float = 0.0, precision: str = "") -> None:
        self.stage = stage
        self.clip = clip
        self.engine = engine_of(stage, clip, precision)
        # After each update: what the engine says of its norm.
        self.norms: list[float | None] = []
        self.totals: list[float] = []

    def run(self, bad: int = -1) -> Training:
        """Train; one pass gets a batch with a NaN."""
        generator = torch.Generator().manual_seed(torch.distributed.get_rank() + 1)
        dtype = next(self.engine.module.parameters()).dtype
        for number in range(PASSES):
            x = torch.randn(4, 8, generator=generator).to(dtype)
            if number == bad:
                x[1] = float("nan")
            loss = self.engine(x).float().square().mean()
            self.engine.backward(loss)
            self.note_total()
            self.engine.step()
            if number % 2:
                norm = self.engine.get_global_grad_norm()
                self.norms.append(None if norm is None else float(norm))
        return self

    def note_total(self) -> None:
        """Note the norm of all gradients that ZeRO 0 is about to consume, after its clipping."""
        grads = [param.grad for param in self.engine.module.parameters() if param.grad is not None]
        if self.stage or not self.engine.is_gradient_accumulation_boundary():
            return
        norm = float(nn.utils.get_total_norm(grads))
        self.totals.append(min(norm, self.clip or norm))

    def weights(self) -> list[list[float]]:
        params = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params, enabled=self.stage == 3):
            return [param.detach().float().flatten().tolist() for param in params]


def records(stage: int, precision: str, clip: float = 0.0) -> Json:
    """Train with and without rules that only look."""
    plain = Training(stage, clip, precision).run()
    training = Training(stage, clip, precision)
    looking = {rule: options for rule, options in LOGS.items() if options["action"] != "scale"}
    session = gradsurgeon.apply(training.engine, rules(looking))
    training.run()
    found: Json = {
        "plain": plain.weights(),
        "watched": training.weights(),
        "norms": training.norms,
        "totals": training.totals,
        "step": session.step,
        "events": [event.message for event in session.events if event.kind not in QUIET],
        "plan": str(session.plan),
        "outputs": session.history("2"),
        "loss": session.history("loss", "loss"),
    }
    for rule, options in looking.items():
        if options["action"] == "norm-log" and "modules" not in options:
            stat = "projection_1" if rule == "patterns" else "l2"
            names = ["together"] if rule == "together" else NAMES
            found[rule] = {name: session.history(name, stat, rule=rule) for name in names}
    session.remove()
    return found


def edits(stage: int, precision: str) -> Json:
    """Return the norms of gradients that a rule at `backward` has made 0."""
    training = Training(stage, 0.0, precision)
    given = {rule: LOGS[rule] for rule in ("at-backward", "at-step")}
    session = gradsurgeon.apply(training.engine, rules(given))
    training.run()
    norms = {name: session.history(name, "l2") for name in NAMES}
    session.remove()
    return norms


def traps(stage: int, precision: str) -> Json:
    """Train with a NaN in a batch of rank 1."""
    training = Training(stage, 0.0, precision)
    session = gradsurgeon.apply(training.engine, "gradsurgeon:debug@1")
    rank = torch.distributed.get_rank()
    training.run(bad=4 if rank else -1)
    found: Json = {
        "events": [(e.kind, e.step, e.message) for e in session.events if e.kind not in QUIET],
        "step": session.step,
        "skipped": training.engine.skipped_steps,
    }
    session.remove()
    return found


def raises(stage: int) -> Json:
    training = Training(stage)
    session = gradsurgeon.apply(training.engine, rules(TRAP))
    before = training.weights()
    error = ""
    try:
        training.run(bad=0 if torch.distributed.get_rank() else -1)
    except gradsurgeon.NonFiniteGradientError as raised:
        error = str(raised)
    session.remove()
    return {"error": error, "kept": before == training.weights()}


def refusals(stage: int, precision: str = "") -> Json:
    found: Json = {}
    for rule, options in REFUSED.items():
        training = Training(stage, 0.0, precision)
        before = training.weights()
        session = gradsurgeon.apply(training.engine, rules({rule: options}))
        found[rule] = ""
        try:
            training.run()
        except gradsurgeon.GradSurgeonError as error:
            found[rule] = str(error)
        found[f"{rule} kept"] = before == training.weights()
        session.remove()
    return found | {"pack": softened(stage, precision)}


def made_later(stage: int) -> Json:
    """Return what is said of an engine that a script makes after the session of another one has seen a pass."""
    first = Training(stage)
    with gradsurgeon.apply(first.engine, rules({"trap": LOGS["trap"]})):
        first.run()
        second = Training(stage)
        session = gradsurgeon.apply(second.engine, rules({"trap": LOGS["trap"]}))
        second.run()
        events = [event.message for event in session.events if event.kind != "fact"]
        session.remove()
    return {"step": session.step, "events": events}


def acts() -> Json:
    """Return what rules at `step` do in ZeRO 0: by rule, whether weights stayed, and whether they are finite."""
    found: Json = {}
    for rule, options in REFUSED.items():
        training = Training(0)
        before = training.weights()
        session = gradsurgeon.apply(training.engine, rules({rule: options}))
        training.run(bad=0 if rule == "skip" else -1)
        after = training.weights()
        are_finite = all(bool(torch.tensor(values).isfinite().all()) for values in after)
        found[rule] = [before == after, are_finite]
        session.remove()
    return found


def softened(stage: int, precision: str) -> list[str]:
    """Return what is said of a trap of a pack that would skip updates."""
    training = Training(stage, 0.0, precision)
    lines: list[str] = []
    options = SessionOptions(lenient=True, say=lines.append)
    plan = gradsurgeon.plan(training.engine, rules({"skip": REFUSED["skip"]}))
    attachment = api.attach(training.engine, plan, options)
    training.run()
    attachment.remove()
    return lines


def find() -> Json:
    warnings.simplefilter("ignore")
    # DeepSpeed refuses float16 on a CPU, though torch computes with it.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    found: Json = {}
    for stage in STAGES:
        half = "bf16" if stage else ""
        found[f"records {stage}"] = records(stage, half)
        found[f"clipped {stage}"] = records(stage, half, 0.05)
        found[f"edits {stage}"] = edits(stage, half)
        found[f"traps {stage}"] = traps(stage, half)
        found[f"raises {stage}"] = raises(stage)
        found[f"later {stage}"] = made_later(stage)
        if not stage:
            found["acts"] = acts()
            found["refusals 0"] = refusals(0, "bf16")
        else:
            found[f"scaled {stage}"] = records(stage, "fp16")
            found[f"skips {stage}"] = traps(stage, "fp16")
            found[f"refusals {stage}"] = refusals(stage)
    return found


if __name__ == "__main__":
    work(find)
