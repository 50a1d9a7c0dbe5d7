"""The viewer: what is learnt is what is coloured, and nothing of the sample is lost in the painting."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from tasks.view_sample import SUPERVISED, Shown, paint
from tests.tasks.chat_families import family_template

MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "more 🙂"},
    {"role": "assistant", "content": "no"},
]


def test_learnt_tokens_stand_between_the_marks_and_the_text_is_whole():
    template = family_template("qwen2.5")
    rendered = template.conversation(MESSAGES)
    text = paint(Shown("x", rendered.token_ids, rendered.spans), template.decode, colour=False)
    head, body = text.split("\n", 1)
    assert f"{len(rendered.token_ids)} tokens, {rendered.supervised} learnt" in head
    assert "⟦Hi there<|im_end|>⟧" in body and "⟦no<|im_end|>⟧" in body
    assert body.replace("⟦", "").replace("⟧", "") == template.decode(rendered.token_ids)


def test_colour_and_token_bars():
    template = family_template("qwen2.5")
    rendered = template.conversation(MESSAGES)
    text = paint(Shown("x", rendered.token_ids, rendered.spans), template.decode, tokens=True)
    assert text.count(SUPERVISED) == 2
    start, end = rendered.spans[-1]
    assert "│".join(template.decode([token]) for token in rendered.token_ids[start:end]) in text


def test_it_prints_a_stores_samples_and_says_in_one_line_what_is_not_there(tmp_path: Path):
    import typer
    import yaml

    from storage.artifacts import ArtifactStore
    from tasks import prepare_conversations
    from tasks.prepare_target import prepare_target
    from tasks.recipe import load_recipe
    from tasks.view_sample import main
    from tests.tiny_target import make_tiny_target

    rows = "\n".join(f'{{"prompt": "question number {i} of some"}}' for i in range(9))
    (tmp_path / "p.jsonl").write_text(rows)
    recipe = {
        "name": "tiny",
        "target": {"model": str(make_tiny_target(tmp_path / "target")), "dtype": "float32"},
        "data": {"sources": [{"kind": "prompts", "uri": str(tmp_path / "p.jsonl")}], "heldout": 2},
        "store": {"uri": str(tmp_path / "store")},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(str(tmp_path / "tiny.yaml"))
    prepare_conversations.run(loaded, prepare_target(loaded), ArtifactStore(loaded.store.uri))

    app = typer.Typer()
    app.command()(main)
    shown = CliRunner().invoke(
        app, [loaded_path := str(tmp_path / "tiny.yaml"), "--kind", "conversations", "--split", "heldout"]
    )
    assert shown.exit_code == 0 and shown.output.count("── ") == 2 and "question number" in shown.output
    missing = CliRunner().invoke(app, [loaded_path])
    assert missing.exit_code == 1
