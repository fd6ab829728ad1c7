"""How far the planner is from measured runs, and the fit that its efficiencies come from.

    python -m tests.benchmarks.planner [--fit] [--report FILE.md] [--peer-python PYTHON]

Shares of single operations are bound by what was measured of them; overheads are fitted to whole runs. Every run is
also judged by a fit that did not see its (GPU, model, tp): five folds. --fit writes configs/efficiency.yaml.
--peer-python adds AIConfigurator's predictions of the same runs, a sample of them
where --peer-minutes are too few; a later call goes on with the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.benchmarks.planner.batch import batch
from tests.benchmarks.planner.fit import fit, write_efficiency
from tests.benchmarks.planner.judge import folds, judged, spread
from tests.benchmarks.planner.operations import operations
from tests.benchmarks.planner.page import report
from tests.benchmarks.planner.peer import peers
from tests.benchmarks.planner.splits import splits
from tests.support.published import figures
from trtpipe.pipeline.planner.efficiency import load_efficiency


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="write configs/efficiency.yaml")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--peer-python", type=Path, help="Python of an environment that has aiconfigurator")
    parser.add_argument(
        "--peer-minutes", type=float, default=60, help="after which no further run is begun (%(default)g)"
    )
    options = parser.parse_args()
    all_of_them, how = figures(), load_efficiency()
    known, few = batch(all_of_them), [one for one in all_of_them if one.ttft_ms is not None]
    if options.fit:
        how = fit(how, known, few)
    held = judged(all_of_them, folds(how, known, few), known)
    if options.fit:
        write_efficiency(how, spread(held))
    scratch = Path(".scratch/aiconfigurator/rows")
    python = options.peer_python
    peer = peers(all_of_them, python.absolute(), scratch, options.peer_minutes) if python else {}
    page, figure = report(
        judged(all_of_them, [load_efficiency()], known),
        held,
        peer,
        [*operations(scratch), *splits(python, scratch)] if python else [],
    )
    if options.report is None:
        print(page)
    else:
        options.report.write_text(page)
        options.report.with_suffix(".svg").write_text(figure)


if __name__ == "__main__":
    main()
