"""The environment of a server: this process's, without its secrets.

Every model of a server, and every process of it, can read its environment, so secrets are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Words in the name of a secret variable: HF_TOKEN, TRTPIPE_API_KEYS, SSH_AUTH_SOCK; not TOKENIZERS_PARALLELISM.
_SECRET_WORDS = re.compile(
    r"(?:^|_)(?:AUTH|CREDENTIALS?|(?:API|ACCESS|PRIVATE)?KEYS?|PASS|PASSWD|PASSWORDS?|PASSPHRASE|PAT|PWD|SECRETS?|TOKENS?)"
    r"(?:_|$)"
)
# No cloud settings are needed: a repository is served from a folder of this machine.
_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_")
# user:password@ in a URL, such as that of a proxy or a package index.
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those whose name or value shows a secret. PWD and OLDPWD, the shell's folders, stay."""
    return {name: value for name, value in environment.items() if not _is_secret(name, value)}


def _is_secret(name: str, value: str) -> bool:
    if name in ("PWD", "OLDPWD"):
        return False
    upper = name.upper()
    return bool(_SECRET_WORDS.search(upper) or upper.startswith(_CLOUDS) or _PASSWORD_IN_URL.search(value))
