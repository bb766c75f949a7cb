"""The scripts of `tests/scripts`: how each is called, and what training it does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launching import Case, Trained
from pairs import slow

NUMBERS = "1 2.5\n2 3.5\n3 7\n"
SEQUENTIAL = Trained("Sequential", "0.weight", steps=3)


# The scripts of the quick suite, of which the first one starts a process.
QUICK = (
    "plain loop",
    "package",
    "gan",
    "LBFGS",
    "distillation",
    "scaler",
    "exception",
    "SIGTERM",
)


def scripts(names: Iterable[str]) -> list[Any]:
    """Return scripts as parameters of a test: those of the quick suite, and the rest as slow ones."""
    known = list(names)
    quick = [name for name in QUICK if name in known]
    return [*quick, *slow(*(name for name in known if name not in quick))]


def ending(how: str, code: int, **more: Any) -> Case:
    return Case(("endings.py", how), (SEQUENTIAL,), code, **more)


# A parameter that joins is a new plan: the model is bound again, and goes on counting. What reached it in
# the pass before that is recorded by the first plan.
PHASES = (
    Trained("Net", "backbone.weight", steps=3),
    Trained("Net", "backbone.weight", steps=5, start=2),
)

CASES = {
    "plain loop": Case(
        ("plain.py", "--lr", "0.05", "--rules", "of its own"),
        (Trained("Net", "fc1.weight", 6),),
        process=True,
    ),
    "package": Case(
        ("-m", "classifier.train", "2"), (Trained("Classifier", "conv.0.weight", steps=8),)
    ),
    "gan": Case(
        ("gan.py",),
        (  # The last pass of the generator reaches it too, and feeds a step that never comes.
            Trained("Discriminator", "net.0.weight", 8 + 1),
            Trained("Generator", "net.0.weight", 4),
        ),
    ),
    "actor and critic": Case(
        ("actor_critic.py",),
        (Trained("Actor", "body.weight", 5), Trained("Critic", "body.weight", 5)),
    ),
    "LBFGS": Case(("lbfgs.py",), (Trained("Sequential", "0.weight", 5),)),
    "adjoint method": Case(("adjoint.py",), (Trained("Model", "encoder.weight", 4),)),
    "distillation": Case(("distill.py",), (Trained("Encoder", "embed.weight", 6),)),
    "own optimizer, thread": Case(("lion.py",), (Trained("Sequential", "0.weight", 5),)),
    "configured by exec": Case(
        ("configured.py", "config/small.py", "--max_iters=4"),
        (Trained("Sequential", "0.weight", 4),),
    ),
    "changes directory, resumes": Case(
        ("moving.py",), (Trained("Sequential", "0.weight", 2), Trained("Sequential", "0.weight", 3))
    ),
    "forked loader": Case(
        ("loader.py", "--start", "fork"), (Trained("Sequential", "0.weight", 8),)
    ),
    "spawned loader": Case(
        ("loader.py", "--start", "spawn"),
        (Trained("Sequential", "0.weight", 8),),
        process=True,
    ),
    "spawned ranks": Case(
        ("spawned.py", "3"),
        (Trained("Net", "first.weight", 3, ranks=2),),
        noisy=True,
        process=True,
    ),
    "sweep of processes": Case(("sweep.py",), (Trained("Linear", "weight", 3),) * 2, process=True),
    "forked workers": Case(("hogwild.py",), (Trained("Linear", "weight", 3),) * 2),
    "workers of a fork server": Case(
        ("hogwild.py", "forkserver"), (Trained("Linear", "weight", 3),) * 2, process=True
    ),
    "pickle and stdin": Case(("pickled.py",), (Trained("Line", "slope", 4),), stdin=NUMBERS),
    "phases": Case(("rebuilt.py",), PHASES),
    "compiled": Case(("compiled.py",), (Trained("Sequential", "0.weight", 4),)),
    "scaler": Case(("scaled.py",), (Trained("Sequential", "0.weight", 6),)),
    "progress bar": Case(("progress.py",), (Trained("Sequential", "0.weight", 5),), noisy=True),
    "progress bar on stdout": Case(
        ("progress.py", "stdout"), (Trained("Sequential", "0.weight", 5),), noisy=True
    ),
    "Trainer": Case(
        ("hf_trainer.py",), (Trained("GPT2LMHeadModel", "transformer.wte.weight", 4),), noisy=True
    ),
    "Lightning": Case(
        ("lightning_auto.py",), (Trained("Regression", "net.0.weight", 4),), noisy=True
    ),
    "accelerate": Case(("accumulate.py",), (Trained("Sequential", "0.weight", 5),)),
    "exit code": ending("code", 3),
    "exit message": ending("message", 1),
    "exception": ending("exception", 1),
    # Hooks make torch's own frames other lines.
    "exception in forward": ending("forward", 1, noisy=True, process=True),
    "SIGTERM": ending("terminated", -15, killed=True),
    "SIGKILL": ending("killed", -9, killed=True),
    "KeyboardInterrupt": ending("interrupted", -2, forked=False, process=True),
    "os._exit": ending("at once", 7, killed=True),
    "DDP": Case(
        ("ddp.py", "3"),
        (Trained("Net", "body.0.weight", 3, ranks=2),),
        distributed=True,
        noisy=True,
    ),
    "FSDP2": Case(
        ("fsdp2.py",),
        (Trained("FSDPStack", "blocks.0.norm.weight", 4, ranks=2),),
        distributed=True,
        noisy=True,
    ),
}
