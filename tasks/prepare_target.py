"""The target model: found, looked at before anything runs, and given a fingerprint.

In: a recipe. Out: a `TargetInfo`, small and JSON-able, that every stage gets. A model that rides in an
installed package as GGUF is converted once into a clean Hugging Face folder in the store; nothing is ever
downloaded here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from storage.artifacts import ArtifactStore
from storage.errors import disk_errors
from tasks import target_files
from tasks.packages import PREFIX, PackageError, package_file
from tasks.recipe import RECIPES, Recipe
from tasks.stage import Plan, Stage, run_plan
from tasks.target_checks import TargetError, memory_problem
from tasks.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

STAGE = Stage(name="prepare-target", kind="target", version=1)


@dataclass(frozen=True)
class TargetInfo:
    """What the stages need to know of the target, without opening its weights.

    model: as the recipe names it. path: the local Hugging Face folder (not part of any fingerprint).
    fingerprint: config and weights. tokenizer_fingerprint: the tokenizer's files. template_hash: the chat
    template's text. config: the model's config.json. eos_token_ids: every id that ends an answer. dtype: what
    it is run in.
    """

    model: str
    path: str
    revision: str | None
    fingerprint: str
    tokenizer_fingerprint: str
    template_hash: str
    chat_template: str
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    dtype: str
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    @property
    def hidden_size(self) -> int:
        return int(self._text_config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self._text_config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        return int(self._text_config["vocab_size"])

    @property
    def _text_config(self) -> Mapping[str, Any]:
        # Models that also see keep their language model's sizes one level down.
        return self.config.get("text_config", self.config)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TargetInfo:
        return cls(**{**values, "eos_token_ids": tuple(values["eos_token_ids"])})

    def identity(self) -> dict[str, Any]:
        """The target's share of a stage's parameters: what makes its text and its states what they are."""
        return {
            "target": self.fingerprint,
            "tokenizer": self.tokenizer_fingerprint,
            "chat_template": self.template_hash,
            "dtype": self.dtype,
        }


def prepare_target(recipe: Recipe) -> TargetInfo:
    """Find the recipe's target, check that this machine can run it, and describe it. Seconds; no work is done
    before.

    Raises TargetError, one line: what is missing (weights, package, tokenizer, template, a device, memory)
    and how to get it.
    """
    wanted = recipe.target
    if wanted.model.startswith(PREFIX):
        folder = _from_package(wanted.model.removeprefix(PREFIX), ArtifactStore(recipe.store.uri))
    else:
        folder = target_files.find_folder(wanted.model, wanted.revision)
    files = target_files.inspect(folder, wanted.model)
    if problem := memory_problem(recipe, files.weight_bytes, files.weight_bits):
        raise TargetError(problem)
    template = _template(recipe, folder)
    return TargetInfo(
        model=wanted.model,
        path=str(folder),
        revision=wanted.revision,
        fingerprint=files.fingerprint,
        tokenizer_fingerprint=files.tokenizer_fingerprint,
        template_hash=_template_hash(template, wanted.template_arguments),
        chat_template=template,
        config=files.config,
        eos_token_ids=_known_end_ids(recipe, folder, files),
        dtype=wanted.dtype,
        template_arguments=wanted.template_arguments,
        trust_remote_code=wanted.trust_remote_code,
    )


def _template(recipe: Recipe, folder: Path) -> str:
    """The chat template's text: the recipe's own file, or the one that comes with the tokenizer."""
    if recipe.target.chat_template:
        named = Path(recipe.target.chat_template)
        # A relative path in a shipped recipe means the recipes' folder; in a user's own, where they stand.
        for path in (RECIPES / named, named):
            if path.is_file():
                return path.read_text()
        raise TargetError(f"target.chat_template {named}: no such file (looked in {RECIPES} and here)")
    template = target_files.chat_template(folder)
    if template is None:
        raise TargetError(
            f"{recipe.target.model} has no chat template: name a Jinja file as target.chat_template in "
            f"the recipe"
        )
    return template


def _template_hash(template: str, arguments: Mapping[str, Any]) -> str:
    return hashlib.sha256((template + json.dumps(arguments, sort_keys=True)).encode()).hexdigest()[:20]


def _known_end_ids(recipe: Recipe, folder: Path, files: target_files.TargetFiles) -> tuple[int, ...]:
    """`_end_ids`, looked up once for these very files: loading a tokenizer takes five seconds of imports, and
    a build in which nothing changed should not take longer than that itself.
    """
    name = f".end-ids-{files.fingerprint}-{files.tokenizer_fingerprint}.json"
    memo = ArtifactStore(recipe.store.uri).root / STAGE.kind / name
    try:
        return tuple(json.loads(memo.read_text()))
    except (OSError, ValueError):
        ids = _end_ids(folder, files.config, recipe.target.trust_remote_code)
    with disk_errors(memo):
        memo.parent.mkdir(parents=True, exist_ok=True)
        whole = memo.with_suffix(".new")
        whole.write_text(json.dumps(ids))
        whole.replace(memo)
    return ids


def _end_ids(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> tuple[int, ...]:
    """Every id that ends an answer, as a server stops: generation config, model config, tokenizer."""
    named: list[int] = []
    generation = folder / "generation_config.json"
    sources = [json.loads(generation.read_text())] if generation.is_file() else []
    for source in [*sources, config]:
        ids = source.get("eos_token_id")
        named += ids if isinstance(ids, list) else [ids] if ids is not None else []
    try:
        tokenizer = load_tokenizer(folder, trust_remote_code)
    except Exception as error:
        raise TargetError(
            f"{folder}: the tokenizer does not load: {' '.join(str(error).split())[:300]}"
        ) from error
    if tokenizer.eos_token_id is not None:
        named.append(tokenizer.eos_token_id)
    if not named:
        raise TargetError(f"{folder}: neither config nor tokenizer names an end-of-text token")
    return tuple(dict.fromkeys(named))


def _from_package(name: str, store: ArtifactStore) -> Path:
    """The package's GGUF as a Hugging Face folder in the store, converted the first time."""
    try:
        gguf = package_file(name, (".gguf",))
    except PackageError as error:
        raise TargetError(str(error)) from None
    with gguf.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    plan = Plan(STAGE, {"gguf_sha256": checksum})

    def work(writer: Any) -> Mapping[str, Any]:
        log.info("converting %s into a Hugging Face folder, once: about 20 s", gguf.name)
        _convert_gguf(gguf, writer.folder)
        return {
            "source": gguf.name,
            "bytes": sum(p.stat().st_size for p in writer.folder.iterdir() if p.is_file()),
        }

    return store.local(plan.find(store) or run_plan(plan, store, work))


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write fp32 safetensors, config, tokenizer and chat template to `folder`, with no trace of quantisation.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config.__class__.from_dict(
        {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    )
    config.architectures = [type(loaded).__name__]
    # GGUF holds it in fp32 (9.999999747e-06); written as the model's authors wrote it.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    # A model read from GGUF refuses to be saved ("not serializable"): its weights move to a fresh one.
    config._name_or_path = ""
    with torch.device("meta"):  # no time spent on random weights
        clean = type(loaded)(config)
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = loaded.generation_config
    _require_room(folder, sum(weight.nbytes for weight in clean.parameters()))
    clean.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _require_room(folder: Path, size: int) -> None:
    """The writer below reports a full disk in words of its own."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise TargetError(
            f"the converted target takes {size / 1e9:.1f} GB and {folder.parent} has {free / 1e9:.1f} GB free: "
            "free some space, or point store.uri somewhere else"
        )
