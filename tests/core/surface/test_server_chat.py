"""POST /v1/chat/completions, /tokenize and /detokenize."""

import json

import pytest


def test_the_reply_has_openais_shape(world):
    reply = world.chat("hi", model="scripted").json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == 14


def prompt_of(world, scripted, **body):
    ids = world.post("/v1/chat/completions", {**body, "return_token_ids": True}).json()
    return scripted.TOKENIZER.decode(ids["prompt_token_ids"], skip_special_tokens=False)


def test_the_template_writes_bos_once(world, scripted):
    text = prompt_of(world, scripted, messages=[{"role": "user", "content": "hi"}])
    assert text == "<s>[user]hi[assistant]"


def test_roles_and_parts_reach_the_template(world, scripted):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [
            {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None},
        {"role": "user", "content": "four"},
    ]  # fmt: skip
    text = prompt_of(world, scripted, messages=messages)
    assert text == "<s>[system]be brief[user]one\ntwo[assistant]three[user]four[assistant]"
    open_end = prompt_of(world, scripted, messages=messages, add_generation_prompt=False)
    assert open_end == text.removesuffix("[assistant]")


def test_unset_max_tokens_fills_the_context(start, scripted):
    world = start(scripted.echoes, max_model_len=40)
    reply = world.chat("hi").json()
    assert reply["usage"]["total_tokens"] == 40
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_limit_the_output(world, field):
    assert world.chat(**{field: 3}).json()["usage"]["completion_tokens"] == 3


def test_the_new_name_wins(world):
    reply = world.chat(max_tokens=5, max_completion_tokens=2).json()
    assert reply["usage"]["completion_tokens"] == 2


def test_logprobs_have_the_chat_shape(start, scripted):
    world = start(scripted.says("é"))
    content = world.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    first = content[0]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xC3], -0.25)
    assert len(first["top_logprobs"]) == 2
    assert set(first["top_logprobs"][0]) == {"token", "bytes", "logprob"}
    assert bytes(b for item in content[:2] for b in item["bytes"]).decode() == "é"
    bare = world.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bare[0]["top_logprobs"] == []


def test_several_choices(world):
    reply = world.chat(n=3, seed=1).json()
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["completion_tokens"] == 42


def test_a_given_template_replaces_the_models(start, scripted):
    template = "{{ messages[0].content }}{{ mood or '' }}"
    world = start(scripted.says("x"), template=template)
    messages = [{"role": "user", "content": "hi"}]
    assert prompt_of(world, scripted, messages=messages) == "hi"
    body = {"messages": messages, "chat_template_kwargs": {"mood": "!"}}
    assert prompt_of(world, scripted, **body) == "hi!"


def test_no_template_names_the_flag(start, scripted, error_of):
    world = start(scripted.says("x"), tokenizer=scripted.make_tokenizer(None))
    error = error_of(world.chat("hi"), 400, "messages")
    assert "--chat-template" in error["message"]
    assert world.complete("hi").status_code == 200


def test_a_template_may_refuse(world, error_of):
    error = error_of(world.chat("refuse me"), 400)
    assert "no such talk" in error["message"]


NEUTRAL = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}


def test_requests_for_nothing_are_accepted(world):
    assert world.chat(**NEUTRAL, modalities=["text"], echo=False).status_code == 200
    assert world.chat(continue_final_message=False, tools=None, tool_choice=None).status_code == 200
    assert world.chat(add_special_tokens=False, include_reasoning=True).status_code == 200
    options = {"include_usage": True, "continuous_usage_stats": False}
    assert world.chat(stream=True, stream_options=options).status_code == 200


@pytest.mark.parametrize("calls", [[], None])
def test_a_reply_without_tool_calls_can_be_sent_back(world, scripted, calls):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "tool_calls": calls, "function_call": None},
    ]
    text = prompt_of(world, scripted, messages=messages)
    assert text == "<s>[user]hi[assistant]yes[assistant]"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("reasoning_effort", "high"),
        ("best_of", True),
        ("echo", True),
    ],
)
def test_what_is_not_served_is_refused_by_name(world, error_of, field, value):
    error = error_of(world.chat(**{field: value}), 400, field)
    assert "not supported" in error["message"]


@pytest.mark.parametrize("kind", ["choice", "grammar", "json", "regex"])
def test_an_old_name_of_structured_outputs_names_the_new_one(world, error_of, kind):
    message = error_of(world.chat(**{f"guided_{kind}": "x"}), 400, f"guided_{kind}")["message"]
    assert f"'structured_outputs', such as {{\"{kind}\": ...}}" in message


@pytest.mark.parametrize(
    ("field", "value", "other_values"),
    [
        ("reasoning_effort", "high", False),
        ("return_tokens_as_token_ids", True, False),
        ("guided_json", {}, False),
        ("truncate_prompt_tokens", 4, False),
        ("best_of", 2, True),
        ("tools", [{"type": "function"}], True),
    ],
)
def test_only_where_a_value_is_served_is_the_value_blamed(
    world, error_of, field, value, other_values
):
    message = error_of(world.chat(**{field: value}), 400, field)["message"]
    assert ("with this value" in message) is other_values
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"role": "tool", "tool_call_id": "1"}, "messages.0.role"),
        ({"role": "function"}, "messages.0.role"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls"),
    ],
)
def test_tool_calling_is_refused_in_so_many_words(world, error_of, extra, param):
    body = {"messages": [{"content": "x", **extra}]}
    error = error_of(world.post("/v1/chat/completions", body), 400, param)
    assert "tool calling is not served" in error["message"]


def test_a_tool_call_is_not_an_empty_reply_in_disguise(world, error_of):
    error = error_of(world.chat(tool_calls=[]), 400, "tool_calls")
    assert "with this value" not in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "messages.0.tool_calls"),
        ("hi", "messages"),
    ],
)
def test_messages_that_do_not_fit_are_refused(world, error_of, messages, param):
    error_of(world.post("/v1/chat/completions", {"messages": messages}), 400, param)


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "tools", "_x", "a b"])
def test_template_variables_cannot_replace_the_template(world, error_of, key):
    error_of(world.chat(chat_template_kwargs={key: "x"}), 400, "chat_template_kwargs")


def test_tokenize_reports_what_generation_uses(world, scripted):
    messages = [{"role": "user", "content": "hi"}]
    used = world.post("/v1/chat/completions", {"messages": messages, "return_token_ids": True})
    reply = world.post("/tokenize", {"messages": messages, "return_token_strs": True}).json()
    assert reply["tokens"] == used.json()["prompt_token_ids"]
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == 256
    assert "".join(reply["token_strs"]) == "<s>[user]hi[assistant]"


def test_detokenize_undoes_tokenize(world):
    text = "née <s> 漢字"
    tokens = world.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert world.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


def test_long_texts_are_tokenised_too(start, scripted):
    world = start(scripted.says("x"), max_model_len=9000, num_blocks=2500)
    long = "ab" * 4000
    assert world.chat(long).json()["usage"]["prompt_tokens"] > 8000
    assert world.complete(long).json()["usage"]["prompt_tokens"] == 8000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    ],
)
def test_bad_bodies_of_the_text_routes(world, error_of, path, body, param):
    error_of(world.post(path, body), 400, param)


def test_odd_characters_survive(world, scripted):
    text = '\u2028 \u0000 \U0001f600 \\ " '
    reply = world.complete(text, echo=True, max_tokens=1)
    assert reply.json()["choices"][0]["text"] == text + "H"
    assert json.loads(reply.content)
