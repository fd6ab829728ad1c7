"""Uploads to S3 in parts, several at a time; one that breaks off goes on where it was.

S3 keeps the parts of an upload that was not completed, until a lifecycle rule of the bucket drops them. A file lies
under its digest, so whatever was begun under that name is of the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.registry.base import Moved

# S3 takes 10,000 of them, and none but the last below 5 MiB.
PART = 32 << 20
AT_ONCE = 4


class Parts:
    """One file's upload to `place` in `system`, which is s3fs's. Raises what s3fs raises."""

    def __init__(self, system: Any, place: str, path: Path) -> None:
        self._system = system
        bucket, key, _ = system.split_path(place)
        self._at = {"Bucket": bucket, "Key": key}
        self._path = path
        self._size = path.stat().st_size

    def upload(self, moved: Moved) -> None:
        """`moved` is told of what is there already, too."""
        upload = self._begun()
        there = self._there(upload) if upload else {}
        upload = upload or self._system.call_s3("create_multipart_upload", **self._at)["UploadId"]

        def sent(number: int) -> dict[str, Any]:
            start = (number - 1) * PART
            size = min(PART, self._size - start)
            held = there.get(number)
            if held is None or held["Size"] != size:
                with self._path.open("rb") as file:
                    file.seek(start)
                    held = self._system.call_s3(
                        "upload_part", **self._at, UploadId=upload, PartNumber=number, Body=file.read(size)
                    )
            return {"PartNumber": number, "ETag": held["ETag"]}

        parts: list[dict[str, Any]] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for part in pool.map(sent, range(1, -(-self._size // PART) + 1)):
                    parts.append(part)
                    moved(min(PART, self._size - (len(parts) - 1) * PART))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._system.call_s3("complete_multipart_upload", **self._at, UploadId=upload, MultipartUpload={"Parts": parts})

    def _begun(self) -> str | None:
        try:
            answer = self._system.call_s3("list_multipart_uploads", Bucket=self._at["Bucket"], Prefix=self._at["Key"])
        except PermissionError:
            return None  # one may be let in to write, and not to list
        found: list[str] = [one["UploadId"] for one in answer.get("Uploads", ()) if one["Key"] == self._at["Key"]]
        return found[-1] if found else None

    def _there(self, upload: str) -> dict[int, dict[str, Any]]:
        return {part["PartNumber"]: part for page in self._pages(upload) for part in page.get("Parts", ())}

    def _pages(self, upload: str) -> Iterator[dict[str, Any]]:
        marker = 0
        while True:
            page = self._system.call_s3("list_parts", **self._at, UploadId=upload, PartNumberMarker=marker)
            yield page
            if not page.get("IsTruncated"):
                return
            marker = page["NextPartNumberMarker"]
