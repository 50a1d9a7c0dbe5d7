"""Turn by turn: what the target is asked, what counts as its own text, and when a dialogue ends."""

from __future__ import annotations

from tasks.engines.dialogue import Dialogue, is_runaway, prompt_messages
from tasks.engines.requests import Finished, Job, Refused, Sample
from tasks.templates import Template
from tests.tasks.chat_families import family_template
from tests.tiny_target import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
EOS = TOKENIZER.eos_token_id or TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TEMPLATE = Template(TOKENIZER, (EOS,))


def text(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def ids(words: str) -> list[int]:
    return TOKENIZER(words, add_special_tokens=False).input_ids


def dialogue(*turns: str, max_tokens: int = 400, **job) -> Dialogue:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return Dialogue(Job("a", 0, messages, max_new_tokens=20, **job), TEMPLATE, max_tokens)


def test_each_turn_sees_the_targets_own_answers_and_never_the_datas():
    chat = dialogue("first?", "WRONG", "second?")
    first = chat.next_request()
    assert text(first.token_ids).count("first?") == 1 and "WRONG" not in text(first.token_ids)
    chat.take(Finished("a", [*ids("mine"), EOS], "stop"))
    second = chat.next_request()
    assert "WRONG" not in text(second.token_ids)
    assert text(second.token_ids).index("mine") < text(second.token_ids).index("second?")
    chat.take(Finished("a", [*ids("last"), EOS], "stop"))
    assert chat.next_request() is None
    (sample,) = chat.outcome().samples
    written = [text(sample.token_ids[start:end]) for start, end in sample.spans]
    assert written == ["mine<|im_end|>", "last<|im_end|>"]
    assert [message["content"] for message in sample.messages] == ["first?", "mine", "second?", "last"]


def test_a_cut_answer_ends_the_dialogue_and_stays_without_an_end_token():
    chat = dialogue("first?", "x", "second?")
    chat.next_request()
    chat.take(Finished("a", ids("and so on"), "length"))
    assert chat.next_request() is None
    (sample,) = chat.outcome().samples
    assert sample.truncated and sample.finish_reason == "length"
    assert text(sample.token_ids).endswith("and so on")


def test_an_answer_has_no_more_tokens_than_the_sample_has_room_for():
    prompt = len(dialogue("hello").next_request().token_ids)
    assert dialogue("hello", max_tokens=prompt + 3).next_request().max_new_tokens == 3
    refused = dialogue("hello", max_tokens=prompt)
    assert refused.next_request() is None
    assert refused.outcome().samples == () and refused.outcome().refused.reason == "too long"


def test_a_later_turn_that_does_not_fit_leaves_the_earlier_answers_and_is_counted():
    chat = dialogue("hi", "x", "word " * 200, max_tokens=100)
    chat.next_request()
    chat.take(Finished("a", [*ids("yes"), EOS], "stop"))
    assert chat.next_request() is None
    (sample,) = chat.outcome().samples
    assert text(sample.token_ids).endswith("yes<|im_end|>")
    assert chat.outcome().refused.reason == "later turn: too long"


def test_a_server_that_gave_no_answer_is_a_refusal_that_says_so():
    chat = dialogue("hi")
    chat.next_request()
    chat.take(Finished("a", [], "error", error="server: 500"))
    assert chat.next_request() is None
    assert chat.outcome().samples == ()
    assert chat.outcome().refused == Refused("a", "no answer", "server: 500")


def qwen3(*answers: str, every_turn: bool = True) -> tuple[list[Sample], list[str], Template]:
    """A dialogue of so many turns under a template that drops earlier thinking; the prompts asked on the way."""
    template = family_template("qwen3")
    asked = [{"role": role, "content": f"{role} {i}"} for i in range(len(answers)) for role in ("user", "assistant")]
    chat = Dialogue(Job("a", 0, asked, max_new_tokens=90, every_turn=every_turn), template, 900)
    prompts = []
    for answer in answers:
        prompts.append(list(chat.next_request().token_ids))
        written = template.tokenizer(answer, add_special_tokens=False).input_ids
        chat.take(Finished("a", [*written, template.end_ids[0]], "stop"))
    assert chat.next_request() is None
    return list(chat.outcome().samples), prompts, template


def test_turns_that_a_later_prompt_rewrites_are_samples_of_their_own_exactly_as_the_server_saw_them():
    samples, prompts, template = qwen3("<think>\nhm\n</think>\n\none", "two", "three")
    # The thought goes from turn 1 when turn 2 is asked; turn 2 stands in turn 3's prompt as it was written.
    assert [sample.id for sample in samples] == ["a#1", "a"]
    first, last = samples
    assert first.token_ids[: len(prompts[0])] == prompts[0]
    assert last.token_ids[: len(prompts[2])] == prompts[2]
    decoded = [[template.decode(each.token_ids[s:e]) for s, e in each.spans] for each in samples]
    assert decoded == [["<think>\nhm\n</think>\n\none<|im_end|>"], ["two<|im_end|>", "three<|im_end|>"]]
    assert [message["content"] for message in first.messages] == ["user 0", "<think>\nhm\n</think>\n\none"]
    assert "hm" not in template.decode(last.token_ids)


def test_a_held_out_dialogue_is_measured_on_its_last_sample_alone():
    samples, prompts, _ = qwen3("<think>\nhm\n</think>\n\none", "two", every_turn=False)
    assert [sample.id for sample in samples] == ["a"]
    assert samples[0].spans == [(len(prompts[1]), len(samples[0].token_ids))]


def test_an_answer_with_other_tokens_than_its_text_has_is_not_taken_from_the_next_prompt():
    chat = dialogue("first?", "x", "second?")
    chat.next_request()
    letters = [token for letter in "mine" for token in ids(letter)]
    assert letters != ids("mine")
    chat.take(Finished("a", [*letters, EOS], "stop"))
    chat.next_request()
    chat.take(Finished("a", [*ids("last"), EOS], "stop"))
    assert chat.next_request() is None
    first, last = chat.outcome().samples
    (start, end), = first.spans
    assert first.token_ids[start:end] == [*letters, EOS] and len(last.spans) == 1


def test_turns_of_one_job_have_seeds_of_their_own_that_repeat():
    def seeds():
        chat = dialogue("first?", "x", "second?", seed=5)
        first = chat.next_request().seed
        chat.take(Finished("a", [*ids("mine"), EOS], "stop"))
        return first, chat.next_request().seed

    assert seeds() == seeds()
    assert len(set(seeds())) == 2


def test_only_the_first_turns_are_asked():
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": "x"} for role in roles]
    assert prompt_messages(messages, 1) == messages[:3]
    assert prompt_messages(messages, 2) == messages


def test_runaway_text_is_told_from_text_that_merely_repeats_itself_once():
    assert is_runaway([7] * 60)
    assert is_runaway([1, 2, 3, 4, 5] * 12)
    assert not is_runaway(list(range(60)))
    assert not is_runaway([*range(40), 9, 9, 9, 9])
    assert not is_runaway([7] * 20)
