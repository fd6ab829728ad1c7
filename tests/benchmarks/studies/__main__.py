"""Write the pages of the two studies and their plots into a folder, docs/studies if none is given.

python -m tests.benchmarks.studies [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.benchmarks.studies import h20, h100


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/studies")
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in (("h100-vs-a100", h100.page), ("h20-vs-a800", h20.page)):
        text, plot = page(f"{name}.svg")
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        (folder / f"{name}.svg").write_text(plot, encoding="utf-8")


if __name__ == "__main__":
    main()
