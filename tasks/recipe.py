"""A recipe: everything that a build depends on, read from YAML, validated, passed down as typed objects.

In: `recipes/<name>.yaml` and dotted overrides. Out: a frozen `Recipe`. Unknown keys are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from eagle3core.drafters import DRAFTERS
from tasks.experiment.settings import STRICT, Experiments

RECIPES = Path(__file__).resolve().parent.parent / "recipes"

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the file and the key."""


class Section(BaseModel):
    model_config = STRICT


class Target(Section):
    """The model that is to be served."""

    model: str = Field(description="Hub id, local Hugging Face folder, or package:NAME for an installed package's model")
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_model_len: Positive = 4096
    trust_remote_code: bool = Field(False, description="Run code that comes with the model; off unless asked for")
    chat_template: str | None = Field(None, description="A Jinja file that replaces the tokenizer's own template")
    template_arguments: dict[str, Any] = Field({}, description="Given to the chat template, e.g. {enable_thinking: false}")
    allow_cpu: bool = Field(False, description="Run a target of more than 2 B parameters without a GPU all the same")


class Source(Section):
    """One set of prompts."""

    kind: Literal["sharegpt", "ultrachat", "openthoughts", "openthoughts-math", "messages", "prompts"]
    uri: str = Field(description="Hub id (with /configuration), file, folder, object-store URL, or package:NAME")
    split: str | None = Field(None, description="Split of a hub data set, for example train_sft")
    system: Literal["keep", "drop"] = Field("keep", description="The data's own system prompts: kept, or left out")
    limit: Positive | None = Field(None, description="Conversations taken, a seeded sample; all where empty")


class Data(Section):
    sources: list[Source] = Field(min_length=1)
    heldout: int = Field(
        64, ge=0, description="Conversations kept out of training for evaluation; 0 where evaluation.sets do"
    )
    max_prompt_tokens: Positive = Field(1024, description="A conversation whose first prompt is longer is refused")
    max_tokens: Positive = Field(2048, description="A sample is cut on the right to this many tokens")
    max_turns: Positive = Field(4, description="User turns answered in one conversation")
    train_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Of the training conversations; a smaller share lies within every larger one"
    )
    exclude: list[str] = Field([], description="Evaluation prompts (files, folders, hub ids) to keep out of training")
    max_bad_share: Share = Field(0.75, description="A larger share of refused rows stops the run")
    seed: int = 0


class Responses(Section):
    """How the target answers."""

    engine: Literal["vllm", "http", "huggingface"] = "vllm"
    servers: list[str] = Field([], description="OpenAI-compatible base URLs, for engine http")
    keep_answers: bool = Field(False, description="Train on the data's own answers instead of the target's")
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    greedy_share: Share = Field(0.0, description="Share of training conversations answered at temperature 0 instead")
    heldout_temperatures: list[float] = Field([0.0, 1.0], min_length=1)
    max_new_tokens: Positive = 1024
    heldout_max_new_tokens: Positive = 128
    part_size: Positive = Field(64, description="Conversations in one part: what a kill can cost")
    max_num_seqs: Positive = Field(128, description="Sequences kept in flight")
    seed: int = 0


class Features(Section):
    """What is stored of the target's states."""

    engine: Literal["vllm", "huggingface"] = "vllm"
    layer_ids: tuple[int, ...] | None = Field(None, description="Indices into HF hidden_states; empty: what the draft reads")
    dtype: Literal["bfloat16", "float16", "float32", "fp8_e4m3", "int8"] = Field(
        "bfloat16", description="fp8_e4m3 and int8 are one byte a number, with a scale for every token and layer"
    )
    teacher: Literal["topk", "hidden"] = "topk"
    teacher_k: Positive = Field(16, description="Target log-probabilities stored per token, for teacher topk")


class Vocabulary(Section):
    size: Positive = 32000


class Draft(Section):
    """The draft's architecture."""

    drafter: Literal[*DRAFTERS] = "eagle3"
    options: dict[str, Any] = Field({}, description="The drafter's own settings (eagle3core/drafters); defaults where empty")
    fc_norm: bool = Field(False, description="EAGLE-3.1: an RMSNorm per captured state before fc")
    norm_output: bool = Field(False, description="EAGLE-3.1: the post-norm output is fed back")
    start_from_target: bool = Field(True, description="Head and norm start from the target's")
    layer_ids: tuple[int, ...] | None = Field(None, description="States it reads, among features.layer_ids; default: all")

    def identity(self) -> dict[str, Any]:
        """What decides the weights: drafters that share them are one; a key that says nothing is not there."""
        values = self.model_dump(mode="json")
        kept = {name: value for name, value in values.items() if value not in (None, {})}
        return {**kept, "drafter": DRAFTERS[self.drafter].weights_of or self.drafter}


