"""Trust in artefacts from elsewhere: a build may reuse those whose origin the user names, or whose provenance
is signed by a key of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import ArtefactRefused
from trtpipe.engines.json_input import read_bounded
from trtpipe.pipeline.registry.address import location
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Artefact, Store

# File beside the manifest of an imported artefact: the signed provenance that it arrived with.
ENVELOPE = "provenance.dsse.json"
# Largest envelope: a statement names every file of a target, with some 200 bytes each.
MAX_ENVELOPE_BYTES = 16 << 20


@dataclass(frozen=True)
class Trust:
    """Origins, as the user gives them, and public keys (PEM files) whose artefacts may be reused."""

    origins: tuple[str, ...] = ()
    keys: tuple[Path, ...] = ()

    def require_keys(self) -> None:
        """Raises InputDataError for a file that is no public key, HostError where the library is not installed."""
        from trtpipe.pipeline.registry.signatures import require_public_keys

        require_public_keys(self.keys)

    def unknown(self, store: Store) -> list[str]:
        """The origins from which nothing in the store came, as the user gives them."""
        known = store.sources() if self.origins else set()
        return [origin for origin in self.origins if not {origin, location(origin)} & known]

    def find(self, record: Record, makes: str, store: Store) -> tuple[Artefact, str] | None:
        """An imported artefact of `record` that may be reused, and the reason to trust it."""
        if not self.origins and not self.keys:
            return None
        # Version 0.1 named the folder of a registry as it was given.
        origins = {*self.origins, *map(location, self.origins)}
        for artefact in store.imported(record):
            assert artefact.origin is not None
            if artefact.origin.source in origins:
                return artefact, "its origin is trusted by name"
            if self.keys and signed(artefact, makes, self.keys):
                return artefact, "its provenance is signed by a trusted key"
        return None


def signed(artefact: Artefact, makes: str, keys: Sequence[Path]) -> bool:
    """Whether one of `keys` has signed a provenance in which `makes` is this very artefact.

    Raises InputDataError for a key that cannot be read.
    """
    from trtpipe.pipeline.registry.provenance import stages
    from trtpipe.pipeline.registry.signatures import verify_envelope

    try:
        statement = verify_envelope(read_bounded(artefact.path.parent / ENVELOPE, MAX_ENVELOPE_BYTES), keys)
        told = stages(statement)[makes]
        # The key is compared too: the same bytes from a build of another model would be the wrong ones.
        return (told["digest"]["sha256"], told["annotations"]["key"]) == (
            artefact.manifest.content, artefact.manifest.record.key,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, ArtefactRefused):
        return False
