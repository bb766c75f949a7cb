"""``gradsurgeon replay``: a step that a trap has stopped, run again elsewhere."""

import argparse
from pathlib import Path

from gradsurgeon.cli import fail
from gradsurgeon.errors import GradSurgeonError, printable


def run(arguments: argparse.Namespace) -> int:
    from gradsurgeon import api, forensics  # noqa: PLC0415 # needs torch
    from gradsurgeon.review import model_loading  # noqa: PLC0415 # the same

    try:
        # Building a model can take minutes.
        forensics.check(Path(arguments.bundle))
        model = model_loading.load_model(arguments.model, with_values=True)
        if arguments.device is not None:
            try:
                model = model.to(arguments.device)
            except Exception as error:  # noqa: BLE001 # torch has several kinds for this
                why = printable(str(error).partition("\n")[0][:200])
                return fail(f"--device {printable(arguments.device)}: {why}")
        diagnosis = api.replay(arguments.bundle, model, debugger=arguments.pdb)
    except GradSurgeonError as error:
        return fail(str(error))
    if arguments.pdb and not diagnosis.module and not diagnosis.lines:
        print("no operation of the replay is to blame: the debugger had nowhere to stand")
    print(diagnosis)
    return 0
