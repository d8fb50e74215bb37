"""`python -m firstlight` is the command line tool."""

from __future__ import annotations

import sys

from firstlight.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
