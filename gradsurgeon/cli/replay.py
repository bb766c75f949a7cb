"""``gradsurgeon replay``: run the step that a trap stopped again, elsewhere."""

import argparse
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradsurgeon.actions import Rule, TrapRule
from gradsurgeon.common.events import RuleStatus, is_trip
from gradsurgeon.errors import (
    GradSurgeonError,
    ModelError,
    TrapError,
    printable,
    reason_of,
    shorten_names,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the directory that the trap named")
    parser.add_argument(
        "--model", required=True, metavar="MODULE:NAME",
        help="the model, or what builds it, such as train.net:build; imports your code",
    )  # fmt: skip
    parser.add_argument("--device", help="where to run it, such as cpu; default: as it is built")
    parser.add_argument(
        "--pdb", action="store_true", help="open the debugger at the operation that made the NaN"
    )
    parser.add_argument(
        "--rules", metavar="FILE", help="then run it once more under these rules: what would they have done?"
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    from gradsurgeon import api, forensics  # noqa: PLC0415 # needs torch
    from gradsurgeon.cli.review import model_loading  # noqa: PLC0415 # needs torch

    # The bundle and the rules are checked first: building a model can take minutes.
    forensics.check(Path(arguments.bundle))
    if arguments.rules is not None:
        api.load(arguments.rules)
    model = model_loading.load_model(arguments.model, with_values=True)
    if arguments.device is not None:
        try:
            model = model.to(arguments.device)
        except Exception as error:  # noqa: BLE001 # torch raises several kinds here
            reason = reason_of(error)[:200]
            raise ModelError(f"--device {printable(arguments.device)}: {reason}") from None
    diagnosis = api.replay(arguments.bundle, model, debugger=arguments.pdb)
    if arguments.pdb and not diagnosis.module and not diagnosis.lines:
        print("the replay blames no operation: there is no place to open the debugger at")
    print(diagnosis)
    if arguments.rules is not None:
        print(*_under_rules(arguments.bundle, model, arguments.rules), sep="\n")
    return 0


def _under_rules(bundle: str, model: Any, rules: str) -> Iterator[str]:
    """Yield what rules do in the step, and how large they leave its gradients."""
    import torch  # noqa: PLC0415 # slow to import

    from gradsurgeon import api, forensics  # noqa: PLC0415 # needs torch

    failed, _ = forensics.read(bundle, model)
    # Nothing moves: the step is there for its rules.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = api.apply(model, rules, optimizer=optimizer, start_step=failed.step)
        try:
            forensics.run_again(failed)
            optimizer.step()
        except TrapError:
            pass  # its event has the text
        except Exception as error:
            why = f"the step cannot be run under {rules}: {reason_of(error)[:200]}"
            raise GradSurgeonError(printable(why)) from error
        finally:
            session.remove()
    yield f"under {printable(rules)}, with the output gradients of the step:"
    for event in session.events:
        if is_trip(event):
            yield f"  {event.message.partition(chr(10))[0]}"
    for rule in session.plan.rules.rules:
        yield f"  rule {rule.id}: {_work_of(rule, session.status()[rule.id])}"
    norms = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            norms[name] = float(param.grad.norm())
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if bad:
        yield f"  {len(bad)} of {len(norms)} gradients are not finite: {shorten_names(bad)}"
    elif norms:
        largest = max(norms, key=norms.__getitem__)
        whole = math.hypot(*norms.values())
        yield f"  the gradients are finite: norm {whole:.4g}, the largest {norms[largest]:.4g} of {largest}"


def _work_of(rule: Rule, status: RuleStatus) -> str:
    if isinstance(rule, TrapRule) and not rule.edits:
        from gradsurgeon.report.rules_and_events import trap_words  # noqa: PLC0415 # only here

        return trap_words(status, (), 1)
    text = f"fired {status.fired}"
    if status.altered is not None:
        text += f", changed {status.altered}"
    return text
