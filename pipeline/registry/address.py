"""Selection of the registry that a URL names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.registry.base import Registry

# An address of each form; one of another scheme is like S3's.
EXAMPLES = {"oci": "oci://registry.example/team/engines", "hf": "hf://owner/name", "file": "file:///folder"}

# A name with a dot or a port before the first slash, as in addresses of container registries.
HOST = re.compile(r"[\w-]+((\.[\w-]+)+(:\d+)?|:\d+)/")


def location(url: str) -> str:
    """How an origin names the registry or file at this address: by the absolute path, or by the URL of another scheme
    than file://."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme != "file":
        return url
    path = unquote(re.sub("^localhost/", "/", rest)) if separator else os.path.expanduser(url)  # noqa: PTH111  # Path would take ./~ for ~
    return str(Path(path).resolve())


def open_registry(url: str) -> Registry:
    """Raises UsageError for a URL of no known form, HostError for what is not installed or not reachable."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        if HOST.match(url) and not Path(url).exists():
            raise UsageError(
                f"'{url}' may be a registry's address or a folder", remedy=f"give oci://{url}, or ./{url} for a folder"
            )
        if not url or re.match("[a-z0-9]{2,}:", url):
            raise UsageError(f"'{url}' is not an address", remedy="give for example s3://bucket/prefix, or a folder")
        from trtpipe.pipeline.registry.files import FileRegistry

        return FileRegistry.at(location(url))
    if not rest.strip("/"):
        raise UsageError(
            f"{url} names no place", remedy=f"give for example {EXAMPLES.get(scheme, f'{scheme}://bucket/prefix')}"
        )
    if scheme == "memory":
        raise UsageError(f"{url} is lost when this program ends", remedy="give oci://, hf://, s3:// or a folder")
    if scheme == "oci":
        from trtpipe.pipeline.registry.oci import OciRegistry

        return OciRegistry.open(url)
    if scheme == "hf":
        from trtpipe.pipeline.registry.hub import HubRegistry

        return HubRegistry.at(url)
    if scheme in ("s3", "s3a"):
        from trtpipe.pipeline.registry.s3 import S3Registry

        return S3Registry.open(url)
    from trtpipe.pipeline.registry.files import FileRegistry

    return FileRegistry.at(location(url)) if scheme == "file" else FileRegistry.open(url)
