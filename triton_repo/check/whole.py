"""Detection of files that did not arrive whole: empty, cut short, a pointer or a page instead of the file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trtpipe.engines.hf.safetensors_file import SafetensorsError, read_header
from trtpipe.engines.json_input import open_regular
from trtpipe.triton_repo.check.faults import Report

# Suffixes that downloaders give to a file until it is whole.
UNFINISHED = (".incomplete", ".part", ".partial", ".tmp", ".aria2", ".crdownload", ".download")
EMPTY = "is empty"
_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")


def damage(path: Path) -> str | None:
    """What is wrong with a file, as seen from its start, its size and a safetensors file's header; None if nothing."""
    try:
        with open_regular(path) as file:
            start = file.read(64)
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    if not start.strip(b" \t\r\n\0"):
        return EMPTY
    if start.startswith(_POINTER):
        return "is a Git LFS pointer, not the file"
    if start.lstrip().lower().startswith(_PAGES):
        return "is a web page, not the file"
    if path.suffix == ".safetensors":
        try:
            read_header(path)
        except SafetensorsError as error:
            return f"is not whole ({error.why or error.what})"
    return None


def check_whole(rule: str, paths: Iterable[Path], report: Report) -> bool:
    """Report each of `paths` that is damaged; whether there was none."""
    sound = True
    for path in sorted(paths):
        found = damage(path)
        if found:
            sound = False
            report.error(rule, path, found, why="the server reads it", remedy="fetch or copy it again")
    return sound


def check_leftovers(rule: str, folder: Path, report: Report) -> None:
    """Report the first file in `folder`, or in huggingface_hub's folder in it, that a download has not finished."""
    files = [*folder.iterdir(), *folder.glob(".cache/huggingface/download/*.incomplete")]
    left = sorted(path for path in files if path.name.lower().endswith(UNFINISHED) and path.is_file())
    if left:
        more = f", as {len(left) - 1} more" if len(left) > 1 else ""
        report.warning(
            rule, left[0], f"is a download that did not end{more}", why="what it was to be may be missing or old",
            remedy="fetch the folder again, and delete it",
        )  # fmt: skip
