"""``gradsurgeon replay``: run the step that a trap stopped again, elsewhere."""

import argparse
from pathlib import Path

from gradsurgeon.errors import ModelError, printable, reason_of


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


def run(arguments: argparse.Namespace) -> int:
    from gradsurgeon import api, forensics  # noqa: PLC0415 # needs torch
    from gradsurgeon.cli.review import model_loading  # noqa: PLC0415 # needs torch

    # The bundle is checked first: building a model can take minutes.
    forensics.check(Path(arguments.bundle))
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
    return 0
