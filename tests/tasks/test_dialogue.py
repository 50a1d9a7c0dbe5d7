"""Turn by turn: what the target is asked, what counts as its own text, and when a dialogue ends."""

from __future__ import annotations

from tasks.engines.dialogue import Dialogue, is_runaway, prompt_messages
from tasks.engines.requests import Finished, Job, Refused, Sample
from tasks.templates import Template
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
    sample = chat.outcome()
    assert isinstance(sample, Sample)
    written = [text(sample.token_ids[start:end]) for start, end in sample.spans]
    assert written == ["mine<|im_end|>", "last<|im_end|>"]
    assert [message["content"] for message in sample.messages] == ["first?", "mine", "second?", "last"]


def test_a_cut_answer_ends_the_dialogue_and_stays_without_an_end_token():
    chat = dialogue("first?", "x", "second?")
    chat.next_request()
    chat.take(Finished("a", ids("and so on"), "length"))
    assert chat.next_request() is None
    sample = chat.outcome()
    assert sample.truncated and sample.finish_reason == "length"
    assert text(sample.token_ids).endswith("and so on")


def test_an_answer_has_no_more_tokens_than_the_sample_has_room_for():
    prompt = len(dialogue("hello").next_request().token_ids)
    assert dialogue("hello", max_tokens=prompt + 3).next_request().max_new_tokens == 3
    refused = dialogue("hello", max_tokens=prompt)
    assert refused.next_request() is None
    assert isinstance(refused.outcome(), Refused) and refused.outcome().reason == "too long"


def test_a_later_turn_that_does_not_fit_leaves_the_earlier_answers():
    chat = dialogue("hi", "x", "word " * 200, max_tokens=100)
    chat.next_request()
    chat.take(Finished("a", [*ids("yes"), EOS], "stop"))
    assert chat.next_request() is None
    assert text(chat.outcome().token_ids).endswith("yes<|im_end|>")


def test_a_server_that_gave_no_answer_is_a_refusal_that_says_so():
    chat = dialogue("hi")
    chat.next_request()
    chat.take(Finished("a", [], "error", error="server: 500"))
    assert chat.next_request() is None
    assert chat.outcome() == Refused("a", "no answer", "server: 500")


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
