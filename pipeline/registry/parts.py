"""Upload to S3 in parts, several at a time; an interrupted upload continues where it was.

S3 keeps the parts of an incomplete upload until a lifecycle rule of the bucket drops them. An object is named by its
file's digest, so an earlier upload under that name has the same bytes.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trtpipe.engines import threads
from trtpipe.pipeline.net.http_limits import patience
from trtpipe.pipeline.registry.base import Moved

# Bytes of a part. S3 takes none below 5 MiB but the last.
PART = 32 << 20
MAX_PARTS = 10_000
AT_ONCE = 4
# Bytes per second that a server may join once it has all parts.
JOINED_PER_SECOND = 10_000_000


class FilePart(io.RawIOBase):
    """Bytes [start, start + size) of an open file, as a file object: they are sent without being held in memory. None
    can be read once `ended` is set."""

    def __init__(self, file: BinaryIO, start: int, size: int, ended: threading.Event) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0
        self._ended = ended

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._ended.is_set():
            raise OSError("the upload was interrupted")
        count = min(len(buffer), self._size - self._at)
        data = os.pread(self._file.fileno(), max(0, count), self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at


class Parts:
    """Upload of one file to an object. Raises what `call` raises, which calls a method of S3 in a bucket."""

    def __init__(self, call: Callable[..., Any], key: str, path: Path) -> None:
        self._call = call
        self._key = key
        self._path = path
        self._size = path.stat().st_size

    def upload(self, moved: Moved) -> None:
        """`moved` is also called for bytes that are there already. Parts under way are not waited for where one fails
        or a signal comes."""
        upload = self._begun()
        there = self._there(upload) if upload else {}
        upload = upload or self._call("create_multipart_upload", Key=self._key)["UploadId"]
        ended = threading.Event()

        def sent(number: int) -> dict[str, Any]:
            if ended.is_set():
                raise OSError("the upload was interrupted")
            start = (number - 1) * PART
            size = min(PART, self._size - start)
            held = there.get(number)
            if held is None or held["Size"] != size:
                with self._path.open("rb") as file:
                    held = self._call(
                        "upload_part", Key=self._key, UploadId=upload, PartNumber=number, size=size,
                        Body=FilePart(file, start, size, ended),
                    )  # fmt: skip
            return {"PartNumber": number, "ETag": held["ETag"]}

        parts: list[dict[str, Any]] = []
        try:
            for outcome in threads.begin(sent, range(1, -(-self._size // PART) + 1), AT_ONCE):
                parts.append(threads.result(outcome))
                moved(min(PART, self._size - (len(parts) - 1) * PART))
        except BaseException:
            ended.set()
            raise
        with patience(self._size / JOINED_PER_SECOND):
            self._call("complete_multipart_upload", Key=self._key, UploadId=upload, MultipartUpload={"Parts": parts})

    def _begun(self) -> str | None:
        try:
            answer = self._call("list_multipart_uploads", Prefix=self._key)
        except PermissionError:
            return None  # the user may be allowed to write, but not to list
        found: list[str] = [one["UploadId"] for one in answer.get("Uploads", ()) if one["Key"] == self._key]
        return found[-1] if found else None

    def _there(self, upload: str) -> dict[int, dict[str, Any]]:
        return {part["PartNumber"]: part for page in self._pages(upload) for part in page.get("Parts", ())}

    def _pages(self, upload: str) -> Iterator[dict[str, Any]]:
        marker = 0
        while True:
            page = self._call("list_parts", Key=self._key, UploadId=upload, PartNumberMarker=marker)
            yield page
            if not page.get("IsTruncated"):
                return
            before, marker = marker, int(page["NextPartNumberMarker"])
            if not before < marker <= MAX_PARTS:
                return
