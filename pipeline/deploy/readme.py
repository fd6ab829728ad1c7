"""README.md of a written base, from templates/README.md.j2: what to know before applying it, and why it is so."""

from __future__ import annotations

import shlex
from pathlib import Path

import jinja2

from trtpipe import __version__
from trtpipe.configs.facts import load_toolchains
from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import ServedBy
from trtpipe.pipeline.deploy import launch
from trtpipe.pipeline.deploy.pods import GPU_PRODUCT, LOST_NODE_SECONDS, SECRET_KEY, USER
from trtpipe.pipeline.deploy.prometheus import (
    FULLNESS,
    METRICS_KEY,
    SERIES,
    UNANSWERED,
    UNANSWERED_SERIES,
    waiting_metric,
)
from trtpipe.pipeline.deploy.target import Target


def text(target: Target) -> str:
    """The whole file."""
    backend = load_backend(target.passport.runtime)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template("README.md.j2").render(
        version=__version__,
        target=target,
        passport=target.passport,
        gpu=target.gpu,
        config=target.config,
        placement=target.placement,
        toolchain=load_toolchains().get(target.passport.toolchain or ""),
        name=target.name,
        resource=f"{'leaderworkerset' if target.grouped else 'deployment'}/{target.workload}",
        workload=target.workload,
        replicas=target.replicas,
        scaled=target.replicas[0] != target.replicas[1],
        grouped=target.grouped,
        secret=target.secret,
        secret_key=SECRET_KEY,
        keys_secret=target.keys_secret,
        metrics_key=METRICS_KEY,
        user=USER,
        gpu_label=GPU_PRODUCT,
        own_image=launch.own_image(target.passport),
        vllm=shlex.join(backend.NEEDS.install) if backend.NEEDS else "",
        llm_api=backend.SERVED_BY is ServedBy.LLM_API,
        uses_mpi=launch.uses_mpi(target.passport, target.placement),
        answer_seconds=launch.answer_seconds(target.passport, target.config, target.placement),
        waiting=waiting_metric(target.passport.pp_size),
        series=SERIES,
        fullness=FULLNESS,
        unanswered=UNANSWERED,
        unanswered_series=UNANSWERED_SERIES,
        linger_seconds=launch.LINGER_SECONDS,
        pre_stop_seconds=launch.PRE_STOP_SECONDS,
        lost_node_seconds=LOST_NODE_SECONDS,
        rendezvous=launch.RENDEZVOUS,
        rendezvous_port=launch.RENDEZVOUS_PORT,
    )
