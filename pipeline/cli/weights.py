"""`trtpipe convert`, `quantize`, `verify`, `inspect`, `restore`: commands on folders of weights."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import FILE, FOLDER, GroupSize, Json, KvCache, MoeEp, MoeTp, Tasks, Toolchain

if TYPE_CHECKING:
    from trtpipe.engines.base import DataType

HfFolder = Annotated[Path, typer.Argument(help="A Hugging Face model folder.", **FOLDER)]


@contextlib.contextmanager
def _by_options(**options: str) -> Iterator[None]:
    """Name the settings of a calibration in a failure by this command's options, each given as field=option."""
    from trtpipe.engines.errors import TrtpipeError

    try:
        yield
    except TrtpipeError as error:
        for field, option in options.items():
            name = f"calibration.{field}"
            for part in ("what", "why", "remedy"):
                text = getattr(error, part).replace(f"--set {name}=", f"{option} ").replace(name, option)
                setattr(error, part, text)
        raise


def convert(
    hf_dir: HfFolder,
    out_dir: Annotated[Path, typer.Argument(help="Folder to write: new or empty.")],
    dtype: Annotated[str, typer.Option(help="Type of the weights: auto, bfloat16, float16 or float32.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", help="Number of tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Number of pipeline-parallel stages.")] = 1,
    moe_tp: MoeTp = None,
    moe_ep: MoeEp = None,
    use_parallel_embedding: Annotated[
        bool, typer.Option("--use-parallel-embedding", help="Shard the embedding table over tensor-parallel ranks.")
    ] = False,
    embedding_sharding_dim: Annotated[
        int, typer.Option(help="Dimension to shard: 0 is the vocabulary, 1 the hidden size.")
    ] = 0,
    toolchain: Toolchain = None,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face folder to a TensorRT-LLM checkpoint.

    Both are plain folders, outside the store. A folder that is quantized already keeps its codes and scales.

    \b
    Examples:
      trtpipe convert HF_DIR OUT_DIR --tp 2
      trtpipe convert HF_DIR OUT_DIR --dtype float16
    """
    from trtpipe.engines.base import Mapping
    from trtpipe.engines.checkpoint.convert import convert as write_checkpoint
    from trtpipe.engines.checkpoint.restore import casts
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.families import family_of
    from trtpipe.engines.hf.folder import read_model_config
    from trtpipe.engines.hf.stored import read_stored
    from trtpipe.engines.model_config import EmbeddingSharding
    from trtpipe.engines.quantize.stored import convert_stored
    from trtpipe.pipeline.cli import console, console_progress
    from trtpipe.pipeline.store.folders import new_folder

    wanted = _float(dtype, f"run `{_command('quantize', hf_dir, out_dir, '--quant', dtype)}`")
    release = _release(toolchain)
    mapping = Mapping.of(tp, pp, moe_tp, moe_ep)
    embedding = EmbeddingSharding.of(use_parallel_embedding, embedding_sharding_dim)
    notices: list[str] = []
    stored = read_stored(hf_dir) if (hf_dir / "config.json").is_file() else None
    if stored is not None and (wanted is not None or use_parallel_embedding):
        raise UsageError(
            f"{hf_dir} is already quantized: {stored.describe()}",
            why="it is written as it is",
            remedy="leave --dtype and --use-parallel-embedding out",
        )
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(new_folder(out_dir))
        progress = stack.enter_context(console_progress.working("convert", str(hf_dir)))
        if stored is not None:
            log = stack.enter_context(_log("convert"))
            notices = convert_stored(hf_dir, out, mapping=mapping, toolchain=release, log=log, progress=progress)
        else:
            write_checkpoint(
                hf_dir, out, dtype=wanted, mapping=mapping, embedding=embedding, toolchain=release, progress=progress
            )
    model = read_model_config(hf_dir, quantized=True)
    if stored is None and wanted is None:
        notices += (f"{a} becomes {b}, as with TensorRT-LLM; --dtype writes another" for a, b in casts(out_dir, hf_dir))
    for notice in (*family_of(model).notices(model), *notices):
        console.note(f"note: {notice}")
    if as_json:
        console.result_json({"folder": out_dir, "rank_files": mapping.world_size})
        return
    proof = (
        _command("inspect", out_dir, "--verify-against", hf_dir)
        if stored is None
        else _command("verify", hf_dir, out_dir)
    )
    console.result(f"{out_dir}: config.json and {mapping.world_size} rank file(s)", f"next: {proof}")


def quantize(
    hf_dir: HfFolder,
    out_dir: Annotated[Path, typer.Argument(help="Folder to write: new or empty.")],
    quant: Annotated[
        str,
        typer.Option(
            help="Recipe, of `trtpipe quants`: fp8, int8-sq, int4-awq, ...", autocompletion=complete.of("quant")
        ),
    ],
    kv_cache: KvCache = None,
    calib: Annotated[
        str, typer.Option(help="Text: a .txt or .jsonl file, or a data set of configs/calibration.")
    ] = "cnn_dailymail",
    samples: Annotated[int, typer.Option(help="Number of rows of calibration text.")] = 512,
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the order of texts.")] = 0,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format: trtllm for engines, hf for the LLM API and vLLM, compressed-tensors for vLLM.",
        ),
    ] = "trtllm",
    dtype: Annotated[str, typer.Option(help="Type of what is not quantized: auto, bfloat16 or float16.")] = "auto",
    group_size: GroupSize = None,
    tp: Annotated[int, typer.Option("--tp", help="Number of tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Number of pipeline-parallel stages.")] = 1,
    moe_tp: MoeTp = None,
    moe_ep: MoeEp = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    batch_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a forward pass; fewer take less memory.")
    ] = None,
    scales: Annotated[Path | None, typer.Option(help="File of scales to use instead of calibrating.", **FILE)] = None,
    save_scales: Annotated[
        Path | None, typer.Option(help="File to keep the scales in, for another format or mapping.")
    ] = None,
    toolchain: Toolchain = None,
    as_json: Json = False,
) -> None:
    """Quantize a Hugging Face folder with ModelOpt.

    Both are plain folders, outside the store.

    \b
    Examples:
      trtpipe quantize HF_DIR OUT_DIR --quant fp8 --kv-cache fp8
      trtpipe quantize HF_DIR OUT_DIR --quant int8-sq --format compressed-tensors
    """
    from trtpipe.configs import facts
    from trtpipe.engines.base import CalibrationConfig, Mapping
    from trtpipe.engines.precision import find_recipe, with_group_size, with_kv_cache
    from trtpipe.engines.quantize import job
    from trtpipe.pipeline.cli import console, console_progress
    from trtpipe.pipeline.sources import calibration
    from trtpipe.pipeline.store.folders import new_folder, require_place

    recipe = with_kv_cache(find_recipe(quant, facts.load_quant_recipes()), kv_cache)
    recipe = with_group_size(recipe, group_size)
    wanted = _float(dtype, f"give --quant {dtype}")
    release = _release(toolchain) if form == "trtllm" else facts.find_toolchain(toolchain).name
    layout = job.Layout(form=form, mapping=Mapping.of(tp, pp, moe_tp, moe_ep), toolchain=release)
    job.check(hf_dir, recipe, layout, device=device, scales=scales)
    if save_scales is not None:
        require_place(save_scales, scales, calib, *hf_dir.iterdir())
    rows, unread = None, []
    with _by_options(data="--calib", samples="--samples", seq_len="--seq-len", seed="--seed"):
        chosen = CalibrationConfig(data=calib, samples=samples, seq_len=seq_len, seed=seed)
        if recipe.quantization.calibrated and scales is None:
            with console_progress.working("samples", calib, announce=False):
                rows = calibration.samples(hf_dir, chosen)
            unread = calibration.unread(calib)
    with (
        new_folder(out_dir) as out,
        _log("quantize") as log,
        console_progress.working("quantize", str(hf_dir)) as progress,
    ):
        notices = job.quantize(
            hf_dir, out, recipe, layout=layout, dtype=wanted, samples=rows, scales=scales, save_scales=save_scales,
            device=device, batch_tokens=batch_tokens, log=log, progress=progress,
        )  # fmt: skip
    for notice in (*unread, *notices):
        console.note(f"note: {notice}")
    if as_json:
        console.result_json({"folder": out_dir, "recipe": recipe.name, "format": form})
        return
    console.result(f"{out_dir}: {recipe.name}, {form}", f"next: {_command('verify', hf_dir, out_dir)}")


def verify(
    original: Annotated[
        Path,
        typer.Argument(help="The unquantized Hugging Face folder; or a quantized one, to be run alone.", **FOLDER),
    ],
    quantized: Annotated[
        Path | None,
        typer.Argument(help="A TensorRT-LLM checkpoint, or a quantized Hugging Face folder.", **FOLDER),
    ] = None,
    text: Annotated[
        str, typer.Option(help="Text: a .txt or .jsonl file, or a data set of configs/calibration.")
    ] = "heldout",
    rows: Annotated[int, typer.Option(help="Number of rows of text.")] = 16,
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 256,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    report_dir: Annotated[
        Path | None, typer.Option("--report", help="Folder for accuracy.json and accuracy.html.")
    ] = None,
    tasks: Tasks = None,
    as_json: Json = False,
) -> None:
    """Measure what quantization costs in accuracy.

    Perplexity, KL divergence, and the layers that cost most. Without the original, perplexity alone. With --tasks also
    scores of tasks, and a failure where one has dropped by more than the task allows.

    \b
    Examples:
      trtpipe verify HF_DIR OUT_DIR --report accuracy
      trtpipe verify HF_DIR OUT_DIR --tasks capitals.yaml
    """
    from dataclasses import replace

    from trtpipe.configs import facts
    from trtpipe.engines.base import CalibrationConfig
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.hf.folder import is_checkpoint
    from trtpipe.pipeline.accuracy import gate, page
    from trtpipe.pipeline.accuracy.tasks import check_task, score_tasks
    from trtpipe.pipeline.cli import console, console_progress
    from trtpipe.pipeline.sources import calibration
    from trtpipe.pipeline.store.folders import require_place

    if is_checkpoint(original):
        model = "HF_DIR" if quantized is None or is_checkpoint(quantized) else quantized
        raise UsageError(
            f"{original} is a TensorRT-LLM checkpoint",
            why="the first folder is the original, a Hugging Face folder",
            remedy=f"use `{_command('verify', model, original)}`",
        )
    if report_dir is not None:
        for name in (gate.JSON_NAME, gate.HTML_NAME):
            require_place(report_dir / name)
    files = tasks or []
    for file in files:  # a mistake in one need not wait for the models
        check_task(file)
    with _by_options(data="--text", samples="--rows", seq_len="--seq-len"):
        chosen = CalibrationConfig(data=text, samples=rows, seq_len=seq_len)
        with console_progress.working("samples", text, announce=False):
            ids = calibration.samples(original, chosen)
    for notice in calibration.unread(text):
        console.note(f"note: {notice}")
    report: gate.Report | gate.AloneReport
    with _log("verify") as log, console_progress.working("verify", str(quantized or original)) as progress:
        if quantized is None:
            alone = gate.measure_alone(original, ids, device=device, log=log, progress=progress)
            recipe = gate.matching_recipe(alone, facts.load_quant_recipes())
            report = gate.AloneReport(recipe=recipe.name, measured=alone)
        else:
            measured = gate.measure(original, quantized, ids, device=device, log=log, progress=progress)
            recipe = gate.matching_recipe(measured, facts.load_quant_recipes())
            report = gate.Report(recipe=recipe.name, thresholds=recipe.thresholds, measured=measured)
    if files:
        with _log("tasks") as log, console_progress.working("tasks", ", ".join(map(str, files))) as progress:
            scores = score_tasks(files, original, quantized, device=device, log=log, progress=progress)
            report = replace(report, tasks=scores)
    if isinstance(report, gate.AloneReport):
        for notice in report.unjudged:
            console.note(f"note: {notice}")
    if as_json:
        console.result_json(report.to_dict())
    else:
        console.accuracy(report)
    if report_dir is not None:
        page.write(report, report_dir, "held-out text" if text == calibration.HELDOUT else text)
        console.note(f"written: {report_dir}/accuracy.json and accuracy.html")
    if report.failures:
        raise report.refusal(report_dir)


def inspect(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face or TensorRT-LLM checkpoint folder.", **FOLDER)],
    verify_against: Annotated[
        Path | None,
        typer.Option(help="Prove that the TensorRT-LLM checkpoint equals this Hugging Face folder.", **FOLDER),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    as_json: Json = False,
) -> None:
    """Print what a checkpoint holds and what is wrong in it.

    Fails when something is wrong.

    \b
    Examples:
      trtpipe inspect OUT_DIR
      trtpipe inspect OUT_DIR --verify-against HF_DIR
    """
    from trtpipe.engines.checkpoint.restore import casts, differences
    from trtpipe.engines.hf.inspection import inspect as look
    from trtpipe.pipeline.cli import console, console_progress

    found = look(folder)
    problems = list(found.problems)
    if verify_against is not None and not problems:
        with console_progress.working("inspect", str(folder), announce=False) as progress:
            problems = differences(folder, verify_against, progress)
    console.inspection(found, problems, tensors=tensors, as_json=as_json)
    if problems:
        from trtpipe.engines.errors import InputDataError

        raise InputDataError(f"{folder} has {len(problems)} problem(s)", why=problems[0])
    if verify_against is not None:
        cast = " and ".join(f"{one} as {other}" for one, other in casts(folder, verify_against))
        same = f"{verify_against}, {cast}" if cast else verify_against
        console.note(f"{folder} equals {same}: every tensor, bit for bit{' after that cast' if cast else ''}")


def restore(
    checkpoint_dir: Annotated[Path, typer.Argument(help="An unquantized TensorRT-LLM checkpoint.", **FOLDER)],
    out_dir: Annotated[Path, typer.Argument(help="Folder to write: new or empty.")],
    as_json: Json = False,
) -> None:
    """Convert a TensorRT-LLM checkpoint back to Hugging Face.

    The folder holds config and weights.

    \b
    Examples:
      trtpipe restore OUT_DIR HF_DIR
      trtpipe inspect OUT_DIR --verify-against HF_DIR
    """
    from trtpipe.engines.checkpoint.restore import restore as rebuild
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.cli import console, console_progress
    from trtpipe.pipeline.store.folders import new_folder

    if out_dir.resolve().is_relative_to(checkpoint_dir.resolve()):
        raise UsageError(f"{out_dir} is in the checkpoint's folder", remedy="name a new folder outside it")
    with new_folder(out_dir) as out, console_progress.working("restore", str(checkpoint_dir)) as progress:
        rebuild(checkpoint_dir, out, progress)
    if as_json:
        console.result_json({"folder": out_dir})
        return
    console.result(
        f"{out_dir}: config.json and model.safetensors; copy the tokenizer from where you have it",
        f"next: {_command('inspect', checkpoint_dir, '--verify-against', out_dir)}",
    )


def _release(toolchain: str | None) -> str:
    """The release of that name. Raises UsageError for an unknown one, and for one that reads no checkpoint."""
    from trtpipe.configs import facts

    if toolchain is None:  # one that does; reading all of them takes a quarter of a second
        return facts.DEFAULT_TOOLCHAIN
    found = facts.find_toolchain(toolchain)
    found.require_runtime("tensorrt_llm")
    return found.name


def _float(dtype: str, remedy: str) -> DataType | None:
    """The type that --dtype names; None for auto. Raises UsageError, with `remedy` for a quantization."""
    from trtpipe.configs import facts
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.precision import parse_float

    if any(dtype in (recipe.name, *recipe.aliases) for recipe in facts.load_quant_recipes().values()):
        raise UsageError(f"--dtype {dtype} is a quantization, not a type of unquantized weights", remedy=remedy)
    return None if dtype == "auto" else parse_float(dtype)


def _command(*words: object) -> str:
    """A command of trtpipe, as the shell takes it."""
    return "trtpipe " + shlex.join(map(str, words))


@contextlib.contextmanager
def _log(verb: str) -> Iterator[Path]:
    """A log in TRTPIPE_HOME for a child process; it stays when that fails, since the message names it."""
    from trtpipe.configs.home import default_home
    from trtpipe.engines.errors import StageFailed

    log = default_home() / "logs" / f"{verb}-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield log
    except BaseException as error:
        if not isinstance(error, StageFailed):
            log.unlink(missing_ok=True)
        raise
    log.unlink(missing_ok=True)
