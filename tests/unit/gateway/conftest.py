"""A model for a gateway, and options of a gateway in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import end_fork_servers, write_model
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a gateway reads of a model. All tests share it, and with it the processes that prepare prompts."""
    yield write_model(tmp_path_factory.mktemp("tokenizer"))
    end_fork_servers()


def options(folder: Path, **fields: Any) -> GatewayOptions:
    models = (ServedModel(name="llama", tokenizer=folder),)
    return GatewayOptions(**{"models": models, "grpc_url": "127.0.0.1:1", **fields})
