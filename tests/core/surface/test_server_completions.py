"""POST /v1/completions: forms of the prompt, shapes of the reply, sampling fields."""

import pytest


def test_the_reply_has_openais_shape(world):
    reply = world.complete("hi", model="scripted").json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "scripted"
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "Hello, world!",
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 14,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [
        ("abc", [3]),
        (["a", "bc"], [1, 2]),
        ([1, 2, 3, 4], [4]),
        ([[1], [2, 3]], [1, 2]),
    ],
)
def test_a_prompt_has_four_forms(world, prompt, counts):
    reply = world.complete(prompt, max_tokens=2, return_token_ids=True).json()
    assert [len(c["prompt_token_ids"]) for c in reply["choices"]] == counts
    assert [c["index"] for c in reply["choices"]] == list(range(len(counts)))
    assert all(c["text"] == "He" for c in reply["choices"])
    assert all(c["finish_reason"] == "length" for c in reply["choices"])
    assert reply["usage"]["prompt_tokens"] == sum(counts)
    assert reply["usage"]["completion_tokens"] == 2 * len(counts)


def test_choices_of_one_prompt_count_it_once(world):
    reply = world.complete(["ab", "cde"], n=3, max_tokens=1).json()
    assert len(reply["choices"]) == 6
    assert reply["usage"]["prompt_tokens"] == 5
    assert reply["usage"]["completion_tokens"] == 6


def test_max_tokens_is_16_unless_given(start, scripted):
    world = start(scripted.echoes)
    reply = world.complete("abc").json()
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["finish_reason"] == "length"


def test_cached_tokens_are_counted(start, scripted):
    world = start(scripted.says("x"))
    world.complete("12345678")
    usage = world.complete("12345678").json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    salted = world.complete("12345678", cache_salt="other").json()["usage"]
    assert salted["prompt_tokens_details"] == {"cached_tokens": 0}


def test_stop_string_ends_the_text_before_it(world):
    choice = world.complete(stop=[", w"]).json()["choices"][0]
    assert choice["text"] == "Hello"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ", w"
    included = world.complete(stop=", w", include_stop_str_in_output=True).json()["choices"][0]
    assert included["text"] == "Hello, w"


def test_stop_token_id_ends_the_text(world, scripted):
    (comma,) = scripted.ids_of(",")
    choice = world.complete(stop_token_ids=[comma]).json()["choices"][0]
    assert choice["text"] == "Hello,"
    assert choice["stop_reason"] == comma


def test_echo_puts_the_prompt_before_the_text(world, scripted):
    assert world.complete("Say: ", echo=True).json()["choices"][0]["text"] == "Say: Hello, world!"
    ids = scripted.ids_of("née ")
    reply = world.complete(ids, echo=True, max_tokens=3).json()
    assert reply["choices"][0]["text"] == "née Hel"


def test_echo_without_tokens_scores_the_prompt(world):
    body = {"prompt": [1, 2, 3], "echo": True, "logprobs": 1, "max_tokens": 0}
    reply = world.post("/v1/completions", body).json()
    choice = reply["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert choice["text"] == "".join(logprobs["tokens"])
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [1, 1]
    assert logprobs["text_offset"] == [0, 1, 2]


def test_echo_without_tokens_needs_no_logprobs(world):
    reply = world.complete("abc", echo=True, max_tokens=0).json()
    assert reply["choices"][0]["text"] == "abc"
    assert reply["choices"][0]["logprobs"] is None


def test_echoed_logprobs_continue_into_the_output(world):
    reply = world.complete("ab", echo=True, logprobs=0, max_tokens=2).json()
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "H", "e"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


def test_offsets_count_whole_characters(start, scripted):
    world = start(scripted.says("aé€!"))
    logprobs = world.complete(logprobs=2).json()["choices"][0]["logprobs"]
    #                                      a  é(2)  €(3)     !  eos
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4]
    assert len(logprobs["top_logprobs"][0]) == 2
    assert logprobs["top_logprobs"][0][logprobs["tokens"][0]] == -0.25


def test_prompt_logprobs_are_keyed_by_token(world):
    choice = world.complete([5, 6], prompt_logprobs=2, max_tokens=1).json()["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert set(second) == {"6", "7"}
    assert second["6"] == {"logprob": -0.25, "rank": 1, "decoded_token": "'"}


def test_return_token_ids(world, scripted):
    choice = world.complete("hi", return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == scripted.ids_of("hi")
    assert choice["token_ids"] == [*scripted.ids_of("Hello, world!"), scripted.EOS]


def test_sampling_fields_reach_the_engine(start, scripted):
    seen = []

    def script(request, position):
        seen.append(request)
        return scripted.EOS

    world = start(script, policy="priority", server={"accept_priority": True})
    body = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 11, "max_tokens": 9,
        "min_tokens": 1, "stop": ["x"], "stop_token_ids": [3], "include_stop_str_in_output": True,
        "ignore_eos": False, "skip_special_tokens": False, "logit_bias": {"4": 2},
        "allowed_token_ids": [1, 2], "logprobs": 3,
    }  # fmt: skip
    assert world.complete(**body, priority=-2, cache_salt="s").status_code == 200
    params = seen[0].params
    for name, value in body.items():
        got = getattr(params, name)
        got = {str(k): v for k, v in got.items()} if name == "logit_bias" else got
        assert got == value or list(got) == value, name
    assert (seen[0].priority, seen[0].cache_salt) == (-2, "s")


def test_each_choice_has_a_seed_of_its_own(start, scripted):
    seeds = []

    def script(request, position):
        seeds.append(request.params.seed)
        return scripted.EOS

    world = start(script)
    world.complete(n=3, seed=2**63 - 2)
    assert sorted(seeds) == [-(2**63), 2**63 - 2, 2**63 - 1]


def test_bad_words_are_banned_with_and_without_a_space(start, scripted):
    seen = []

    def script(request, position):
        seen.append(request.params.bad_words_ids)
        return scripted.EOS

    world = start(script)
    world.complete(bad_words=["no", " way"])
    expected = [scripted.ids_of(text) for text in ("no", " no", " way")]
    assert [list(ids) for ids in seen[0]] == expected


def test_model_defaults_are_used_only_when_asked_for(start, scripted):
    from leadframe.models.info import GenerationDefaults

    seen = []

    def script(request, position):
        seen.append((request.params.temperature, request.params.top_k))
        return scripted.EOS

    generation = GenerationDefaults(temperature=0.25, top_k=3)
    for source in ("none", "model"):
        world = start(script, generation=generation, server={"generation_config": source})
        world.complete()
        world.complete(temperature=0.75)
    assert seen == [(1.0, 0), (0.75, 0), (0.25, 3), (0.75, 3)]


def test_special_tokens_are_added_once_and_reported_the_same(start, scripted):
    world = start(scripted.says("x"))
    ids = world.complete("<s>a", return_token_ids=True).json()["choices"][0]["prompt_token_ids"]
    tokenized = world.post("/tokenize", {"prompt": "<s>a"}).json()["tokens"]
    assert ids == tokenized == [scripted.BOS, *scripted.ids_of("a")]


def test_fields_that_change_nothing_are_accepted(world):
    body = {
        "user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto",
        "parallel_tool_calls": False, "best_of": 1, "suffix": None, "safety_identifier": "x",
    }  # fmt: skip
    assert world.complete(**body).status_code == 200
