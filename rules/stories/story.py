"""What the stories share: where their files go, the text they read, and the page of their runs."""

import argparse
import tempfile
from pathlib import Path

import torch
from sklearn import datasets

import gradsurgeon
from gradsurgeon import cli

HERE = Path(__file__).parent


def files(name):
    """Return a folder for the records, and the file of the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", metavar="DIR", help="default: a new temporary folder")
    parser.add_argument(
        "--html", metavar="FILE", default=f"{name}.html", help="default: %(default)s"
    )
    given = parser.parse_args()
    return Path(given.record or tempfile.mkdtemp(prefix=f"{name}-")), given.html


def repeatable():
    """Let every run on this machine be the same."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def text():
    """Return what scikit-learn says of its data sets: 14,000 characters of English, on every machine."""
    named = ("iris", "digits", "wine", "breast_cancer", "diabetes")
    return "\n".join(getattr(datasets, f"load_{name}")().DESCR for name in named)


def recorded(folder, name, stat="l2"):
    """Return what a run has recorded of a tensor, as pairs of step and value."""
    with gradsurgeon.open_run(folder) as run:
        return run.history(name, stat)


def end(came_out, runs, html):
    """Write the page, and return the exit code: 0 if the story came out as it is told."""
    code = cli.main(["report", *map(str, runs), "--html", html])
    if not came_out:
        print("THE STORY CAME OUT DIFFERENTLY: compare the lines above with rules/guide/stories.md")
    return code or int(not came_out)
