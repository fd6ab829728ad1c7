"""README.md of a written base, from templates/README.md.j2: what to know before applying it, and why it is so."""

from __future__ import annotations

from pathlib import Path

import jinja2

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
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template("README.md.j2").render(
        target=target,
        passport=target.passport,
        gpu=target.gpu,
        config=target.config,
        placement=target.placement,
        toolchain=load_toolchains().get(target.passport.toolchain or ""),
        name=target.name,
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
        llm_api=load_backend(target.passport.runtime).SERVED_BY is ServedBy.LLM_API,
        uses_mpi=launch.uses_mpi(target.passport, target.placement),
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
