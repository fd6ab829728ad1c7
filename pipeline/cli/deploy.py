"""`trtpipe deploy` and `trtpipe monitoring`: files for a cluster, and for Prometheus and Grafana."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.help import SectionedCommand, SectionedGroup
from trtpipe.pipeline.cli.options import AllowModelCode, Json, Target, own_store

deploy = typer.Typer(
    name="deploy",
    cls=SectionedGroup,
    help="Write what a cluster needs to serve a target.\n\n\b\nExamples:\n"
    "  trtpipe deploy k8s TARGET -o out --pvc models --gateway-image IMAGE\n"
    "  trtpipe deploy k8s TARGET -o out --model-image IMAGE --no-openai",
    rich_markup_mode=None,
)


@deploy.callback()
def _deploy() -> None:
    """One command for each kind of cluster."""


@deploy.command(cls=SectionedCommand)
def k8s(
    target: Annotated[
        str, typer.Argument(help="A target in ./runs, or a model repository.", autocompletion=complete.targets)
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="Folder to write: new or empty.")],
    pvc: Annotated[str | None, typer.Option(help="PersistentVolumeClaim that holds the repository.")] = None,
    model_image: Annotated[str | None, typer.Option(help="Container image that holds the repository.")] = None,
    host_path: Annotated[str | None, typer.Option(help="Folder of the node that holds the repository.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the resources; `default` if left out.")] = None,
    image: Annotated[str | None, typer.Option(help="Image of the server; the toolchain's if left out.")] = None,
    gateway_image: Annotated[
        str | None, typer.Option(help="Image of the OpenAI-compatible gateway beside the server, with trtpipe in it.")
    ] = None,
    no_openai: Annotated[bool, typer.Option("--no-openai", help="Put no gateway into the pod.")] = False,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Collector that the gateway sends traces to: http://collector:4318.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting of docs/reference/settings.md: replicas_max=8; repeatable."),
    ] = None,
    allow_model_code: AllowModelCode = False,
    as_json: Json = False,
) -> None:
    """Write a kustomize base, a Helm chart and KServe's resources that serve a target.

    They hold a Deployment or a LeaderWorkerSet, a Service, probes, autoscaling and a disruption budget.

    \b
    Examples:
      trtpipe deploy k8s TARGET -o out --pvc models --gateway-image IMAGE
      trtpipe deploy k8s TARGET -o out --model-image IMAGE --no-openai
    """
    from trtpipe.configs import facts, read
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.passport import read_passport
    from trtpipe.pipeline import compatibility
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.deploy.config import DeployConfig
    from trtpipe.pipeline.deploy.kubernetes import write
    from trtpipe.pipeline.layers import set_layer
    from trtpipe.pipeline.serving import repositories
    from trtpipe.triton_repo.layout import ENGINE_FOLDER

    name, repository, _ = repositories.find_repository(target)
    passport = read_passport(repository / ENGINE_FOLDER)
    given = {"namespace": namespace, "image": image, "pvc": pvc, "model_image": model_image,
             "host_path": host_path, "gateway_image": gateway_image, "openai": False if no_openai else None,
             "otlp_endpoint": otlp_endpoint}  # fmt: skip
    chosen = {key: value for key, value in given.items() if value is not None}
    more = set_layer(settings or [])[1]
    for key in sorted(more.keys() & chosen.keys()):
        raise UsageError(f"--set {key} says what an option says already", remedy=f"leave out --set {key}")
    made = read.build(DeployConfig, {"name": name, **chosen, **more}, "--set", UsageError)
    place = repositories.called(name, repository)
    compatibility.require_trusted(place, repository, own_store(), allow_code=allow_model_code)
    paths = write(passport, facts.find_gpu(passport.gpu), made, out, repository)
    if as_json:
        console.result_json({"folder": out, "files": [path.relative_to(out) for path in paths]})
        return
    console.table(("written",), [(path,) for path in paths])
    console.result(
        f"next: kubectl apply -k {out}/base, or helm install NAME {out}/chart -n {made.namespace}   "
        f"({out}/README.md says more)"
    )


def monitoring(
    target: Target = None,
    out: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("monitoring"),
    metrics: Annotated[
        str, typer.Option(help="Addresses of the servers' metrics: host:port,...; of the running server if left out.")
    ] = "",
    gateways: Annotated[
        str | None,
        typer.Option(help='Addresses of the gateways: host:port,...; "" for none; of the running server if left out.'),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File that holds a key of the gateways, as Prometheus finds it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a Grafana dashboard, scrape config and alerts.

    \b
    Examples:
      trtpipe monitoring llama3-8b.h100.fp8
      trtpipe monitoring --metrics gpu-1:8002 --gateways gpu-1:9000 -o watch
    """
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.deploy.monitoring import ALERTS, DASHBOARD, GATEWAYS, SCRAPE, SERVERS, write_monitoring
    from trtpipe.pipeline.serving import repositories, servers
    from trtpipe.triton_repo.layout import model_names

    name, repository, _ = repositories.find_repository(target)
    # What `metrics` names has nothing to do with a server here.
    running = [] if metrics else servers.running(own_store())
    serving = [one for one in running if name in {served.name for served in one.served}]
    found = [one for one in serving if not one.native]
    if serving and not found:
        raise UsageError(
            f"{name} is served by its runtime's own server",
            why="that publishes none of Triton's metrics, which the dashboard and the alerts are about",
            remedy="serve it with --front triton, or name other servers by --metrics",
        )
    # With several targets in a server, each has its name before those of its models.
    loaded = [served.model(model) for one in found for served in one.served for model in model_names(served.repository)]
    if gateways is None and metrics:
        console.note("no gateway is scraped; name those beside these servers by --gateways")
    addresses = [one.gateway_url for one in found if one.gateway_url] if found else () if metrics else GATEWAYS
    write_monitoring(
        loaded if found else model_names(repository), out,
        targets=metrics.split(",") if metrics else [one.endpoints.metrics_url for one in found] or SERVERS,
        gateways=addresses if gateways is None else [one for one in gateways.split(",") if one],
        key_file=api_key_file,
    )  # fmt: skip
    if as_json:
        console.result_json({"folder": out, "files": sorted((ALERTS, DASHBOARD, SCRAPE))})
        return
    if gateways is None and api_key_file is None and any(one.keyed for one in found):
        console.note("the gateway asks Prometheus for a key too: name a file with one by --api-key-file")
    console.result(str(out))
