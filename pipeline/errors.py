"""Translation of exceptions of Python and of libraries into our five classes, which set the message and exit code.

One ordered table: the first matching row counts. An exception without a row is our defect.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from trtpipe.configs.home import default_home
from trtpipe.engines.errors import HostError, TrtpipeError, UsageError
from trtpipe.engines.files import DiskFull, device, free_bytes, is_full
from trtpipe.pipeline.net import proxies

_Row = tuple[type[BaseException], Callable[[BaseException], bool], Callable[[BaseException], TrtpipeError]]


def _errno(*numbers: int) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, OSError) and error.errno in numbers


def _path(error: BaseException) -> Path | None:
    """Path that the failed operation was given; of a link or a renaming, which have two, the destination."""
    filename = getattr(error, "filename2", None) or getattr(error, "filename", None)
    return Path(filename) if isinstance(filename, (str, Path)) else None


def _there(path: Path) -> bool:
    """Whether the path exists; False where its folder may not be searched. Path.exists raises an error there."""
    return os.access(path, os.F_OK)


def _named(error: BaseException) -> str:
    filename = _path(error) or getattr(error, "filename", None)
    return f"{filename}: " if filename else ""


def _reason(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(errno.ENOTDIR if number == errno.EEXIST else number) if number else str(error)


def _at_home(error: BaseException) -> bool:
    """Whether the file is in TRTPIPE_HOME, or one that TRTPIPE_HOME would have to be in."""
    path, home = _path(error), default_home()
    if path is None:
        return False
    path = path.absolute()
    return path == home or home in path.parents or path in home.parents


def _full_outside_home(error: BaseException) -> bool:
    """Whether the full disk is another one than that of TRTPIPE_HOME. A failed write names no file: then it is the
    current folder's disk where that has less room."""
    path, home = _path(error), default_home()
    if path is not None:
        return device(path) != device(home)
    return device(Path.cwd()) != device(home) and free_bytes(Path.cwd()) < free_bytes(home)


def _place(error: BaseException) -> str:
    if _at_home(error):
        return "set TRTPIPE_HOME to a folder that you may write"
    path = _path(error)
    if path is None or (_there(path) and path.is_file()):
        return "check the permissions"
    if path.parts[:1] in (("runs",), ("reports",)):
        return "run this in a folder of yours: runs and reports are written to the current folder"
    return "check the permissions, or name another place"


def _denied(error: BaseException) -> HostError:
    """The error for what the system does not allow. What is not there was to be made: its folder is named then, since
    the file may have had a temporary name."""
    path, reason = _path(error), str(getattr(error, "strerror", error))
    if path is not None and not _there(path):
        folder = next(one for one in path.absolute().parents if _there(one))
        if os.access(folder, os.X_OK) and not os.access(folder, os.W_OK):
            return HostError(f"folder {folder} cannot be written", why=reason, remedy=_place(error))
    return HostError(f"{_named(error)}{reason}", remedy=_place(error))


def _bad_certificates(error: BaseException) -> str:
    """Why the certificates of SSL_CERT_FILE cannot be read, where that may be what failed: the error names no file."""
    file = os.environ.get("SSL_CERT_FILE")
    if not file or _path(error) is not None:
        return ""
    import ssl

    try:
        ssl.create_default_context(cafile=file)
    except OSError as unread:  # ssl.SSLError as well
        return str(getattr(unread, "reason", None) or unread.strerror or unread)
    return ""


# Errors that the state of the machine can cause, as opposed to a defect of ours.
STATE = (
    errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOMEM, errno.EAGAIN, errno.ESTALE, errno.ENOTEMPTY, errno.EBUSY,
)  # fmt: skip

# Those that another path would not have.
PLACE = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip

ROWS: tuple[_Row, ...] = (
    (
        # Libraries written in Rust wrap it in exceptions of their own.
        Exception,
        is_full,
        lambda error: DiskFull(
            f"{_named(error)}the disk is full",
            why=str(getattr(error, "strerror", error)),
            variable=None if _full_outside_home(error) else "TRTPIPE_HOME",
        ),
    ),
    (
        OSError,
        lambda error: bool(_bad_certificates(error)),
        lambda error: HostError(
            f"the certificates in {os.environ['SSL_CERT_FILE']} cannot be read",
            why=_bad_certificates(error),
            remedy="set SSL_CERT_FILE to a file of certificates in PEM, or unset it",
        ),
    ),
    (
        OSError,
        _errno(errno.EACCES, errno.EPERM, errno.EROFS),
        _denied,
    ),
    (
        OSError,
        # To make a folder where a file is fails as EEXIST.
        lambda error: _errno(errno.ENOENT, errno.ENOTDIR, errno.EEXIST)(error) and _at_home(error),
        lambda error: HostError(
            f"TRTPIPE_HOME is {default_home()}: {_named(error)}{_reason(error)}",
            remedy="set it to a folder that you may write",
        ),
    ),
    (
        OSError,
        _errno(errno.ENOLCK),  # of a lock in the store; it names no file
        lambda error: HostError(
            f"TRTPIPE_HOME is {default_home()}, whose disk takes no locks",
            why=_reason(error),
            remedy="mount it with locks, or set TRTPIPE_HOME to a folder on another disk",
        ),
    ),
    (
        OSError,
        _errno(*STATE),
        lambda error: HostError(
            f"{_named(error)}{getattr(error, 'strerror', error)}",
            remedy="name another place" if getattr(error, "errno", None) in PLACE else "",
        ),
    ),
    (
        Exception,  # of httpx, for an address of another scheme, or SOCKS without the package for it
        lambda error: (
            isinstance(error, (ValueError, ImportError))
            and "proxy" in str(error).lower()
            and bool(proxies.variables("http", "https"))
        ),
        lambda error: HostError(
            f"{' or '.join(proxies.variables('http', 'https'))} cannot be used",
            why=str(error),
            remedy="give http://HOST:PORT, or unset it",
        ),
    ),
    (
        RuntimeError,  # of Path.resolve, before Python 3.13
        lambda error: str(error).startswith("Symlink loop"),
        lambda error: HostError(str(error), remedy="name another place"),
    ),
    (
        MemoryError,
        lambda error: True,
        lambda error: HostError(
            "this machine has not enough memory", remedy="close other programs or use a larger one"
        ),
    ),
    (
        UnicodeEncodeError,
        lambda error: isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason,
        lambda error: UsageError("the input is not text: it holds bytes that are not UTF-8"),
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
