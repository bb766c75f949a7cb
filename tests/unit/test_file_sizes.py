"""No file of the package is longer than a person reads in one go."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gradsurgeon"
MOST = 399


def test_no_file_is_too_long() -> None:
    lengths = {
        file: len(file.read_text(encoding="utf-8").splitlines()) for file in PACKAGE.rglob("*.py")
    }
    assert len(lengths) > 200
    assert not {file.name: length for file, length in lengths.items() if length > MOST}
