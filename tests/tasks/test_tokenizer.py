"""The cheap way to a tokenizer gives what the library's own way gives, and imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tasks.devices import cuda_devices
from tasks.tokenizer import load_tokenizer
from tests.tiny_target import make_tiny_target

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_target(tmp_path / "target")


def test_it_is_the_tokenizer_that_the_library_would_load(folder: Path):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs) and ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_neither_tokenizer_nor_template_nor_device_count_imports_torch(folder: Path):
    if cuda_devices():
        pytest.skip("with a device, torch is asked about it")
    script = (
        "import sys, pathlib\n"
        "from tasks.devices import cuda_devices\n"
        "from tasks.templates import Template\n"
        "from tasks.tokenizer import load_tokenizer\n"
        "template = Template(load_tokenizer(pathlib.Path(sys.argv[1])), (1,))\n"
        "assert template.prompt([{'role': 'user', 'content': 'abc'}]).token_ids and not cuda_devices()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("change", [{"tokenizer_class": "LlamaTokenizer"}, {"auto_map": {"AutoTokenizer": ["a.B", None]}}])
def test_a_folder_that_names_another_class_is_left_to_the_library(folder: Path, monkeypatch, change):
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    asked: list[Path] = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **more: asked.append(path))
    load_tokenizer(folder)
    assert asked == [folder]
