"""`trtpipe build`, and what it would do: settings and status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import (
    AcceptAccuracy,
    Dtype,
    Executor,
    Gpu,
    GroupSize,
    Json,
    KvCache,
    Load,
    Lora,
    Model,
    MoeEp,
    MoeTp,
    Pp,
    Recipe,
    Revision,
    Runtime,
    Set,
    SourceKind,
    Tasks,
    Toolchain,
    Tp,
    TrustKey,
    TrustOrigin,
    hardware_option,
    named_folders,
    own_store,
)

if TYPE_CHECKING:
    from trtpipe.pipeline.matrix import Outcome
    from trtpipe.pipeline.registry.export import Bundle
    from trtpipe.pipeline.runner import StageResult
    from trtpipe.pipeline.spec import BuildSpec
    from trtpipe.pipeline.store.store import Store


def build(
    model: Model = None, gpu: Gpu = None, dtype: Dtype = None, kv_cache: KvCache = None, group_size: GroupSize = None,
    runtime: Runtime = None, toolchain: Toolchain = None,
    executor: Annotated[
        str | None,
        hardware_option(
            "Where trtllm-build runs: auto, local (this environment) or docker (the image); ray to build on a Ray "
            "cluster.",
            autocompletion=complete.words("auto", "local", "docker", "ray"),
        ),
    ] = None,
    tp: Annotated[str | None, hardware_option("Numbers of tensor-parallel ranks.", "--tp")] = None,
    pp: Annotated[str | None, hardware_option("Numbers of pipeline-parallel stages.", "--pp")] = None,
    moe_tp: MoeTp = None, moe_ep: MoeEp = None,
    load: Load = None, source: SourceKind = None, revision: Revision = None, recipe: Recipe = None,
    settings: Set = None, lora: Lora = None, accept_accuracy: AcceptAccuracy = None, tasks: Tasks = None,
    bundle: Annotated[
        str | None, typer.Option("--from", help="Finish an exported file, or a target that was imported.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file of reused artefacts.")] = False,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="Keep the files of a failed stage.")] = False,
    ray: Annotated[
        str | None, hardware_option("Address of the Ray cluster of --executor ray; the one on this machine.")
    ] = None,
    exchange: Annotated[
        str | None, hardware_option("Registry for artefacts of a Ray cluster whose machines share no TRTPIPE_HOME.")
    ] = None,
    trust_origin: TrustOrigin = None, trust_key: TrustKey = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Make a model repository from a model, stage by stage.

    --model, --gpu, --dtype, --runtime, --toolchain, --tp and --pp also take lists, such as a100,h100: every
    combination is built, and what two of them share is made once. A stage whose artefact is current is not run
    again.

    \b
    Examples:
      trtpipe build --model llama3-8b --gpu h100 --dtype fp8
      trtpipe build --recipe smollm2-cpu --until convert
    """
    from trtpipe.pipeline import matrix
    from trtpipe.pipeline.api.build import build as make_target
    from trtpipe.pipeline.cli import console, console_build
    from trtpipe.pipeline.registry.trust import Trust
    from trtpipe.pipeline.run_folder import RunFolder
    from trtpipe.pipeline.runner import stages_until
    from trtpipe.pipeline.stages import stages_of

    options, store = locals(), own_store()
    on_cluster = executor == "ray"
    _check_cluster_options(options, on_cluster)
    trust = Trust(tuple(trust_origin or ()), tuple(trust_key or ()))
    for name in ("ray", "exchange", "trust_origin", "trust_key", "as_json"):
        del options[name]
    if on_cluster:
        options["executor"] = None  # each machine chooses its own executor
    reporter = console_build.BuildReporter()
    given = None
    if bundle is not None:
        arrived = _bundle(bundle, store, options, trust.keys)
        specs, given = [arrived.spec], arrived.artefacts
    else:
        specs = [_plan(one) for one in matrix.combinations(options)]
    for spec in specs:
        stages_until(stages_of(spec), until)  # refuses an unknown stage before anything is printed

    def make(spec: BuildSpec) -> list[StageResult]:
        announce(spec)
        made = make_target(
            spec, until=until, verify=verify, keep_failed=keep_failed, given=given, trust_origin=trust.origins,
            trust_key=trust.keys, store=store, reporter=reporter,
        )  # fmt: skip
        return list(made.stages)

    outcomes = _build_on_cluster(specs, store, ray, exchange, until) if on_cluster else matrix.build_all(specs, make)
    store.digests.save()
    if as_json:
        console.result_json([_facts(one) for one in outcomes])
    elif len(specs) > 1:
        console.table(("target", "state", "next"), [(o.spec.target, o.state, o.next_step) for o in outcomes])
    elif outcomes[0].error is None:
        run = RunFolder.of(specs[0].target).path
        if outcomes[0].results:
            console.table(("made", "where"), [(r.makes, run / r.makes) for r in outcomes[0].results])
        else:
            console.result(f"nothing to do: {specs[0].target} was imported with every artefact up to {until}")
        after = next_command(specs[0].target) if outcomes[0].packaged else "the same command without --until"
        console.result(f"next: {after}")
    matrix.raise_failures(outcomes)


