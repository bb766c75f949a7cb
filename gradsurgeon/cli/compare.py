"""``gradsurgeon compare``: where a run parts from a reference. Never imports torch."""

import argparse

from gradsurgeon.cli.options import add_run, print_json
from gradsurgeon.report.comparison import compare


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("reference", metavar="REFERENCE", help="the run that it should equal")
    parser.add_argument(
        "--noise",
        action="extend",
        nargs="+",
        default=[],
        metavar="RUN",
        help="runs of the reference under `run --perturb 1e-6 --seed N`, which measure how far rounding "
        "goes: best three",
    )
    parser.add_argument(
        "--map",
        metavar="FILE",
        help="names that changed, from the reference to the run: one line `old: new` each; a name stands for "
        "all that begin with it",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="json is documented and stable; default: text",
    )
    parser.epilog = (
        "exit codes: 0 they agree within the tolerance, 1 they part, 2 they cannot be compared or rounding decides every tensor; record both with "
        "`gradsurgeon run --rules gradsurgeon:fingerprint@1 --record DIR`"
    )


def run(arguments: argparse.Namespace) -> int:
    comparison = compare(arguments.run, arguments.reference, arguments.noise, arguments.map)
    if arguments.format == "json":
        print_json(comparison.to_dict())
    else:
        print(comparison)
    if comparison.largest is None:
        return 2
    return int(not comparison.alike)
