"""Registries that keep targets for others: an index for each target, and its files under their digests.

A URL selects the registry: oci://host/name, hf://owner/name, s3://bucket/prefix (or any other scheme that fsspec
knows), or a folder.
"""