class Training(Section):
    """Training-time test and its optimizer."""

    ttt_steps: Positive = 7
    ttt_ramp: list[tuple[int, int]] = Field([], description="[optimizer step, TTT steps] pairs: fewer steps at first")
    step_decay: Annotated[float, Field(gt=0, le=1)] = Field(0.8, description="Loss weight of TTT step i is step_decay**i")
    loss: Literal["ce", "lk-alpha", "lk-lambda", "acceptance", "d-pace"] = "ce"
    epochs: Positive = 1
    max_steps: Positive | None = None
    max_cpu_minutes: Annotated[float, Field(gt=0)] | None = None
    tokens_per_batch: Positive = 4096
    accumulate: Positive = 1
    lr: Annotated[float, Field(gt=0)] = 5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 0.5
    warmup_share: Share = 0.03
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    anchor_share: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Share of chains that go past step 0")
    compile: bool = False
    activation_checkpointing: bool = False
    deterministic: bool = Field(False, description="Refuse kernels whose sums have no fixed order")
    sharding: Literal["ddp", "fsdp"] = Field("ddp", description="How several GPUs share the work")
    checkpoint_every: Positive = 100
    evaluate_every: Positive = 200
    threads: Positive | None = Field(None, description="CPU threads; default: the cores this process may use")
    seed: int = 0


class Tree(Section):
    """EAGLE-2's dynamic tree."""

    nodes: Positive = 60
    depth: Positive = 8
    top_k: Positive = 10


class Decode(Section):
    """The reference decoder, which is timed: with a chain, with the tree, and without a draft, one prompt at a time."""

    prompts: int = Field(2, ge=0, description="Held-out prompts decoded; 0 where the target does not fit one device")
    max_new_tokens: Annotated[int, Field(ge=2)] = 32


class EvaluationSet(Section):
    """A set of prompts that is held out whole: never trained on, always measured."""

    kind: Literal["mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dailymail", "math-500", "prompts", "starter"] = Field(
        description="starter ships with this package; prompts is any file of prompts with categories of its own"
    )
    uri: str | None = Field(None, description="File, hub id (owner/name or owner/name/config), URL; none for starter")
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$", description="Its name in keys and reports; the kind where empty")
    split: str | None = Field(None, description="Split of a hub data set; the set's usual one where empty")
    limit: Positive | None = Field(None, description="Prompts taken, evenly over categories; all where empty")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and not value.get("name"):
            return {**value, "name": value.get("kind", "")}
        return value

    @model_validator(mode="after")
    def _has_a_place(self) -> EvaluationSet:
        if self.kind == "starter" and self.uri:
            raise ValueError("kind starter ships with the package and takes no uri; a file of your own is of kind prompts")
        if self.kind != "starter" and not self.uri:
            raise ValueError(f"kind {self.kind} needs a uri: a file, or a hub id; only starter ships with the package")
        return self


class Evaluation(Section):
    sets: list[EvaluationSet] = Field([], description="Held out beside data.heldout, and kept out of training")
    chain_length: Positive = 5
    tree: Tree = Tree()
    tree_prompts: int = Field(8, ge=0, description="Held-out answers of each temperature that the tree is measured on")
    decode: Decode = Decode()
    bootstrap: Positive = Field(1000, description="Resamples of the prompt-clustered intervals")

    @model_validator(mode="after")
    def _told_apart(self) -> Evaluation:
        names = [each.name for each in self.sets]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several evaluation sets are named {double[0]!r}: give each its own name")
        return self


class Serving(Section):
    """The check that a real server loads the draft and accepts as much as was promised."""

    enabled: bool = True
    prompts: Positive = 32
    max_new_tokens: Positive = 64
    baselines: list[Literal["ngram"]] = []
    max_num_seqs: Positive = 32


