"""The public interface is a promise: whoever changes it meets a test."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradsurgeon
from gradsurgeon import GradSurgeonError, GradSurgeonWarning, errors, integrations, sinks
from gradsurgeon.actions import ACTIONS
from gradsurgeon.language import planning
from gradsurgeon.language.planning import manifest_file

NAMES = [
    "At",
    "BindError",
    "Binding",
    "Capture",
    "CaptureRule",
    "Centralize",
    "Check",
    "CheckError",
    "CheckLoop",
    "CheckRanks",
    "CheckRule",
    "CheckStructure",
    "CheckUpdate",
    "Clamp",
    "ClipNorm",
    "Combine",
    "Comparison",
    "Conflict",
    "Decision",
    "Diagnosis",
    "Edit",
    "EditRule",
    "Event",
    "Examination",
    "Example",
    "Finding",
    "Freeze",
    "FreezeRule",
    "GradSurgeonError",
    "GradSurgeonWarning",
    "GradientSpikeError",
    "LossRule",
    "Manifest",
    "ManifestError",
    "Mask",
    "ModelError",
    "NanTrap",
    "Noise",
    "NonFiniteGradientError",
    "NormLog",
    "Observer",
    "ObserverRule",
    "Perturb",
    "Plan",
    "RecordError",
    "Report",
    "RuleFileError",
    "RuleSet",
    "RuleStatus",
    "Run",
    "Sanitize",
    "Scale",
    "Session",
    "Shard",
    "SpikeTrap",
    "Statistic",
    "TrapError",
    "TrapRule",
    "Zero",
    "add_statistic",
    "apply",
    "backward",
    "compare",
    "load",
    "open_run",
    "plan",
    "remove",
    "replay",
    "report",
    "tag",
]


def test_names() -> None:
    assert gradsurgeon.__all__ == NAMES
    assert dir(gradsurgeon) == sorted([*NAMES, "__version__"])
    for name in NAMES:
        assert getattr(gradsurgeon, name).__doc__, name


def test_every_error_and_every_action_has_a_name_there() -> None:
    defined = [value for value in vars(errors).values() if inspect.isclass(value)]
    public = [
        value
        for value in defined
        if issubclass(value, GradSurgeonError | GradSurgeonWarning)
        and not value.__name__.startswith("_")
    ]
    for value in (*public, *ACTIONS.values()):
        assert getattr(gradsurgeon, value.__name__) is value


@pytest.mark.slow
def test_functions_stay_functions_whatever_is_imported() -> None:
    code = (
        "import gradsurgeon, importlib, pkgutil\n"
        "for info in pkgutil.walk_packages(gradsurgeon.__path__, 'gradsurgeon.'):\n"
        "    if not info.name.endswith('__main__'): importlib.import_module(info.name)\n"
        "print(all(callable(getattr(gradsurgeon, name)) for name in gradsurgeon.__all__ if name != 'report'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_signature_of_apply() -> None:
    parameters = inspect.signature(gradsurgeon.apply).parameters
    assert [(p.name, p.kind.name, p.default) for p in parameters.values()] == [
        ("model", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("rules", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("optimizer", "KEYWORD_ONLY", None),
        ("scaler", "KEYWORD_ONLY", None),
        ("record", "KEYWORD_ONLY", None),
        ("mode", "KEYWORD_ONLY", "act"),
        ("start_step", "KEYWORD_ONLY", 0),
        ("replace", "KEYWORD_ONLY", False),
        ("sinks", "KEYWORD_ONLY", ()),
        ("on_event", "KEYWORD_ONLY", None),
        ("params", "KEYWORD_ONLY", None),
    ]


def test_a_model_that_was_not_reviewed_is_refused(tmp_path: Path) -> None:
    rules = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    manifest_file.write(planning.from_model(tied), str(tmp_path / "params.json"))
    gradsurgeon.apply(tied, rules, params=tmp_path / "params.json").remove()
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(gradsurgeon.BindError) as raised:
        gradsurgeon.apply(other, rules, params=tmp_path / "params.json")
    assert "it also has 1.weight" in str(raised.value)
    assert "other tied names: 0.weight" in str(raised.value)
    gradsurgeon.apply(other, rules).remove()


def test_names_of_sinks_and_callbacks() -> None:
    assert sinks.__all__ == ["MLflow", "Sink", "TensorBoard", "WandB"]
    assert integrations.__all__ == ["LightningCallback", "TransformersCallback"]
    methods = [name for name in dir(sinks.Sink) if not name.startswith("_")]
    assert " ".join(methods) == "close flush names scalars text"


def test_members_of_a_session() -> None:
    rules = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
    model = torch.nn.Linear(1, 1)
    with gradsurgeon.apply(model, rules) as session:
        shown = [name for name in dir(session) if not name.startswith("_")]
    assert " ".join(shown) == (
        "captured events histograms history latest load_state_dict pause plan plot recorded remove resume state_dict status "
        "step tick"
    )
    signature = inspect.signature(gradsurgeon.Session.latest)
    assert str(signature) == (
        "(self, name: 'str', stat: 'str' = 'l2', *, rule: 'str | None' = None) -> 'float'"
    )


def test_fields_of_events_and_statuses() -> None:
    event, status = gradsurgeon.Event, gradsurgeon.RuleStatus
    assert " ".join(event.__dataclass_fields__) == (
        "kind rule step rank name message diagnosis sample_ids told_at"
    )
    assert " ".join(status.__dataclass_fields__) == "matched fired altered last_step warnings"


@pytest.mark.parametrize(
    ("fired", "altered", "changed"), [(3, 1, 1 / 3), (3, 0, 0.0), (0, 0, 0.0), (3, None, None)]
)
def test_the_share_of_changes_is_the_quotient_of_two_counts(
    fired: int, altered: int | None, changed: float | None
) -> None:
    assert gradsurgeon.RuleStatus(2, fired, altered, None).changed == changed


@pytest.mark.slow
def test_importing_imports_no_torch_and_applying_without_it_says_what_to_install() -> None:
    code = (
        "import sys, gradsurgeon\n"
        "gradsurgeon.load('version: 1\\nrules:\\n  - {id: a, action: zero, params: \"*\"}\\n')\n"
        "assert callable(gradsurgeon.report.summary)\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try: gradsurgeon.apply(None, {})\n"
        "except gradsurgeon.GradSurgeonError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs PyTorch, which is not installed: pip install 'gradsurgeon[torch]'" in done.stdout
