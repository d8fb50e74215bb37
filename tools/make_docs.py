"""Make docs/reference/ from the code: docstrings, fields, signatures, operators, help pages.

python tools/make_docs.py            writes the pages
python tools/make_docs.py --check    writes nothing; 1 if a page is not what the code gives
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pages import commands, run, spec

OUT = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES = {
    "vocabulary": spec.vocabulary,
    "config": spec.config,
    "names": spec.parameter_names,
    "forward": run.forward,
    "operators": run.operators,
    "models": run.models,
    "cli": commands.command_line,
    "env": commands.environment,
}


def main() -> int:
    """Write or check the pages, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = OUT / f"{name}.md", f"<!-- made by tools/make_docs.py -->\n\n{make().rstrip()}\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for noun in spec.nouns():
        for field in noun.undescribed():
            print(f"warning: nothing says what {noun.cls.__name__}.{field} is", file=sys.stderr)
    if check and stale:
        print(f"not what the code gives: {', '.join(stale)}; run tools/make_docs.py", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
