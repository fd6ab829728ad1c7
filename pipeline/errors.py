"""Translation of exceptions of Python and of libraries into our five classes, which set the message and exit code.

One ordered table: the first matching row counts. An exception without a row is our defect and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from trtpipe.engines.errors import HostError, TrtpipeError
from trtpipe.engines.files import FULL, DiskFull

_Row = tuple[type[BaseException], Callable[[BaseException], bool], Callable[[BaseException], TrtpipeError]]


def _errno(*numbers: int) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, OSError) and error.errno in numbers


def _named(error: BaseException) -> str:
    filename = getattr(error, "filename", None)
    return f"{filename}: " if filename else ""


# Errors that the state of the machine can cause, as opposed to a defect of ours.
STATE = (
    errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOMEM, errno.EAGAIN, errno.ESTALE,
)  # fmt: skip

ROWS: tuple[_Row, ...] = (
    (
        # Libraries written in Rust wrap it in exceptions of their own.
        Exception,
        lambda error: _errno(errno.ENOSPC, errno.EDQUOT)(error) or FULL.search(str(error)) is not None,
        lambda error: DiskFull(f"{_named(error)}the disk is full", why=str(getattr(error, "strerror", error))),
    ),
    (
        OSError,
        _errno(errno.EACCES, errno.EPERM, errno.EROFS),
        lambda error: HostError(
            f"{_named(error)}{getattr(error, 'strerror', error)}",
            remedy="check the permissions, or set TRTPIPE_HOME to a folder of yours",
        ),
    ),
    (
        OSError,
        _errno(*STATE),
        lambda error: HostError(f"{_named(error)}{getattr(error, 'strerror', error)}"),
    ),
    (
        MemoryError,
        lambda error: True,
        lambda error: HostError(
            "this machine has not enough memory", remedy="close other programs or use a larger one"
        ),
    ),
)


def translate(error: BaseException) -> TrtpipeError | None:
    """Our exception for `error`; None for one that the table does not know."""
    if isinstance(error, TrtpipeError):
        return error
    for kind, applies, ours in ROWS:
        if isinstance(error, kind) and applies(error):
            return ours(error)
    return None
