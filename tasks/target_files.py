"""A target's files on this machine: where they are, whether they are all there, and what identifies them.

In: a hub id or folder. Out: the local folder and `TargetFiles`. Nothing is downloaded and no tensor is read
whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.checksums import sampled_checksum
from tasks.target_checks import TargetError

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8}


@dataclass(frozen=True)
class TargetFiles:
    """config: config.json. weight_bytes: all tensors' bytes as stored. weight_bits: of the commonest dtype.
    """

    config: Mapping[str, Any]
    weight_bytes: int
    weight_bits: int
    fingerprint: str
    tokenizer_fingerprint: str


def find_folder(model: str, revision: str | None) -> Path:
    """The local folder of a hub id (from the hub's cache) or of a folder path. Raises TargetError with the
    remedy.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise TargetError(
            f"target.model {model!r} is neither a folder that is there, a hub id nor package:NAME"
        )
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        at = f" --revision {revision}" if revision else ""
        raise TargetError(
            f"no weights for {model} on this machine (looked in {constants.HF_HUB_CACHE}): get them with "
            f"`hf download {model}{at}` (a gated model needs its licence accepted and `hf auth login` "
            f"first), or name "
            f"a local folder as target.model{_no_device()}"
        ) from None


def _no_device() -> str:
    import torch

    return (
        ""
        if torch.cuda.is_available()
        else "; this machine has no CUDA device either, which such a model needs"
    )


def inspect(folder: Path, model: str) -> TargetFiles:
    """Check that config, tokenizer and every weight file are in `folder`, and fingerprint them."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise TargetError(f"{model}: {folder} has no config.json; {_again(model)}")
    config_bytes = config_path.read_bytes()
    try:
        config = json.loads(config_bytes)
    except ValueError as error:
        raise TargetError(f"{config_path}: not valid JSON ({error}); {_again(model)}") from None
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise TargetError(f"{model}: {folder} has no tokenizer; {_again(model)}")
    weights = _weight_files(folder, model)
    digest = hashlib.sha256(config_bytes)
    total = 0
    by_dtype: dict[str, int] = {}
    for path in weights:
        header = _header(path, model)
        for name, tensor in header.items():
            if name != "__metadata__":
                size = tensor["data_offsets"][1] - tensor["data_offsets"][0]
                total += size
                by_dtype[tensor["dtype"]] = by_dtype.get(tensor["dtype"], 0) + size
        digest.update(path.name.encode())
        digest.update(sampled_checksum(path).encode())
    if not total:
        raise TargetError(f"{model}: the weight files in {folder} hold no tensor; {_again(model)}")
    commonest = max(by_dtype, key=lambda dtype: by_dtype[dtype])
    return TargetFiles(
        config=config,
        weight_bytes=total,
        weight_bits=DTYPE_BITS.get(commonest, 16),
        fingerprint=digest.hexdigest()[:20],
        tokenizer_fingerprint=_tokenizer_fingerprint(folder),
    )


def chat_template(folder: Path) -> str | None:
    """The chat template's text: its own file, or the tokenizer config's entry (the one named "default" of
    several).
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("chat_template") if path.is_file() else None
        if isinstance(found, list):
            named = {entry["name"]: entry["template"] for entry in found}
            found = named.get("default")
        if found:
            return str(found)
    return None


def _weight_files(folder: Path, model: str) -> list[Path]:
    """Every safetensors file that belongs to the model; TargetError where one of them is missing."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise TargetError(
                f"{model}: {len(missing)} of {len(names)} weight files are missing in {folder} "
                f"({missing[0]}{', …' if len(missing) > 1 else ''}); {_again(model)}"
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return [folder / "model.safetensors"] if (folder / "model.safetensors").is_file() else found
    if list(folder.glob("*.bin")):
        raise TargetError(
            f"{model}: {folder} holds pickled weights (*.bin) only, and those are not opened here: save "
            f"them once as "
            "safetensors (transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER), and the "
            "tokenizer beside them) and name that folder as target.model"
        )
    raise TargetError(f"{model}: {folder} has no weights (*.safetensors); {_again(model)}")


def _again(model: str) -> str:
    return (
        f"fetch it again: `hf download {model}`"
        if not Path(model).expanduser().is_dir()
        else "copy it again, whole"
    )


def _header(path: Path, model: str) -> dict[str, Any]:
    """A safetensors file's header; TargetError where the file is shorter than its header says (a broken
    download).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise TargetError(f"{path}: not a whole safetensors file; {_again(model)}")
        header = json.loads(file.read(length))
    end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
    if 8 + length + end != size:
        raise TargetError(f"{path}: {size} bytes where its header says {8 + length + end}; {_again(model)}")
    return header


def _tokenizer_fingerprint(folder: Path) -> str:
    """Over the tokenizer's files, the chat template left out: it has a hash of its own."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = folder / name
        if not path.is_file():
            continue
        content = path.read_bytes()
        if name == "tokenizer_config.json":
            values = json.loads(content)
            values.pop("chat_template", None)
            content = json.dumps(values, sort_keys=True).encode()
        digest.update(name.encode())
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:20]