def _facts(outcome: Outcome) -> dict[str, Any]:
    """A target as `build --json` prints it."""
    from trtpipe.pipeline.run_folder import RunFolder

    return {
        "target": outcome.spec.target,
        "folder": RunFolder.of(outcome.spec.target).path.absolute(),
        "state": outcome.state,
        "stages": [
            {"stage": one.stage, "makes": one.makes, "reused": one.reused, "reason": one.reason}
            for one in outcome.results
        ],
        "error": None if outcome.error is None else str(outcome.error),
    }


def next_command(target: str) -> str:
    """What to do on this machine with a target that is built."""
    from trtpipe.pipeline.compatibility import examine, find_passport
    from trtpipe.pipeline.run_folder import RunFolder

    verdict = examine(find_passport(RunFolder.of(target).path))
    if verdict.objections:
        return f"trtpipe export {target}   (to serve it on {verdict.passport.target()})"
    return f"trtpipe serve {target}"


def announce(spec: BuildSpec) -> None:
    """Print what was resolved, before anything is done with it."""
    from trtpipe.engines import load_backend
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.cli.console_table import words

    console.note(f"target {spec.target}")
    if notice := load_backend(spec.runtime).NOTICE:
        console.note(notice)
    chosen = [value for value in spec.values if console.FLAGS.verbose or value.source != "default"]
    width = max((len(value.name) for value in chosen), default=0)
    for value in chosen:
        console.note(f"{words(value.value)}  ({value.source})", head=f"  {value.name:<{width}}  ")
    if len(chosen) < len(spec.values):
        console.note(f"  and {len(spec.values) - len(chosen)} defaults, which `trtpipe settings` prints")
    _note_replaced(spec)


def _note_replaced(spec: BuildSpec) -> None:
    """Say of a target with other settings which recipe made it, where it was another, and which server has it."""
    from trtpipe.engines.json_input import parse_json
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.run_folder import RunFolder
    from trtpipe.pipeline.serving.servers import running
    from trtpipe.pipeline.serving.targets import servers_of

    run = RunFolder.of(spec.target)
    before, now = run.recorded(), parse_json(json.dumps(spec.to_json()))
    if not before or before.get("settings") == now["settings"]:
        return
    maker = _maker(before)
    if maker != _maker(now):
        console.note(f"this replaces {spec.target}, which {maker} made: to keep both, build in another folder")
    for server in servers_of(run.path, running(own_store())):
        able = not server.native and all(one.source is not None for one in server.served)
        ways = f"`trtpipe reload {server.name}` gives" if able else "stop it, and serve it again, which gives"
        console.note(f"{spec.target} is served: once it is built, {ways} its server the new one")


