"""What the attacks share: a load tester's process, and one tiny model behind a real server with secrets around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.attacks import hostile_servers as hostile
from tests.attacks.bench_child import Child
from tests.attacks.streams import KEY, Attacked
from tests.e2e.conftest import Cli
from tests.e2e.conftest import cli as cli
from tests.e2e.conftest import tiny_repository as tiny_repository
from tests.support.factories import hf_folder

SIZES = ("max_batch_size=32", "max_input_len=64", "max_seq_len=8192", "max_num_tokens=64", "max_beam_width=1")
PORTS = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
# As a shell may hold them when somebody types `trtpipe serve`.
SECRETS = {
    "TRTPIPE_API_KEYS": KEY,
    "HF_TOKEN": "hf_ofThisTestAlone",
    "AWS_SECRET_ACCESS_KEY": "aws-of-this-test-alone",
    "OPENAI_API_KEY": "sk-of-this-test-alone",
    "PIP_INDEX_URL": "https://somebody:password-of-this-test-alone@index.invalid/simple",
}


@pytest.fixture(scope="session")
def server(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    model = hf_folder(tmp_path_factory.mktemp("models") / "attacked", dtype="F32", max_position_embeddings=8192)
    sizes = [word for size in SIZES for word in ("--set", f"build.{size}")]
    # Two streams come through the script, and a third request asks whether it works.
    scripts = ("--set", "serving.bls_instance_count=3")
    cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", *sizes, *scripts)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        cli.ok("serve", "attacked.cpu.fp32", "--detach", *PORTS)
    attacked = Attacked(cli, "attacked.cpu.fp32", {})
    attacked.refresh()
    yield attacked
    cli.kill_server(attacked.name)


@pytest.fixture
def attacked(server: Attacked) -> Attacked:
    """The server, every door of which answers."""
    server.refresh()
    server.recover()
    return server


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One that has measured: what it imports is no memory of an attack's."""
    with closing(Child()) as made:
        with closing(hostile.http_server(lambda: (), good=1000)) as server:
            made.measure(protocol="chat", url=f"http://127.0.0.1:{server.port}/v1")
        with closing(hostile.grpc_server(lambda number: (), good=1000)) as server:
            made.measure(protocol="grpc", url=f"127.0.0.1:{server.port}")
        yield made
