"""``python -m gradsurgeon``: the command line."""

import sys

from gradsurgeon.cli import main

if __name__ == "__main__":
    sys.exit(main())
