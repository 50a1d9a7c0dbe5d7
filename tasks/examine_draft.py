"""The doctor's door: `python -m tasks.examine_draft RECIPE --draft FOLDER`.

In: a recipe (for its target), a draft's folder, and prompts that the target answers here, or a features
artifact whose greedy held-out answers are examined as they are stored. Out: one line a finding; exit status
1 where any, 2 where the draft cannot be examined.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3core.config import DraftConfig
from eagle3core.decoding.propose import Nothing
from eagle3core.decoding.speculate import Decoding, speculate
from eagle3core.doctor import Finding, Patient, examine, tensor_findings
from eagle3core.drafters import DRAFTERS
from eagle3core.export import load_draft
from eagle3core.teacher import TargetHead
from storage.features import FeatureReader
from tasks.documents import heldout_documents
from tasks.engines.hf_target import HuggingFaceTarget
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import load_recipe
from tasks.target_weights import read_target_weights
from tasks.templates import Message, Template

PROMPTS = (
    "Why is the sky blue?",
    "Write a function that reverses a list.",
    "A train travels 120 km in 2 hours. How fast is it?",
    "Name three rivers in Europe and one fact about each.",
    "Explain to a child what a magnet does.",
    "Write a short letter that thanks a friend for a book.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise the story of Romeo and Juliet.",
)
STORED = 8  # stored answers examined


def findings_of(
    draft: Path, target: TargetInfo, prompts: Sequence[str], features: Path | None, new_tokens: int
) -> list[Finding]:
    """Everything the doctor has to say. A file that lacks tensors is told first, and alone."""
    missing = file_findings(draft)
    if missing:
        return missing
    found = [] if features is not None else template_findings(Template.load(target), prompts)
    return found + examine(patient_of(draft, target, prompts, features, new_tokens))


def file_findings(draft: Path) -> list[Finding]:
    """Of a draft's folder, before anything is loaded. Raises ValueError where another drafter made it."""
    written = json.loads((draft / "config.json").read_text())
    line = DRAFTERS.get(written.get("drafter", "eagle3"))
    if line is None or line.method != "eagle3":
        made = line.title if line else written["drafter"]
        raise ValueError(f"{draft} holds an {made} draft; the doctor knows the traps of EAGLE-3's alone")
    config = DraftConfig.from_dict(written)
    with safe_open(draft / "model.safetensors", "pt") as file:
        return tensor_findings(list(file.keys()), config)


def patient_of(
    draft: Path, target: TargetInfo, prompts: Sequence[str], features: Path | None, new_tokens: int
) -> Patient:
    """The draft beside its target, with the target's greedy answers: to `prompts`, or as `features` stores them."""
    weights = read_target_weights(Path(target.path))
    model = load_draft(draft, weights.embedding).eval()
    decoder = HuggingFaceTarget.load(Path(target.path), model.config.layer_ids, torch.float32)
    before: Tensor | None = None
    if features is not None:
        documents = [item.document for item in heldout_documents(FeatureReader(features), 0.0)][:STORED]
    else:
        template = Template.load(target)
        asked = [torch.tensor(template.prompt([_user(prompt)]).token_ids) for prompt in prompts]
        before = _common_end(asked)
        decoding = Decoding(new_tokens, eos_token_ids=target.eos_token_ids)
        answers = speculate(decoder, None, asked, Nothing(), decoding)
        documents = [
            decoder.document(prompt, torch.tensor(answer.token_ids), text)
            for prompt, answer, text in zip(asked, answers, prompts, strict=True)
        ]
    head = TargetHead.build(weights.head, weights.norm, target.config["rms_norm_eps"], model.target_ids)
    return Patient(model, documents, decoder.capture, target.config, target_head=head, before_answer=before)


def template_findings(template: Template, prompts: Sequence[str]) -> list[Finding]:
    """A second turn's prompt must begin with the first turn's, or earlier turns are not what was served."""
    for prompt in prompts:
        first = template.prompt([_user(prompt)]).token_ids
        answered = [_user(prompt), {"role": "assistant", "content": "Yes."}, _user("Go on.")]
        second = template.prompt(answered).token_ids
        if second[: len(first)] != first:
            same = next(i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
            text = f"a second turn's prompt leaves the first's at token {same} of {len(first)}"
            return [Finding("template-round-trip", text, "train on single turns, or name another template")]
    return []


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _common_end(prompts: Sequence[Tensor]) -> Tensor | None:
    """The token ids that all prompts end with: the template's own; None where there is but one prompt."""
    if len(prompts) < 2:
        return None
    shortest = min(len(prompt) for prompt in prompts)
    ends = torch.stack([prompt[-shortest:] for prompt in prompts])
    same = (ends == ends[0]).all(0).flip(0).long().cumprod(0).sum()
    return prompts[0][len(prompts[0]) - int(same) :]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks.examine_draft", description=__doc__)
    parser.add_argument("recipe", help="name or path of the recipe, for its target")
    parser.add_argument("--draft", type=Path, required=True, help="folder of model.safetensors, config.json")
    parser.add_argument("--features", type=Path, help="a features artifact's folder, instead of prompts")
    parser.add_argument("--prompt", action="append", help="a question for the target; may be given again")
    parser.add_argument("--new-tokens", type=int, default=64, help="length of the answers to prompts")
    options = parser.parse_args(argv)
    target = prepare_target(load_recipe(options.recipe))
    prompts = options.prompt or PROMPTS
    try:
        found = findings_of(options.draft, target, prompts, options.features, options.new_tokens)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for finding in found:
        print(f"{finding.name}: {finding.text}. Remedy: {finding.remedy}.")
    if not found:
        print("nothing found: files, data, cache and readings are as they should be")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
