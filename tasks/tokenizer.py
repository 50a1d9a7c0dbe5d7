"""A target's tokenizer, loaded as cheaply as it can be.

In: a Hugging Face folder. Out: a fast tokenizer of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAIN_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast"}


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """The folder's tokenizer.

    `AutoTokenizer` imports every model class and torch with them: some seconds and 480 MB. Where the folder says
    that its tokenizer is the plain one, that class is taken at once, as `AutoTokenizer` itself would in the end.
    """
    if _is_plain(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _is_plain(folder: Path) -> bool:
    """Whether `AutoTokenizer` would take the plain class: for other model types it overrules some folders."""
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text())
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError):
        return False
    plain = named.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in named
    return plain and model_type == "llama" and (folder / "tokenizer.json").is_file()
