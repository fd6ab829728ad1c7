"""Commands that print known facts: models, GPUs, toolchains, passports, and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import Json


def models(as_json: Json = False) -> None:
    """List the models that have a name here.

    \b
    Examples:
      trtpipe models
      trtpipe models --json
    """
    from trtpipe.configs import facts as config
    from trtpipe.pipeline.cli import console

    known = list(config.load_models().values())
    if as_json:
        console.result_json(known)
        return
    rows = [(m.name, m.architecture, m.sources[0].describe(), m.license) for m in known]
    console.table(("model", "architecture", "source", "license"), rows)


def gpus(
    name: Annotated[
        str | None,
        typer.Argument(help="GPU to print with the source of each figure.", autocompletion=complete.of("gpus")),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the GPUs that a target can name.

    TFLOPS are dense; bandwidths are those of one direction. A GPU's own page has more, and the source of each figure.

    \b
    Examples:
      trtpipe gpus
      trtpipe gpus h100
    """
    import dataclasses

    from trtpipe.configs import facts as config
    from trtpipe.pipeline.cli import console

    known = list(config.load_gpus().values()) if name is None else [config.find_gpu(name)]
    if as_json:
        console.result_json(known)
        return
    if name is not None:
        source = {field: text for text, fields in known[0].sources.items() for field in fields}
        facts = {field: value for field, value in dataclasses.asdict(known[0]).items() if field != "sources"}
        said = [(field, value, source.get(field)) for field, value in facts.items() if value]
        console.table(("field", "value", "source"), said)
        return
    columns = (
        "gpu", "SM", "memory GiB", "memory GB/s", "FP16 TFLOPS", "FP8 TFLOPS", "INT8 TOPS", "NVLink GB/s", "note",
    )  # fmt: skip
    rows = [
        (
            g.name, g.sm, g.memory_gib, g.bandwidth_gbs, *(g.tflops.get(kind) for kind in ("fp16", "fp8", "int8")),
            g.nvlink_gbs, "refused" if g.refused else "measured" if g.measured else None,
        )
        for g in known
    ]  # fmt: skip
    console.table(columns, rows, numeric=columns[1:-1])


def recipes(as_json: Json = False) -> None:
    """List the build recipes.

    \b
    Examples:
      trtpipe recipes
      trtpipe build --recipe smollm2-cpu
    """
    from trtpipe.configs import facts
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.layers import recipe_layer
    from trtpipe.pipeline.resolve import resolve

    known = {
        path.stem: resolve([recipe_layer(path.stem)]) for path in sorted((facts.CONFIGS / "recipes").glob("*.yaml"))
    }
    if as_json:
        console.result_json([{"name": name, "target": spec.target} for name, spec in known.items()])
        return
    console.table(("recipe", "target"), [(name, spec.target) for name, spec in known.items()])
    console.result("quantization recipes, as --dtype takes them: trtpipe quants")


def quants(as_json: Json = False) -> None:
    """List the quantization recipes and the SMs that run them.

    \b
    Examples:
      trtpipe quants
      trtpipe quants --json
    """
    from trtpipe.configs import facts
    from trtpipe.pipeline.cli import console

    known = list(facts.load_quant_recipes().values())
    if as_json:
        console.result_json(known)
        return
    rows = [
        (r.name, r.quant_algo and r.quant_algo.value, r.kv_cache_quant_algo and r.kv_cache_quant_algo.value,
         " ".join(map(str, r.sms)), r.description)
        for r in known
    ]  # fmt: skip
    console.table(("recipe", "quant_algo", "KV cache", "SM", "what"), rows)


def probe(
    out: Annotated[Path | None, typer.Option(help="File to write; gpus/NAME.yaml of TRTPIPE_HOME if left out.")] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine's GPUs for `trtpipe plan`.

    `trtpipe plan` then uses the measured figures in place of the data sheet's.

    \b
    Examples:
      trtpipe probe
      trtpipe probe --out h100.yaml
    """
    import dataclasses

    from trtpipe.pipeline.cli import console, console_progress
    from trtpipe.pipeline.planner.probe import probe as run
    from trtpipe.pipeline.store.folders import require_place

    if out is not None:
        require_place(out)
    with console_progress.working("probe", "measuring the GPUs", announce=False):
        gpu, path = run(out)
    assert gpu.measured is not None
    found = gpu.measured
    if as_json:
        console.result_json(found)
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


def toolchains(as_json: Json = False) -> None:
    """List the TensorRT-LLM releases that can be used.

    The last column says whether this machine's driver can run them.

    \b
    Examples:
      trtpipe toolchains
      trtpipe toolchains --json
    """
    import dataclasses

    from trtpipe.configs import facts as config
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.execution import hardware

    known = config.load_toolchains().values()
    gpus = hardware.visible_gpus()
    if as_json:
        console.result_json([{**dataclasses.asdict(one), "runs_here": hardware.able(one, gpus)} for one in known])
        return
    rows = [
        (
            t.name,
            *(value or "not known" for value in (t.image, t.tensorrt, t.cuda, t.driver, t.python)),
            " ".join(t.runtimes),
            hardware.able(t, gpus),
        )
        for t in known
    ]
    console.table(("toolchain", "image", "TensorRT", "CUDA", "driver", "Python", "runtimes", "runs here"), rows)
    defects = dict.fromkeys(defect for one in known for defect in one.defects)
    for defect in defects:
        releases = ", ".join(one.name for one in known if defect in one.defects)
        console.result(f"{releases}: {defect.what}: {defect.instead} ({defect.source})")


def passport(
    folder: Annotated[
        Path,
        typer.Argument(
            help="An engine folder, a model repository, or a target in ./runs.", autocompletion=complete.targets
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print what an engine was built for, and with what.

    Fails when this machine cannot run the engine.

    \b
    Examples:
      trtpipe passport llama3-8b.h100.fp8
      trtpipe passport ENGINE_DIR --json
    """
    import dataclasses

    from trtpipe.pipeline import compatibility
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.run_folder import find_run

    found = compatibility.find_passport(folder)
    verdict = compatibility.examine(found)
    facts = dataclasses.asdict(found)
    run = find_run(str(folder))
    imported = [] if run is None else run.imports()
    if as_json:
        told = {"objections": verdict.objections, "remarks": verdict.remarks, "imported": imported}
        console.result_json({**facts, **told})
    else:
        console.passport({**facts, "rank_bytes": found.gpu_bytes})
        for phrase in imported:
            console.result(f"note: {phrase}")
        for remark in verdict.remarks:
            console.result(f"note: {remark}")
    verdict.require(folder)
    if not as_json:
        console.result("this machine can run it")


def doctor(as_json: Json = False) -> None:
    """Report what this machine can do, and what it lacks.

    \b
    Examples:
      trtpipe doctor
      trtpipe doctor --json
    """
    from trtpipe.configs.home import default_home
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.cli.doctor import examine
    from trtpipe.pipeline.store.store import Store

    findings = examine(Store(default_home()))
    if as_json:
        console.result_json(findings)
    else:
        console.table(("what", "state", "detail"), [(f.subject, f.state, f.detail) for f in findings])
