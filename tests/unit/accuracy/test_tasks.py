"""Task scores: requests to the model, scoring of its answers, and refused files; the models are doubles."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import hf_folder, write_tokenizer
from tests.support.paths import ROOT
from tests.unit.stages.conftest import job
from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines.accuracy.job import Alone, LayerError, Measured
from trtpipe.engines.accuracy.scoring import Answers, Continuation, Generation
from trtpipe.engines.base import DataType
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.precision import Thresholds
from trtpipe.pipeline.accuracy import gate, page, tasks
from trtpipe.pipeline.accuracy.task_files import read_task
from trtpipe.pipeline.accuracy.tasks import TaskScore, _Prepared, check_task, score_tasks
from trtpipe.pipeline.sources import calibration
from trtpipe.pipeline.stages import verify

CHOICE = {
    "task": "colours", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{ thing }} is ",
    "doc_to_choice": ["red", "green"], "doc_to_target": "colour",
}  # fmt: skip
WRITTEN = {
    "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": "data.jsonl"}, "test_split": "train",
    "output_type": "generate_until", "doc_to_text": "question", "doc_to_target": "{{ answer }}",
    "generation_kwargs": {"until": ";", "max_gen_toks": 5},
}  # fmt: skip
DOCS = [{"thing": "grass", "colour": "green"}, {"thing": "blood", "colour": "red"}, {"thing": "a leaf", "colour": 1}]
SUMS = [{"question": "1+1=", "answer": 2}, {"question": "2+2=", "answer": 4}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = hf_folder(tmp_path / "model", vocab_size=258, max_position_embeddings=64)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    return folder


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def made(task: dict[str, Any], docs: Sequence[Any] = DOCS, **changes: Any) -> Path:
        path = tmp_path / f"{task['task']}.yaml"
        path.write_text(json.dumps({name: v for name, v in {**task, **changes}.items() if v is not None}))
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        return path

    return made


class Models:
    """Doubles of models: replies by the model's folder, and what was asked."""

    def __init__(self, **replies: Answers) -> None:
        self.replies = replies
        self.asked: list[tuple[str, list[Continuation], list[Generation], Any]] = []

    def __call__(self, folder: Path, pairs: Any, prompts: Any, **options: Any) -> Answers:
        self.asked.append((folder.name, pairs, prompts, options["ends"]))
        options["progress"](len(pairs) + len(prompts), len(pairs) + len(prompts))
        return self.replies[folder.name]


