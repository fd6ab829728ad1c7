"""The environment of a server: this process's, without its secrets.

Every model of a server, and every process of it, can read its environment: what they have no use for they do not get.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Words of a name that stands for a secret: HF_TOKEN, TRTPIPE_API_KEYS, SSH_AUTH_SOCK; not TOKENIZERS_PARALLELISM.
_SECRET_WORDS = re.compile(
    r"(?:^|_)(?:AUTH|CREDENTIALS?|(?:API|ACCESS|PRIVATE)?KEYS?|PASS|PASSWD|PASSWORDS?|PASSPHRASE|PAT|PWD|SECRETS?|TOKENS?)"
    r"(?:_|$)"
)
# Of a cloud's settings nothing is needed: a repository is served from a folder of this machine.
_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_")
# user:password@ in a URL, as of a proxy or a package index.
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose name or value shows no secret. PWD and OLDPWD, the shell's folders, stay."""
    return {name: value for name, value in environment.items() if not _is_secret(name, value)}


def _is_secret(name: str, value: str) -> bool:
    if name in ("PWD", "OLDPWD"):
        return False
    upper = name.upper()
    return bool(_SECRET_WORDS.search(upper) or upper.startswith(_CLOUDS) or _PASSWORD_IN_URL.search(value))
