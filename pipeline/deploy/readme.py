"""README.md of a written base, from templates/README.md.j2: what to know before applying it, and why it is so."""

from __future__ import annotations

from pathlib import Path

import jinja2

from trtpipe.configs.facts import load_toolchains
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.deploy import launch
from trtpipe.pipeline.deploy.config import DeployConfig
from trtpipe.pipeline.deploy.placement import Placement
from trtpipe.pipeline.deploy.pods import GPU_PRODUCT, SECRET_KEY, USER
from trtpipe.pipeline.deploy.prometheus import FULLNESS, SERIES, waiting_metric


def text(
    passport: Passport, gpu: GpuSpec, config: DeployConfig, placement: Placement, *,
    name: str, workload: str, replicas: tuple[int, int], secret: str | None,
) -> str:  # fmt: skip
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
        passport=passport,
        gpu=gpu,
        config=config,
        placement=placement,
        toolchain=load_toolchains().get(passport.toolchain or ""),
        name=name,
        workload=workload,
        replicas=replicas,
        scaled=replicas[0] != replicas[1],
        grouped=placement.pods > 1,
        secret=secret,
        secret_key=SECRET_KEY,
        user=USER,
        gpu_label=GPU_PRODUCT,
        reports_waiting=launch.reports_waiting(passport),
        own_image=launch.own_image(passport),
        uses_mpi=launch.uses_mpi(passport),
        waiting=waiting_metric(passport.pp_size),
        series=SERIES,
        fullness=FULLNESS,
        pre_stop_seconds=launch.PRE_STOP_SECONDS,
        rendezvous=launch.RENDEZVOUS,
        rendezvous_port=launch.RENDEZVOUS_PORT,
    )