def ids(text: str, folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return found


def test_choices_are_scored_by_likelihood(
    model: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Green is longer than red: by its letters it is the likelier one of the second document.
    models = Models(
        model=Answers(likelihoods=[-9.0, -5.0, -3.0, -4.0, -8.0, -7.0], texts=[]),
        smaller=Answers(likelihoods=[-4.0, -5.0, -2.0, -4.0, -8.0, -7.0], texts=[]),
    )
    monkeypatch.setattr(tasks, "answer", models)
    (tmp_path / "smaller").mkdir()
    (tmp_path / "smaller" / "rank0.safetensors").write_bytes(b"123456789")
    seen: list[tuple[int, int]] = []
    scores = score_tasks(
        [write(CHOICE, metadata={"max_drop": 0.3})], model, tmp_path / "smaller", log=tmp_path / "log",
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    about: Any = pytest.approx
    stderr = 1 / 3  # of two in three: deviation 0.5774, divided by the root of three
    assert scores == [
        TaskScore(task="colours", metric="acc", documents=3, original=1.0, original_stderr=0.0, max_drop=0.3,
                  quantized=about(2 / 3), quantized_stderr=about(stderr)),
        TaskScore(task="colours", metric="acc_norm", documents=3, max_drop=0.3, original=about(2 / 3),
                  original_stderr=about(stderr), quantized=1.0, quantized_stderr=0.0),
    ]  # fmt: skip
    assert scores[0].failure == ("acc of colours is 0.6667, 0.3333 below the original's 1, and the task allows 0.3")
    assert scores[1].failure is None
    name, pairs, _, ends = models.asked[0]
    assert (name, ends) == ("model", [1, 0])
    # The space before the choice is the choice's, as is the delimiter.
    assert pairs[0] == Continuation(context=ids("grass is", model), tokens=ids("  red", model))
    assert pairs[5] == Continuation(context=ids("a leaf is", model), tokens=ids("  green", model))
    size = (model / "model.safetensors").stat().st_size
    assert seen == [(size, size + 9), (size + 9, size + 9)]


@pytest.mark.parametrize(
    ("target", "answer", "acc"),
    [
        ("answer", "2", 0.0),
        ("answer", "3", 1.0),
        ("answer", 2, 1.0),
        ("{{ answer }}", "2", 1.0),
        ("{{ answer }}", 2, 1.0),
    ],
)
def test_only_a_template_makes_an_index_of_digits(
    model: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, answer: Any, acc: float
) -> None:
    # "3", the choice at index 2, is the likeliest.
    monkeypatch.setattr(tasks, "answer", Models(model=Answers(likelihoods=[-3.0, -2.0, -1.0], texts=[])))
    task = write(
        CHOICE, [{"thing": "1+1", "choices": ["1", "2", "3"], "answer": answer}], doc_to_choice="choices",
        doc_to_target=target,
    )  # fmt: skip
    assert score_tasks([task], model, None, log=tmp_path / "log")[0].quantized == acc


@pytest.mark.parametrize(
    ("description", "before"),
    [("About {{ thing }}:\n", ["About grass:\n", "About blood:\n"]), ("intro", ["Look: ", "See: "]), ("", ["", ""])],
)
def test_a_description_is_a_template_or_field_of_each_document(
    model: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, description: str, before: list[str]
) -> None:
    models = Models(model=Answers(likelihoods=[0.0] * 4, texts=[]))
    monkeypatch.setattr(tasks, "answer", models)
    docs = [{"thing": "grass", "colour": 1, "intro": "Look: "}, {"thing": "blood", "colour": 0, "intro": "See: "}]
    score_tasks([write(CHOICE, docs, description=description)], model, None, log=tmp_path / "log")
    contexts = [ids(f"{before[0]}grass is", model), ids(f"{before[1]}blood is", model)]
    assert [pair.context for pair in models.asked[0][1]][::2] == contexts


@pytest.mark.parametrize(
    ("changes", "texts", "score"),
    [
        ({}, ["2", " 4"], 0.5),
        ({"filter_list": [{"name": "a", "filter": [{"function": "remove_whitespace"}]}]}, ["2", " 4"], 1.0),
        (
            {
                "filter_list": [
                    {
                        "name": "number",
                        "filter": [
                            {"function": "regex", "regex_pattern": r"= (\d)|it is (\d)", "group_select": -1},
                            {"function": "take_first"},
                        ],
                    }
                ]
            },
            ["= 5 or it is 2", "four"],
            0.5,
        ),
        ({"metric_list": [{"metric": "exact_match", "ignore_punctuation": True}]}, ["2.", "4!"], 1.0),
        ({"metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["[a-z ]"]}]}, ["it is 2", "five"], 0.5),
    ],
)
def test_answers_are_scored_by_an_exact_match(
    model: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, texts: Any, score: float
) -> None:
    models = Models(model=Answers(likelihoods=[], texts=list(texts)))
    monkeypatch.setattr(tasks, "answer", models)
    (found,) = score_tasks([write(WRITTEN, SUMS, **changes)], model, None, log=tmp_path / "log")
    assert (found.metric, found.quantized, found.original, found.failure) == ("exact_match", score, None, None)
    _, _, prompts, _ = models.asked[0]
    assert prompts[0] == Generation(prompt=ids("1+1=", model), max_tokens=5, until=[";"])


@pytest.mark.parametrize("target", ["answers", "{{ answers }}"])
def test_any_of_several_right_answers_will_do(
    model: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    docs = [
        {"question": "Capital of France?", "answers": ["Paris", "paris"]},
        {"question": "1+1=", "answers": ["two", 2]},
        {"question": "2+2=", "answers": ["four", 4]},
        {"question": "A list?", "answers": "[sic]"},
    ]
    monkeypatch.setattr(tasks, "answer", Models(model=Answers(likelihoods=[], texts=["paris", "2", "5", "[sic]"])))
    (found,) = score_tasks([write(WRITTEN, docs, doc_to_target=target)], model, None, log=tmp_path / "log")
    assert found.quantized == 0.75


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        # Of a first text that is no list, later ones that read as lists are text too, as Python writes them.
        (["4", "[1, 2]", "[5]"], [["4"], ["[1, 2]"], ["[5]"]]),
        (["[1, 2]", "4", "['a', 2.5]"], [["1", "2"], ["4"], ["a", "2.5"]]),
        (["[]", "[1, 2]"], [["[]"], ["[1, 2]"]]),
        (["['a']", "[]", "[[1,2]]", "[None]", "[1], [2]", "[{[]: 1}]", "[" * 999 + "]"],
         [["a"], ["[]"], ["[[1,2]]"], ["[None]"], ["[1], [2]"], ["[{[]: 1}]"], ["[" * 999 + "]"]]),
    ],
)  # fmt: skip
def test_the_first_text_of_a_template_decides_whether_lists_are_several_answers(
    model: Path, write: Write, answers: list[str], right: list[list[str]]
) -> None:
    docs = [{"question": "What?", "answer": answer} for answer in answers]
    assert _Prepared.read(write(WRITTEN, docs, doc_to_target="{{ answer }}"), model).golds == right
    # In a field a text is text.
    assert _Prepared.read(write(WRITTEN, docs, doc_to_target="answer"), model).golds == [[one] for one in answers]


@pytest.mark.parametrize("answer", [None, [], [None], {"text": "4"}, ["4", ["four"]]])
def test_a_right_answer_is_text_a_number_or_a_list_of_these(
    model: Path, write: Write, tmp_path: Path, answer: Any
) -> None:
    task = write(WRITTEN, [{"question": "2+2=", "answer": answer}], doc_to_target="answer")
    with pytest.raises(InputDataError, match=r"line 1 does not fit .* is no text or number, and no list of these"):
        score_tasks([task], model, None, log=tmp_path / "log")


def test_a_score_that_has_dropped_too_far_fails_the_gate() -> None:
    score = TaskScore(
        task="colours", metric="acc", documents=4, original=0.75, original_stderr=0.25, quantized=0.5,
        quantized_stderr=0.2887, max_drop=0.2,
    )  # fmt: skip
    measured = Measured(
        rows=1, seq_len=2, device="cpu", quant_algo="FP8", kv_cache_quant_algo=None, original_dtype="float32",
        quantized_dtype="float32", original_nll=1.0, quantized_nll=1.0, mean_kl=0.0, p99_kl=0.0, top1_agreement=1.0,
        layers=[LayerError(layer=0, local=0.0, accumulated=0.0)], saturation=[],
    )  # fmt: skip
    thresholds = Thresholds(perplexity_ratio=1.1, mean_kl=0.1, top1_agreement=0.9)

    def report(one: TaskScore) -> gate.Report:
        return gate.Report(recipe="fp8", thresholds=thresholds, measured=measured, tasks=[one])

    failed = report(score)
    assert failed.failures == ["acc of colours is 0.5, 0.25 below the original's 0.75, and the task allows 0.2"]
    assert failed.refusal().what == f"the accuracy gate failed: {failed.failures[0]}"
    assert failed.to_dict()["passed"] is False
    assert failed.to_dict()["tasks"] == [asdict(score)]
    row = ("acc of colours", "0.7500 ± 0.2500", "0.5000 ± 0.2887", "at most 0.2 lower")
    assert failed.summary()[-1] == row
    assert all(text in page.render(failed) for text in row)
    # A better score fails nothing, nor does a worse one that no task judges.
    assert report(replace(score, max_drop=0.25)).failures == []
    # 0.8 - 0.7 is more than 0.1 in binary.
    assert report(replace(score, original=0.8, quantized=0.7, max_drop=0.1)).failures == []
    assert report(replace(score, original=0.8, quantized=0.699, max_drop=0.1)).failures != []
    assert report(replace(score, quantized=1.0)).failures == []
    assert report(replace(score, max_drop=None)).failures == []


def test_a_drop_that_nothing_is_compared_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(
        rows=1, seq_len=2, device="cpu", vocab_size=300, quant_algo="FP8", kv_cache_quant_algo=None,
        quantized_dtype="bfloat16", quantized_nll=1.0, saturation=(),
    )  # fmt: skip
    score = TaskScore(task="colours", metric="acc", documents=4, quantized=0.5, quantized_stderr=0.25, max_drop=0.2)
    scores = [score, replace(score, metric="acc_norm"), replace(score, task="sums", max_drop=None)]
    monkeypatch.setattr(gate, "measure_alone", lambda *given, **more: alone)
    monkeypatch.setattr(verify, "score_tasks", lambda *given, **more: scores)
    monkeypatch.setattr(calibration, "samples", lambda *given: None)
    settings = verify.Settings(
        recipe=load_quant_recipes()["fp8"], dtype=DataType.BFLOAT16, accept=False, stored=True, alone=True,
        tasks=("colours.yaml", "sums.yaml"),
    )  # fmt: skip
    (tmp_path / "out").mkdir()
    told = verify.VERIFY.run(job(settings, tmp_path / "out", model=tmp_path, checkpoint=tmp_path))["notices"]
    assert told[0] == "max_drop of colours judges nothing: the model was scored alone"
    assert len(told) == 2


REFUSED: list[tuple[dict[str, Any], Sequence[Any], str]] = [
    ({"output_type": "loglikelihood"}, DOCS, "output_type loglikelihood is not scored here"),
    ({"dataset_path": "hellaswag"}, DOCS, "the data is not local; give dataset_path: json"),
    (
        {"dataset_kwargs": {"data_files": "absent.jsonl"}}, DOCS,
        "absent.jsonl; put it there, or correct data_files",
    ),
    ({"test_split": "tset"}, DOCS, "data_files has no split 'tset'; name one of test as test_split"),
    ({"metric_list": [{"metric": "bleu"}]}, DOCS, "the metric bleu is not scored here; give the mean of acc or"),
    ({"doc_to_choice": None}, DOCS, "multiple_choice has no doc_to_choice"),
    ({"num_fewshot": 5}, DOCS, "num_fewshot is not 0; write the examples into description"),
    ({"doc_to_txet": "a"}, DOCS, "unknown key 'doc_to_txet'; did you mean 'doc_to_text'?"),
    ({"generation_kwargs": {"top_k": 4}}, DOCS, "generation_kwargs.top_k"),
    ({"generation_kwargs": {"do_sample": True}}, DOCS, "answers are generated greedily"),
    ({"metadata": {"max_drop": "much"}}, DOCS, "a regular expression or max_drop is invalid"),
    ({"metadata": {"max_drop": 2}}, DOCS, "max_drop is 2; give a share of the documents, from 0 to 1"),
    ({"filter_list": [{"name": "a", "filter": [{"function": "map"}]}]}, DOCS, "filter_list has several lists"),
    ({"filter_list": [{"name": "a", "filter": [{"function": "regex", "regex_pattern": "("}]}]}, DOCS, "a regular"),
    ({}, [], "data.jsonl holds no document"),
    ({}, [[1]], "data.jsonl does not have a JSON object on each line: line 1 is not an object"),
    ({}, [{"colour": "red"}], "line 1 does not fit"),
    ({}, [{"thing": "sky", "colour": "blue"}], "colours.yaml: 'blue' is none of the choices"),
    ({}, [{"thing": "sky", "colour": "2"}], "colours.yaml: '2' is none of the choices"),
    ({}, [{"thing": "sky", "colour": 2}], "2 is not the index of a choice"),
    ({"doc_to_text": "thing"}, [{"thing": "", "colour": 0}], "the prompt is empty"),
    ({"doc_to_text": "{{ thing.__class__.__mro__ }}"}, DOCS, "access to attribute '__class__'"),
    ({}, [{"thing": "x" * 90, "colour": 0}], "the model takes 64"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "docs", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_a_task_that_cannot_be_scored_is_refused_by_name(
    model: Path, write: Write, tmp_path: Path, changes: dict[str, Any], docs: Sequence[Any], words: str
) -> None:
    with pytest.raises(InputDataError) as raised:
        score_tasks([write(CHOICE, docs, **changes)], model, None, log=tmp_path / "log")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_task_is_checked_against_its_first_document_without_a_model(write: Write) -> None:
    assert check_task(write(CHOICE, DOCS)).task == "colours"
    for changes, docs, words in (
        ({"doc_to_choice": "thing"}, DOCS, "doc_to_choice gives 'grass', which is not a list of choices"),
        ({"doc_to_target": "answr"}, DOCS, "'answr' is none of the choices"),
        ({"doc_to_text": "{{ thing }"}, DOCS, "unexpected '}'"),
        ({}, [*DOCS, [1]], "is not an object"),
    ):
        with pytest.raises(InputDataError) as raised:
            check_task(write(CHOICE, docs, **changes))
        assert words in str(raised.value)


def test_a_document_is_no_longer_than_the_reference_runtime_takes(model: Path, write: Write, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    scaling = {"rope_type": "dynamic", "factor": 4.0}  # with it the model itself takes four times as many tokens
    (model / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    with pytest.raises(InputDataError, match="the model takes 64"):
        score_tasks([write(CHOICE, [{"thing": "x" * 90, "colour": 0}])], model, None, log=tmp_path / "log")


def test_the_tasks_of_the_documentation_are_tasks() -> None:
    folder = ROOT / "tests" / "data" / "tasks"
    found = {path.stem: read_task(path) for path in sorted(folder.glob("*.yaml"))}
    assert [(task.task, task.output_type, task.max_drop) for task in found.values()] == [
        ("capitals", "multiple_choice", 0.25),
        ("capitals_generated", "generate_until", None),
    ]
