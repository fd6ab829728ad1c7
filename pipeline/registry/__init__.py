"""Where targets are kept for others: an index for each, and their files under their digests.

A URL says which: oci://host/name, hf://owner/name, s3://bucket/prefix (or any other scheme that fsspec knows), or a
folder.
"""