def _maker(plan: dict[str, Any]) -> str:
    """The recipe, or the kind of command, that a recorded spec is from."""
    rows = plan.get("values")
    sources = [str(row.get("source")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    recipe = next((source for source in sources if source.startswith("recipe ")), None)
    if recipe is not None:
        return recipe.removeprefix("recipe ")
    return "`trtpipe migrate`" if "the engine" in sources else "a command without a recipe"


def settings(
    model: Model = None, gpu: Gpu = None, dtype: Dtype = None, kv_cache: KvCache = None, group_size: GroupSize = None,
    runtime: Runtime = None, toolchain: Toolchain = None, executor: Executor = None, tp: Tp = None, pp: Pp = None,
    moe_tp: MoeTp = None, moe_ep: MoeEp = None,
    load: Load = None, source: SourceKind = None, revision: Revision = None, recipe: Recipe = None,
    settings: Set = None, lora: Lora = None, accept_accuracy: AcceptAccuracy = None, tasks: Tasks = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain each setting of the engine.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print every setting of a build and its source.

    Nothing is downloaded or written.

    \b
    Examples:
      trtpipe settings --model llama3-8b --gpu h100
      trtpipe settings --recipe smollm2-cpu --explain
    """
    from trtpipe.pipeline.cli import console

    resolved = _plan(locals(), offline=True)
    if as_json:
        console.result_json(resolved.to_json())
        return
    console.result(f"target {resolved.target}")
    if explain:
        rows = [(v.name, v.value, v.source, v.meaning) for v in resolved.values]
        console.table(("setting", "value", "from", "meaning"), rows)
        return
    console.table(("setting", "value", "from"), [(v.name, v.value, v.source) for v in resolved.values])


def status(
    model: Model = None, gpu: Gpu = None, dtype: Dtype = None, kv_cache: KvCache = None, group_size: GroupSize = None,
    runtime: Runtime = None, toolchain: Toolchain = None, executor: Executor = None, tp: Tp = None, pp: Pp = None,
    moe_tp: MoeTp = None, moe_ep: MoeEp = None,
    load: Load = None, source: SourceKind = None, revision: Revision = None, recipe: Recipe = None,
    settings: Set = None, lora: Lora = None, accept_accuracy: AcceptAccuracy = None, tasks: Tasks = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print for each stage whether its artefact is current.

    \b
    Examples:
      trtpipe status --recipe smollm2-cpu
      trtpipe status --model llama3-8b --gpu h100 --json
    """
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.runner import status as stage_status

    states = stage_status(_plan(locals()), own_store())
    rows = [(s.stage, s.state, s.reason, str(s.path) if s.path else None) for s in states]
    columns = ("stage", "state", "why", "artefact")
    if as_json:
        console.result_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        console.table(columns, rows)


def _plan(options: dict[str, Any], *, offline: bool = False) -> BuildSpec:
    """The spec from a command's options, and from the user's configuration, which they outrank.

    offline  whether the hub is not asked if a model is quantized already
    """
    from trtpipe.pipeline.api.build import BuildOptions, layers, resolved
    from trtpipe.pipeline.cli.config import read_config
    from trtpipe.pipeline.layers import assignments
    from trtpipe.pipeline.matrix import require_one
    from trtpipe.pipeline.resolve import resolve

    given: dict[str, Any] = {name: options.get(name) for name in BuildOptions.__annotations__}
    require_one(given)
    given["set"] = assignments(options["settings"] or [])
    given["lora"] = named_folders(options.get("lora"))
    given["tasks"] = [str(file) for file in options.get("tasks") or ()] or None
    found = layers(**given)
    gpu = next((layer["gpu"] for _, layer in reversed(found) if "gpu" in layer), None)
    return (resolve if offline else resolved)(found if str(gpu).lower() == "cpu" else [read_config().layer, *found])


def _check_cluster_options(options: dict[str, Any], on_cluster: bool) -> None:
    """Raises UsageError for options that `--executor ray` does not use, or that only it has."""
    from trtpipe.engines.errors import UsageError

    flags = {"bundle": "from", "verify": "verify", "keep_failed": "keep-failed",
             "trust_origin": "trust-origin", "trust_key": "trust-key"}  # fmt: skip
    if not on_cluster:
        flags = {"ray": "ray", "exchange": "exchange"}
    given = [f"--{flag}" for name, flag in flags.items() if options[name]]
    if given:
        raise UsageError(
            f"{given[0]} is {'not for' if on_cluster else 'for'} --executor ray",
            remedy=f"leave {given[0]} out{'' if on_cluster else ', or add --executor ray'}",
        )


def _build_on_cluster(
    specs: list[BuildSpec], store: Store, address: str | None, exchange: str | None, until: str | None
) -> list[Outcome]:
    from trtpipe.pipeline.cli import console_build
    from trtpipe.pipeline.cluster.driver import Cluster

    cluster = Cluster(address or "auto", store, exchange, console_build.ClusterReporter.told)
    try:
        return cluster.build(specs, lambda spec: console_build.ClusterReporter(spec.target), until)
    finally:
        cluster.close()


def _bundle(name: str, store: Store, options: dict[str, Any], trust_keys: tuple[Path, ...]) -> Bundle:
    """The target to continue: a file, or an earlier import. Raises UsageError for options that it excludes."""
    import dataclasses

    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.cli import console_build, console_progress
    from trtpipe.pipeline.layers import LORA, SCALARS
    from trtpipe.pipeline.registry import export as bundle
    from trtpipe.pipeline.resolve import EXECUTORS
    from trtpipe.pipeline.run_folder import RunFolder

    others = [
        key for key in (*SCALARS, LORA, "recipe", "settings") if options.get(key) is not None and key != "executor"
    ]
    if others:
        raise UsageError(
            f"--from brings its own --{others[0].replace('_', '-')}",
            why="what arrives was made for the settings it was exported with",
            remedy="leave it out, or export again with it",
        )
    if Path(name).is_file():
        with console_progress.working("import", name) as progress:
            arrived = bundle.unpack(Path(name), store, progress, trust_keys=trust_keys)
    else:
        arrived = bundle.imported(name, store)
    console_build.note_other_versions(RunFolder.of(arrived.spec.target))
    if options["executor"] is None:
        return arrived
    if options["executor"] not in EXECUTORS:
        raise UsageError(f"unknown executor '{options['executor']}'", remedy="known: " + ", ".join(EXECUTORS))
    return dataclasses.replace(arrived, spec=dataclasses.replace(arrived.spec, executor=options["executor"]))
