"""The draft's configuration, in the flat form that vLLM and SGLang read from `config.json`.

In: a dict (a served draft's config.json, or a target's own config). Out: one frozen `DraftConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_ID_CONVENTION = "hf-hidden-states"  # id k names hidden_states[k]; 0 is the embedding output


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The three captured states of EAGLE-3 as indices into HF's `hidden_states` (0 is the embedding output)."""
    if num_layers < 7:
        # Tiny test targets: the rule 2, L//2, L-3 would repeat an id or leave the range, and servers read a set.
        return (1, num_layers // 2, num_layers - 1) if num_layers > 3 else (0, 1, num_layers)
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class DraftConfig:
    """Everything a server needs to rebuild the draft; each value is written out in full on export.

    `layer_ids` are indices into the target's HF `hidden_states`: three, the last one alone, or none. `fc_norm` and
    `norm_output` are the two flags of EAGLE-3.1: an RMSNorm per captured state before `fc`, and the post-norm output
    fed back.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_ids: tuple[int, ...]
    rope_scaling: dict[str, Any] | None = None
    target_hidden_size: int | None = None
    fc_norm: bool = False
    norm_output: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie in 1..vocab_size ({self.vocab_size})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: RoPE rotates pairs")
        if len(self.layer_ids) not in (0, 1, 3):
            raise ValueError(f"layer_ids {self.layer_ids}: a draft reads three states, the last one alone, or none")

    @property
    def feature_size(self) -> int:
        """Width of one row of captured features: the target states side by side."""
        return len(self.layer_ids) * (self.target_hidden_size or self.hidden_size)

    @classmethod
    def from_target(
        cls,
        target: Mapping[str, Any],
        draft_vocab_size: int,
        layer_ids: tuple[int, ...] | None = None,
        **overrides: Any,
    ) -> DraftConfig:
        """A draft of the target's own shape, from the target's HF config as a dict.

        RoPE is read from `rope_theta`/`rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).
        Raises KeyError where the target's config lacks a size.
        """
        theta, scaling = _rope(target)
        heads = target["num_attention_heads"]
        values: dict[str, Any] = {
            "hidden_size": target["hidden_size"],
            "intermediate_size": target["intermediate_size"],
            "num_attention_heads": heads,
            "num_key_value_heads": target.get("num_key_value_heads") or heads,
            "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
            "vocab_size": target["vocab_size"],
            "draft_vocab_size": draft_vocab_size,
            "rms_norm_eps": target["rms_norm_eps"],
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": target["max_position_embeddings"],
            "layer_ids": tuple(default_layer_ids(target["num_hidden_layers"]) if layer_ids is None else layer_ids),
            "target_hidden_size": target["hidden_size"],
            "bos_token_id": target.get("bos_token_id"),
            "eos_token_id": target.get("eos_token_id"),
        }
        return cls(**{**values, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that vLLM and SGLang load; `from_dict` is its inverse."""
        values = asdict(self)
        layer_ids = list(values.pop("layer_ids"))
        values["target_hidden_size"] = self.target_hidden_size or self.hidden_size
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **values,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": layer_ids,
                "use_aux_hidden_state": len(layer_ids) > 1,  # one alone is the target's own last state
                "layer_id_convention": LAYER_ID_CONVENTION,
            },
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Read a served draft's config.json. Raises ValueError where it is not an EAGLE-3 head."""
        if ARCHITECTURE not in config.get("architectures", []):
            raise ValueError(f"architectures {config.get('architectures')} is not [{ARCHITECTURE!r}]")
        theta, scaling = _rope(config)
        names = cls.__dataclass_fields__.keys() - {"layer_ids", "rope_theta", "rope_scaling"}
        values = {name: config[name] for name in names if name in config}
        layer_ids = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        return cls(**values, rope_theta=theta, rope_scaling=scaling, layer_ids=layer_ids)


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling of an HF config of either generation; plain RoPE has scaling None."""
    parameters = dict(config.get("rope_parameters") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta")
    if theta is None:
        raise KeyError("rope_theta is in neither the config nor its rope_parameters")
    scaling = config.get("rope_scaling") or parameters or None
    if scaling:
        scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
        if scaling.get("rope_type", scaling.get("type", "default")) == "default":
            scaling = None
    return float(theta), scaling