class Vllm(Section):
    """Where vLLM lives and what it may take."""

    python: str | None = Field(None, description="Python that has vLLM; default: the one that runs the flow")
    memory_share: Annotated[float, Field(gt=0, le=1)] = Field(0.9, description="vLLM's gpu_memory_utilization")
    kv_cache_gb: Positive | None = Field(None, description="KV cache on a CPU, GiB")
    tensor_parallel: Positive = 1
    enforce_eager: bool = False
    threads: Positive | None = Field(None, description="CPU threads of one engine; default: its share of the cores")
    engines: Positive | None = Field(
        None, description="Engine processes side by side; default: one per GPU (group), or per CPU core that has room"
    )


class Store(Section):
    uri: str = Field("store", description="Local folder or object-store URL")
    window_gb: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Disk for features, GB: extracted as training needs them, in every epoch; all at once where empty"
    )


class Tracking(Section):
    uri: str = Field("sqlite:///mlflow.db", description="MLflow tracking URI")
    artifacts: str = Field("mlartifacts", description="Where MLflow keeps artifacts for a database URI")
    experiment: str = "draftline"
    enabled: bool = True


class Recipe(Section):
    """One target, one way to make its draft."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    description: str = ""
    target: Target
    data: Data
    responses: Responses = Responses()
    features: Features = Features()
    vocabulary: Vocabulary = Vocabulary()
    draft: Draft = Draft()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    serving: Serving = Serving()
    vllm: Vllm = Vllm()
    store: Store = Store()
    tracking: Tracking = Tracking()
    experiments: Experiments = Experiments()

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A name or path stands for what the file says: a deployment in somebody's own pool need not repeat it."""
        return _read(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if self.data.max_tokens > self.target.max_model_len:
            raise ValueError(
                f"data.max_tokens {self.data.max_tokens} is more than target.max_model_len {self.target.max_model_len}"
            )
        if self.data.max_prompt_tokens >= self.data.max_tokens:
            raise ValueError("data.max_prompt_tokens must be below data.max_tokens, or no answer fits")
        read, stored = self.draft.layer_ids, self.features.layer_ids
        if read and stored and not set(read) <= set(stored):
            raise ValueError(f"draft.layer_ids {list(read)} are not all among features.layer_ids {list(stored)}")
        if not self.data.heldout and not self.evaluation.sets:
            raise ValueError("data.heldout 0 leaves nothing to measure on: raise it, or name evaluation.sets")
        kinds = {source.kind for source in self.data.sources}
        if taken := [each.name for each in self.evaluation.sets if each.name in kinds]:
            raise ValueError(f"evaluation set {taken[0]!r} is named as a data source is: give it another name")
        if problem := DRAFTERS[self.draft.drafter].problem(self.draft.options):
            raise ValueError(f"draft.drafter {self.draft.drafter}: {problem}")
        if self.responses.engine == "http" and not self.responses.servers:
            raise ValueError("responses.engine http needs responses.servers")
        return self


def recipe_names() -> list[str]:
    """Every recipe that ships, by name."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe by name or path and lay dotted `overrides` over it ({"training.lr": 1e-4}).

    Raises RecipeError with the file, the key and what is wrong with it.
    """
    return build_recipe(_read(name_or_path), overrides, where=str(_path(name_or_path)))


def build_recipe(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, where: str = "recipe") -> Recipe:
    """Validate a raw mapping with `overrides` laid over it. Raises RecipeError naming `where` and the key."""
    merged = copy.deepcopy(dict(raw))
    for key, value in (overrides or {}).items():
        _set(merged, key, value, where)
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in problem['loc']) or 'recipe'}: {problem['msg']}"
            + (f" (got {problem['input']!r})" if problem["type"] != "missing" and problem["loc"] else "")
            for problem in error.errors()
        ]
        raise RecipeError(f"{where}: " + "; ".join(lines)) from None


def _set(tree: dict[str, Any], dotted: str, value: Any, where: str) -> None:
    *parents, leaf = dotted.split(".")
    node: Any = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise RecipeError(f"{where}: override {dotted!r}: {name} is not a section")
    node[leaf] = value


def _path(name_or_path: str) -> Path:
    path = Path(name_or_path)
    return path if path.suffix in {".yaml", ".yml"} else RECIPES / f"{name_or_path}.yaml"


def _read(name_or_path: str) -> dict[str, Any]:
    path = _path(name_or_path)
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise RecipeError(f"no recipe {name_or_path!r}: {path} is not there. Known: {', '.join(recipe_names())}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, this is {type(raw).__name__}")
    return raw
