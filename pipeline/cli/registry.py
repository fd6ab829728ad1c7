"""`trtpipe export`, `import`, `push`, `pull` and `search`, and the provenance of a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtpipe.pipeline.cli.options import FILE, Json, SignKey, TargetArgument, TrustKey, own_store

if TYPE_CHECKING:
    from trtpipe.pipeline.registry.transfer import Shipped

Url = Annotated[
    str | None,
    typer.Argument(
        help="oci://host/name, hf://owner/name, s3://bucket/prefix or another of fsspec, or a folder; "
        "the registry of `trtpipe config` if left out."
    ),
]
# Targets that a search without a result lists.
SHOWN = 8
Only = Annotated[
    str | None,
    typer.Option(
        help="Artefacts to copy: checkpoint, scales, tokenizer, adapters, draft, accuracy, engine; what serving takes "
        "if left out."
    ),
]


def export(
    target: TargetArgument,
    out: Annotated[
        str | None, typer.Option("--output", "-o", help="File or folder to write to; ./TARGET.tar if left out.")
    ] = None,
    sign_key: SignKey = None,
    as_json: Json = False,
) -> None:
    """Pack a target into one file, to finish it elsewhere.

    The file holds the checkpoint, the settings and the digests.

    \b
    Examples:
      trtpipe export llama3-8b.h100.fp8
      trtpipe export llama3-8b.h100.fp8 -o fp8.tar --sign-key key.pem
    """
    from trtpipe.pipeline.cli import console, console_build, console_progress
    from trtpipe.pipeline.registry import export as bundle
    from trtpipe.pipeline.registry.provenance import statement
    from trtpipe.pipeline.run_folder import require_run

    run = require_run(target)
    spec, name = run.spec(), f"{run.path.name}.tar"
    place = Path(name) if out is None else Path(out, name) if out.endswith("/") else Path(out)
    where = "another machine" if spec.sms is None else f"a machine with {spec.gpu.describe()}"
    with console_progress.working("export", target) as progress:
        path = bundle.pack(target, own_store(), place, progress, sign_key=sign_key)
    console_build.note_other_versions(run, statement(run, own_store()))
    if as_json:
        console.result_json({"file": path, "bytes": path.stat().st_size})
        return
    if run.path.name != spec.target:
        console.result(f"{path.name} holds the target {spec.target}")
    console.result(f"next, on {where}: trtpipe build --from {path.name}")


def import_(
    file: Annotated[Path, typer.Argument(help="A file that `trtpipe export` wrote.", **FILE)],
    trust_key: TrustKey = None,
    as_json: Json = False,
) -> None:
    """Verify an exported file and import its artefacts.

    Imported artefacts are kept apart from those that are built here.

    \b
    Examples:
      trtpipe import llama3-8b.h100.fp8.tar
      trtpipe import fp8.tar --trust-key team.pub
    """
    from trtpipe.pipeline.cli import console, console_build, console_progress
    from trtpipe.pipeline.registry import export as bundle
    from trtpipe.pipeline.run_folder import RunFolder

    with console_progress.working("import", str(file)) as progress:
        arrived = bundle.unpack(file, own_store(), progress, trust_keys=trust_key or ())
    console_build.note_other_versions(RunFolder.of(arrived.spec.target))
    if as_json:
        console.result_json({"target": arrived.spec.target, "artefacts": list(arrived.artefacts)})
    else:
        console.result(f"next: trtpipe build --from {arrived.spec.target}")


def push(
    target: TargetArgument, url: Url = None, only: Only = None, sign_key: SignKey = None, as_json: Json = False
) -> None:
    """Push a target to a registry.

    What it takes to serve the target is pushed, unless --only says otherwise. Nothing in the registry is deleted.

    \b
    Examples:
      trtpipe push llama3-8b.h100.fp8 oci://registry.example/team/models
      trtpipe push llama3-8b.h100.fp8 s3://bucket/models --only checkpoint
    """
    import shlex

    from trtpipe.pipeline.cli import console, console_build, console_progress
    from trtpipe.pipeline.registry import transfer
    from trtpipe.pipeline.registry.address import open_registry
    from trtpipe.pipeline.registry.provenance import statement
    from trtpipe.pipeline.run_folder import require_run

    wanted, url = transfer.choose(only), _url(url)
    run = require_run(target)
    registry = open_registry(url)
    with console_progress.working("push", target) as progress:
        shipped = transfer.push(target, registry, own_store(), wanted, progress, sign_key=sign_key)
    console_build.note_other_versions(run, statement(run, own_store()))
    if as_json:
        _moved(shipped, url)
        return
    console.result(
        f"pushed {', '.join(shipped.artefacts)}: {console.size(shipped.moved)} sent, "
        f"{console.size(shipped.there)} was there",
        f"next, elsewhere: trtpipe pull {shipped.target} {shlex.quote(registry.url)}",
    )


def pull(
    target: Annotated[str, typer.Argument(help="Name of a target in the registry; see `trtpipe search`.")],
    url: Url = None,
    only: Only = None,
    any_machine: Annotated[
        bool, typer.Option("--any-machine", help="Pull an engine even if this machine cannot run it.")
    ] = False,
    trust_key: TrustKey = None,
    as_json: Json = False,
) -> None:
    """Pull a target from a registry into ./runs.

    What it takes to serve the target is pulled, unless --only says otherwise, or all of it where the registry has no
    engine. Every file is verified; an interrupted pull is continued. The repository is made here, from the engine and
    the tokenizer: no code and no configuration is taken.

    \b
    Examples:
      trtpipe pull llama3-8b.h100.fp8 oci://registry.example/team/models
      trtpipe pull llama3-8b.h100.fp8 s3://bucket/models --trust-key team.pub
    """
    from trtpipe.engines.passport import read_passport
    from trtpipe.pipeline.cli import console, console_build
    from trtpipe.pipeline.compatibility import examine
    from trtpipe.pipeline.registry import transfer
    from trtpipe.pipeline.registry.address import open_registry
    from trtpipe.pipeline.run_folder import RunFolder
    from trtpipe.pipeline.runner import execute

    wanted, store, reporter, url = transfer.choose(only), own_store(), console_build.BuildReporter(), _url(url)
    registry = open_registry(url)
    with reporter.stage("pull", target) as progress:
        shipped = transfer.pull(
            target, registry, store, wanted, any_machine=any_machine, trust_keys=trust_key or (), progress=progress
        )
    console_build.note_other_versions(RunFolder.of(target))
    arrived, after = shipped.arrived, f"build --from {target}"
    if arrived is not None and {"engine", "tokenizer"} <= arrived.artefacts.keys():
        execute(arrived.spec, store, reporter, given=arrived.artefacts)
        after = f"serve {target}"
        verdict = examine(read_passport(arrived.artefacts["engine"].path))
        if verdict.objections:  # only --any-machine takes such an engine
            after = f"deploy k8s {target} -o FOLDER   (it is served on {verdict.passport.target()}, not here)"
    store.digests.save()
    if as_json:
        _moved(shipped, url)
        return
    console.result(
        f"pulled {', '.join(shipped.artefacts)}: {console.size(shipped.moved)} fetched, "
        f"{console.size(shipped.there)} was here",
        *([] if arrived is None else [f"next: trtpipe {after}"]),
    )


def search(
    url: Url = None,
    model: Annotated[str | None, typer.Option(help="Part of a model's name.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Name or SM of a GPU: h100, SM90.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Precision: FP8, bf16.")] = None,
    toolchain: Annotated[str | None, typer.Option(help="TensorRT-LLM release.")] = None,
    as_json: Json = False,
) -> None:
    """List the targets of a registry.

    \b
    Examples:
      trtpipe search s3://bucket/models
      trtpipe search oci://registry.example/team/models --gpu h100
    """
    from trtpipe.configs.facts import load_gpus
    from trtpipe.engines.errors import nearest
    from trtpipe.engines.precision import FLOAT_NAMES
    from trtpipe.engines.quantization import QuantAlgo
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.registry import transfer
    from trtpipe.pipeline.registry.address import open_registry

    url = _url(url)
    registry = open_registry(url)
    damaged: list[str] = []
    found = transfer.search(
        registry, model=model, gpu=gpu, dtype=dtype, toolchain=toolchain, unread=damaged.append
    )  # fmt: skip
    for told in damaged:
        console.note(told)
    if as_json:
        console.result_json(found)
        return
    if not found:
        there = registry.targets() if any((model, gpu, dtype, toolchain)) else []
        named = ", ".join(there[:SHOWN]) + (", ..." if len(there) > SHOWN else "")
        none = f"{url} has no targets" + (" that can be read" if damaged else "")
        told = f"{url} has no such target; it has: {named}" if there else none
        specs = load_gpus().values()
        gpus = [name for one in specs for name in (one.name, *one.aliases)]
        gpus += {f"SM{one.sm}" for one in specs if one.sm is not None}
        dtypes = [*FLOAT_NAMES, *(algo.value for algo in QuantAlgo)]
        for option, value, known in (("gpu", gpu, gpus), ("dtype", dtype, dtypes)):
            if value and not any(value.lower() in name.lower() for name in known) and (near := nearest(value, known)):
                told += f"; did you mean --{option} {' or '.join(near)}?"
        console.result(told)
        return
    console.table(
        ("target", "model", "runs on", "precision", "runtime", "tp", "pp", "size", "holds"),
        [
            (
                one.target, one.model, one.passport.target(), transfer.precision(one.passport),
                " ".join(filter(None, (one.passport.runtime, one.passport.toolchain))), one.passport.tp_size,
                one.passport.pp_size, console.size(one.size), ", ".join(one.artefacts),
            )
            for one in found
        ],
    )  # fmt: skip


def provenance(
    target: TargetArgument,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; printed if left out.")] = None,
    sign_key: SignKey = None,
) -> None:
    """Print the SLSA provenance statement of a target.

    With --sign-key it is in the DSSE envelope of a signature.

    \b
    Examples:
      trtpipe provenance llama3-8b.h100.fp8
      trtpipe provenance llama3-8b.h100.fp8 --sign-key key.pem
    """
    import json

    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.registry.provenance import signed, statement
    from trtpipe.pipeline.run_folder import require_run
    from trtpipe.pipeline.store.folders import require_place, write_whole

    if out is not None:
        require_place(out, sign_key)
    made = statement(require_run(target), own_store())
    written = signed(made, sign_key)
    if out is None:
        console.result_json(written)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(written, indent=1) + "\n")
        console.result(f"{out}: {len(made['subject'])} artefacts{'' if sign_key is None else ', signed'}")


def verify_provenance(
    target: TargetArgument,
    told: Annotated[
        Path | None,
        typer.Option(
            "--statement",
            help="A statement from elsewhere, or the envelope of one that is signed: it must say the same. With "
            "--trust-key that which came with the target if left out.",
            **FILE,
        ),
    ] = None,
    trust_key: TrustKey = None,
    as_json: Json = False,
) -> None:
    """Verify a target's digests, from source to repository.

    Every file of the target that is here is hashed.

    \b
    Examples:
      trtpipe verify-provenance llama3-8b.h100.fp8
      trtpipe verify-provenance llama3-8b.h100.fp8 --trust-key team.pub
    """
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.registry.provenance import FILE as PROVENANCE
    from trtpipe.pipeline.registry.provenance import read_statement, verify
    from trtpipe.pipeline.run_folder import require_run

    keys, run = trust_key or (), require_run(target)
    if keys and told is None:
        told = run.path / PROVENANCE
        if not told.is_file():
            raise UsageError(f"no statement has come with {target}", remedy="give the signed one with --statement")
    found = verify(run, own_store(), None if told is None else read_statement(told, keys))
    if as_json:
        console.result_json({"verified": found.lines, "elsewhere": found.elsewhere, "signature_verified": bool(keys)})
        return
    signed = f"; {told} is signed with {' or '.join(map(str, keys))}" if keys else ""
    console.result(*found.lines, f"the digests of {len(found.lines)} artefacts hold together{signed}")
    if found.elsewhere and not keys:
        who = "whoever pushed them" if told is None else f"{told} alone"
        console.result(f"not here, and told by {who}: {', '.join(found.elsewhere)}; a signed statement proves them")


def _url(given: str | None) -> str:
    """The registry that is given, else the user's. Raises UsageError."""
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.cli import config

    url = given or config.read_config().registry
    if url is None:
        raise UsageError("no registry is given", remedy=f"name one, or set `registry` in {config.path()}")
    return url


def _moved(shipped: Shipped, url: str) -> None:
    from trtpipe.pipeline.cli import console

    told = {"target": shipped.target, "registry": url, "artefacts": shipped.artefacts}
    console.result_json({**told, "bytes_moved": shipped.moved, "bytes_there": shipped.there})
