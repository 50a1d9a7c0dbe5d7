"""vLLM hands the target's hidden states over: a KV connector that copies them out of the cache.

In: a finished request (prompt + answer). Out: its states after every token but the last, kept until `take`
collects them. Loaded by vLLM through `kv_connector_module_path`.
vLLM's own example connector needs CUDA streams and pinned memory and writes one file a prompt; where the
engine lives in our process (one device) the states come to us in one copy, and no file is written.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    extract_from_kv_cache,
)

# What has been captured and not yet taken, by vLLM's own request id; filled by the worker in this process.
_captured: dict[str, Tensor] = {}


def engine_options(layer_ids: tuple[int, ...], folder: Path | None) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` that switch the capture of HF `hidden_states[layer_ids]` on.

    `folder`: where workers in other processes (tensor parallelism) leave their files; None in one process.
    """
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "CaptureConnector",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "use_synchronization_lock": False,
                "handover_folder": str(folder) if folder else None,
                "shared_storage_path": str(folder or tempfile.gettempdir()),
            },
        },
        "async_scheduling": False,  # it would place drafts by itself
        "enable_prefix_caching": False,  # the states must come from this request, not from a cached prefix
    }


def draft_nothing(engine: Any) -> None:
    """Keep the capture from speculating: its "drafts" repeat the last token.

    vLLM would verify one in every step, which doubles the work of a step and sends sampled requests through
    the rejection sampler. Capturing needs none of it. The engine core must live in this process.
    """
    engine.engine_core.engine_core.check_for_draft_tokens = False


REQUEST_OPTIONS = {"kv_transfer_params": {"include_output_tokens": True}}


def take(handover: dict[str, Any]) -> Tensor | None:
    """States of one finished request, [tokens - 1, layers, H] in the engine's dtype; each can be taken once.

    `handover`: the `kv_transfer_params` of the request's output. None where the engine has not copied them
    yet: it does so in the step after the one that finished the request.
    """
    path = Path(handover["hidden_states_path"])
    states = _captured.pop(path.stem, None)
    if states is None and path.is_file():
        states = load_file(path)["hidden_states"]
        path.unlink()
    return states


class CaptureConnector(ExampleHiddenStatesConnector):
    """The example connector's bookkeeping, with a plain copy on the calling thread for its streams."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        folder = self._kv_transfer_config.get_from_extra_config("handover_folder", None)
        self._folder = Path(folder) if folder else None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        # The cache is read through a view indexed by block and slot, which is right in every layout; the
        # CPU backend knows only one that the example connector would refuse.
        return None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy what has finished and let its blocks go at once."""
        done: set[str] = set()
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            if isinstance(metadata, ExampleHiddenStatesConnectorMetadata):
                for pending in metadata.pending_saves:
                    if self._is_tp_rank_zero:
                        self._hand_over(pending)
                        done.add(pending.req_id)
        return done or None, None

    def _hand_over(self, pending: Any) -> None:
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        tokens = len(pending.token_ids)
        states = extract_from_kv_cache(self._kv_cache, slots.to(self._kv_cache.device), tokens).cpu()
        if self._folder is None:
            _captured[pending.req_id] = states
        else:
            temporary = pending.filename + ".partial"
            save_file({"hidden_states": states.contiguous()}, temporary)
            os.replace(temporary, pending.filename)
