"""Folder of reports: one for each run, named by its time and target, and a link to the latest."""

from __future__ import annotations

import contextlib
import itertools
import re
from datetime import datetime
from pathlib import Path

from trtpipe.engines.errors import HostError, UsageError

REPORTS = Path("reports")
LATEST, FILE = "latest", "report.json"


def new(target: str) -> Path:
    """Path of the report of a run that begins now: reports/TIME-TARGET/report.json. `claim` makes its folder."""
    return REPORTS / f"{datetime.now():%Y%m%d-%H%M%S}-{re.sub('[^A-Za-z0-9._-]+', '-', target)[:80]}" / FILE


def place(report: str | Path) -> Path:
    """Path of the report that the user names: report.json in a folder, which is there or whose name ends with a slash,
    else the path itself."""
    return Path(report, FILE) if str(report).endswith("/") or (report and Path(report).is_dir()) else Path(report)


def files_of(report: Path) -> tuple[Path, ...]:
    """The files that `write_report` writes for a report of this path."""
    return report, *(beside(report, suffix) for suffix in (".requests.jsonl", ".csv", ".html"))


def beside(report: Path, suffix: str) -> Path:
    """A companion of a report. Only .json is taken from the name: what follows another dot tells reports apart."""
    return report.with_name(report.name.removesuffix(".json") + suffix)


def claim(report: Path) -> Path:
    """Make the folder of a path of `new`. Where another run, which began in the same second, has made it, make one with
    a number. Returns the report's path. Raises HostError."""
    folder = report.parent
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
            folder = report.parent.with_name(f"{report.parent.name}.{number}")
    except OSError as error:
        raise HostError(f"{folder} cannot be made", why=error.strerror or str(error)) from None
    return folder / FILE


def link_latest(folder: Path) -> None:
    """Let reports/latest lead to the folder. Raises HostError."""
    link, made = REPORTS / LATEST, REPORTS / f".{LATEST}"
    try:
        made.unlink(missing_ok=True)
        made.symlink_to(folder.name)
        made.replace(link)
    except OSError as error:
        raise HostError(f"{link} cannot be made", why=error.strerror or str(error)) from None


def last_two() -> list[Path]:
    """Reports of the last two runs, the earlier first. Raises UsageError."""
    # A folder in place of the link to the latest is a copy.
    found = [path for path in REPORTS.glob(f"*/{FILE}") if not path.parent.is_symlink() and path.parent.name != LATEST]
    if len(found) < 2:
        raise UsageError(
            f"there {'is 1 report' if found else 'are no reports'} in ./{REPORTS}, and two are compared",
            remedy="run `trtpipe bench` again, or name two reports",
        )
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.parent.name))[-2:]
