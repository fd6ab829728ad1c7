"""Models of several repositories under names of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.support.factories import write_passport
from trtpipe.engines.errors import ArtefactRefused, InputDataError, UsageError
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.serving.repositories import require_alike
from trtpipe.triton_repo.combine import link_models
from trtpipe.triton_repo.layout import model_names


def write_config(repository: Path, model: str, text: str) -> None:
    (repository / model / "1").mkdir(parents=True)
    (repository / model / "config.pbtxt").write_text(f'name: "{model}"\n{text}', encoding="utf-8")


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def read(path: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def test_all_that_names_a_model_is_renamed_and_nothing_else(tmp_path: Path) -> None:
    repository, out = tmp_path / "repository", tmp_path / "out"
    out.mkdir()
    write_config(repository, "ensemble", 'ensemble_scheduling { step [ { model_name: "tensorrt_llm" } ] }')
    given = {
        "tensorrt_llm_model_name": "tensorrt_llm",
        "tensorrt_llm_draft_model_name": "elsewhere",
        "gpt_model_path": "tensorrt_llm/1",
        "tokenizer_dir": "/models/tensorrt_llm/1",
        "batch_scheduler_policy": "tensorrt_llm",
    }
    write_config(repository, "tensorrt_llm", "".join(parameter(key, value) for key, value in given.items()))
    (repository / "tensorrt_llm" / "1" / "rank0.engine").write_bytes(b"weights")
    assert model_names(repository) == ["ensemble", "tensorrt_llm"]
    made = link_models(repository, "a.", out)
    assert sorted(made) == ["a.ensemble", "a.tensorrt_llm"]
    graph = read(out / "a.ensemble" / "config.pbtxt")
    assert (graph.name, graph.ensemble_scheduling.step[0].model_name) == ("a.ensemble", "a.tensorrt_llm")
    engine = read(made["a.tensorrt_llm"] / "config.pbtxt")
    assert {key: value.string_value for key, value in engine.parameters.items()} == {
        "tensorrt_llm_model_name": "a.tensorrt_llm",
        "tensorrt_llm_draft_model_name": "elsewhere",
        "gpt_model_path": "a.tensorrt_llm/1",
        "tokenizer_dir": "/models/tensorrt_llm/1",
        "batch_scheduler_policy": "tensorrt_llm",
    }
    assert (out / "a.tensorrt_llm" / "1" / "rank0.engine").read_bytes() == b"weights"
    assert (out / "a.tensorrt_llm" / "1" / "rank0.engine").is_symlink()


def test_bytecode_is_neither_taken_from_a_repository_nor_left_in_it(tmp_path: Path) -> None:
    repository, out = tmp_path / "repository", tmp_path / "out"
    out.mkdir()
    write_config(repository, "preprocessing", 'backend: "python"')
    version = repository / "preprocessing" / "1"
    (version / "model.py").write_text("code", encoding="utf-8")
    (version / "__pycache__").mkdir()
    (version / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"other code")
    made = link_models(repository, "", out)["preprocessing"]
    assert sorted(path.name for path in (made / "1").iterdir()) == ["model.py"]
    (made / "1" / "__pycache__").mkdir()
    (made / "1" / "model.py").write_text("changed", encoding="utf-8")
    assert (version / "model.py").read_text(encoding="utf-8") == "code"


def test_the_settings_of_the_llm_api_follow(tmp_path: Path) -> None:
    repository, out = tmp_path / "repository", tmp_path / "out"
    out.mkdir()
    write_config(repository, "tensorrt_llm", 'backend: "python"')
    version = repository / "tensorrt_llm" / "1"
    (version / "model.py").write_text("code", encoding="utf-8")
    (version / "model.safetensors").write_bytes(b"weights")
    settings = {"max_batch_size": 8, "model": "tensorrt_llm/1"}
    drafts = {"decoding_type": "DraftTarget", "speculative_model_dir": "tensorrt_llm/1/draft"}
    text = yaml.safe_dump({**settings, "speculative_config": drafts})
    (version / "model.yaml").write_text(text, encoding="utf-8")
    (version / "draft").mkdir()
    link_models(repository, "a.", out)
    made = out / "a.tensorrt_llm" / "1"
    assert yaml.safe_load((made / "model.yaml").read_text()) == {
        "max_batch_size": 8,
        "model": "a.tensorrt_llm/1",
        "speculative_config": {**drafts, "speculative_model_dir": "a.tensorrt_llm/1/draft"},
    }
    assert (out / "a.tensorrt_llm/1/draft").is_dir()
    # It looks for its settings beside itself, wherever a link may lead.
    assert not (made / "model.py").is_symlink()
    assert (made / "model.safetensors").is_symlink()


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    write_config(tmp_path / "repository", "m", "nonsense: 1")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputDataError, match="is not a model configuration"):
        link_models(tmp_path / "repository", "a.", tmp_path / "out")


@pytest.fixture
def reference(tmp_path: Path) -> Passport:
    return write_passport(tmp_path)


def test_what_one_server_cannot_hold(reference: Passport) -> None:
    require_alike(["a", "b"], [reference, reference])
    with pytest.raises(UsageError, match="a target is named twice"):
        require_alike(["a", "a"], [reference, reference])
    engine = replace(reference, runtime="tensorrt_llm", image="triton:1")
    with pytest.raises(ArtefactRefused, match="b is for tensorrt_llm triton:1: a is for reference, and a server is of"):
        require_alike(["a", "b"], [reference, engine])
    with pytest.raises(ArtefactRefused, match="b is for tensorrt_llm triton:2"):
        require_alike(["a", "b"], [engine, replace(engine, image="triton:2")])
    wide = replace(engine, tp_size=2)
    require_alike(["a"], [wide])
    with pytest.raises(ArtefactRefused, match="a is an engine of 2 ranks"):
        require_alike(["a", "b"], [wide, engine])
