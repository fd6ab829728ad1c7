"""Check of what an engine is served with: the release, the machine's GPUs, its passport, the tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trtpipe.engines.nvidia import Gpu
from trtpipe.engines.passport import NAME as PASSPORT
from trtpipe.engines.passport import Passport, objections
from trtpipe.engines.precision import FP8_SMS
from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.toolchain import Toolchain
from trtpipe.triton_repo.check.engine_folder import EngineFolder, as_mapping, passport_in, positive
from trtpipe.triton_repo.check.faults import Location, Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.release import Release, release_key
from trtpipe.triton_repo.check.tokenizer import GENERATION, Vocabulary

# Smallest share of an engine's vocabulary that its own tokenizer has.
_LEAST_VOCABULARY = 0.75


def check_release(
    model: Model, engine: EngineFolder, release: Release, toolchain: Toolchain | None, report: Report
) -> None:
    """Report an engine of another release: it runs only on its own release, which TensorRT-LLM does not check."""
    anywhere = engine.backend is not None and engine.backend.ANYWHERE
    if anywhere or (engine.version or "").startswith("reference"):
        return
    if toolchain is not None and engine.compiles and "tensorrt_llm" not in toolchain.runtimes:
        return  # a release without engines, which the check of the runtime reports
    made = release_key(engine.version)
    stamped = release_key(engine.passport.toolchain) if engine.passport is not None else None
    if made is None and engine.compiles:
        report.warning(
            "engine-release",
            (engine.config, "version"),
            "is missing" if engine.version is None else f"is '{engine.version}', which is no release",
            why="builders before 0.8 wrote none, and an engine runs on the release that built it",
            remedy="build the engine again",
        )
    elif toolchain is not None:
        asked = release_key(toolchain.name)
        for key, name, path in (
            (made, engine.version, engine.config),
            (stamped, engine.passport.toolchain if engine.passport else None, engine.path / PASSPORT),
        ):
            if key is not None and key != asked:
                report.error(
                    "engine-release",
                    (path, "version" if path == engine.config else "toolchain"),
                    f"is {name}, and the repository is for TensorRT-LLM {toolchain.name}",
                    why="an engine runs on the release that built it",
                    remedy=f"build it with {toolchain.name}, or serve it with {name}",
                )
                return
    elif made is not None and stamped is not None and made != stamped:
        report.error(
            "passport",
            (engine.path / PASSPORT, "toolchain"),
            f"is {engine.passport.toolchain if engine.passport else ''}, and config.json says {engine.version}",
            remedy="build the engine again",
        )


def check_gpus(
    model: Model, engine: EngineFolder, gpus: Sequence[Gpu], toolchain: Toolchain | None, report: Report
) -> None:
    """Check whether this machine can run the engine."""
    if engine.passport is not None:
        told = _objections(engine.passport, gpus, toolchain)
        _tell_objections(model.at_parameter("gpt_model_path"), told, report)
        return
    where = model.at_parameter("gpt_model_path")
    quantization = as_mapping(engine.pretrained.get("quantization"))
    algo = next((algo for algo in QuantAlgo if algo.value == quantization.get("quant_algo")), None)
    fp8 = (algo is not None and algo.row.operands == "fp8") or quantization.get("kv_cache_quant_algo") == "FP8"
    if fp8 and gpus and all(gpu.sm < min(FP8_SMS) for gpu in gpus):
        report.error(
            "engine-gpu", where, f"names an engine in FP8, and this machine has {gpus[0].describe()}",
            f"SM{min(FP8_SMS)} and newer have FP8", "serve it elsewhere, or build it in another precision",
        )  # fmt: skip
    elif engine.world_size is not None and engine.world_size > len(gpus):
        report.error(
            "engine-gpu",
            where,
            f"names an engine of {engine.world_size} rank(s), and this machine has {len(gpus)} GPU(s)",
            remedy="serve it elsewhere, or build it for fewer",
        )
    elif not (engine.version or "").startswith("reference"):
        report.warning(
            "engine-gpu", where, "names an engine of which nothing says for which GPU it was built",
            f"it has no {PASSPORT}, and an engine runs on its own compute capability only", "see where it was built",
        )  # fmt: skip


def check_passport(
    where: Location, folder: Path, gpus: Sequence[Gpu] | None, toolchain: Toolchain | None, report: Report
) -> Passport | None:
    """Check the passport of an LLM API model's folder, and return it; only folders of this project have one."""
    passport = passport_in(folder, report)
    if passport is None:
        return None
    if toolchain is not None and release_key(passport.toolchain) not in (None, release_key(toolchain.name)):
        report.error(
            "engine-release",
            (folder / PASSPORT, "toolchain"),
            f"is {passport.toolchain}, and the repository is for TensorRT-LLM {toolchain.name}",
            remedy=f"build it with {toolchain.name}, or serve it with {passport.toolchain}",
        )
    if gpus is not None:
        _tell_objections(where, _objections(passport, gpus, toolchain), report)
    return passport


def _objections(passport: Passport, gpus: Sequence[Gpu], toolchain: Toolchain | None) -> list[str]:
    floor = toolchain.driver if toolchain is not None and passport.toolchain == toolchain.name else None
    return objections(passport, gpus, floor=floor)


def _tell_objections(where: Location, told: list[str], report: Report) -> None:
    for objection in told:
        report.error(
            "engine-gpu",
            where,
            "names an engine that this machine cannot run",
            why=objection,
            remedy="build it for this GPU, or serve it elsewhere",
        )


def check_vocabulary(engine: EngineFolder, vocabularies: list[Vocabulary], report: Report) -> None:
    """Compare the tokenizer's ids with the engine's. Models pad their vocabulary, by a few percent at most."""
    most = positive({**engine.hf, **engine.pretrained}.get("vocab_size"))
    if most is None:
        return
    for vocabulary in vocabularies:
        why, remedy = "it is another model's tokenizer", "copy that of the engine's model"
        if vocabulary.size > most:
            told = f"has {vocabulary.size:,} tokens, and the engine {most:,}"
            report.error("tokenizer-vocabulary", vocabulary.path, told, why, remedy)
        elif vocabulary.ids < _LEAST_VOCABULARY * most:
            told = f"has {vocabulary.ids:,} tokens, and the engine {most:,}"
            report.warning("tokenizer-vocabulary", vocabulary.path, told, why, remedy)
        elif vocabulary.ids > most:
            told = f"adds tokens up to the id {vocabulary.ids - 1:,}, and the engine has {most:,}"
            report.warning("tokenizer-vocabulary", vocabulary.path, told, "a prompt with one fails", remedy)
        for name, number in vocabulary.named.items():
            if number >= most:
                at, told = (
                    (vocabulary.path.with_name(GENERATION), name),
                    f"names {number:,}, and the engine has {most:,} tokens",
                )
                add = report.error if name == "eos_token_id" else report.warning
                add("tokenizer-end", at, told, why, remedy)
