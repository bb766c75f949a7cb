"""``gradsurgeon replay``: a step that a trap has stopped, run again elsewhere."""

import argparse

from gradsurgeon.cli import fail
from gradsurgeon.errors import GradSurgeonError


def run(arguments: argparse.Namespace) -> int:
    from gradsurgeon import api  # noqa: PLC0415 # needs torch
    from gradsurgeon.review import model_loading  # noqa: PLC0415 # the same

    try:
        model = model_loading.load_model(arguments.model, with_values=True)
        if arguments.device is not None:
            model = model.to(arguments.device)
        print(api.replay(arguments.bundle, model, debugger=arguments.pdb))
    except (GradSurgeonError, RuntimeError) as error:  # torch on a device that is not there
        return fail(str(error))
    return 0
