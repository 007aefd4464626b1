"""Logit edits against a plain definition over the whole vocabulary."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadframe.runner.logit_edits import LogitEdits

VOCAB = 12


@pytest.fixture
def make(policy):
    return policy.make_request


def apply(request, logits):
    """What the device does with the edits of a request."""
    edits = LogitEdits(request)
    ids, scale, add = edits.current()
    assert len(set(ids.tolist())) == len(ids), "a token has one edit"
    values = np.array(logits, np.float64)
    edited = values[ids]
    edited = np.where(edited > 0, edited / scale, edited * scale) + add
    if edits.keep_only:
        values[:] = -np.inf
    values[ids] = edited
    return values


def plain(request, logits):
    """The definition, token by token."""
    params, output = request.params, request.output_token_ids
    known = request.prompt_token_ids + output
    banned = set(request.stop_ids) if len(output) < params.min_tokens else set()
    for words in params.bad_words_ids:
        head = list(words[:-1])
        if len(known) >= len(head) and known[len(known) - len(head) :] == head:
            banned.add(words[-1])
    allowed = set(range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids)
    if params.allowed_token_ids is not None and allowed <= banned:
        banned = set()
    values = []
    for token in range(VOCAB):
        value = float(logits[token])
        if token in known and params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value += params.logit_bias.get(token, 0.0)
        value -= params.presence_penalty * (token in output)
        value -= params.frequency_penalty * output.count(token)
        if token in banned or token not in allowed:
            value = -math.inf
        values.append(value)
    return np.array(values)


tokens = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([0.0, 0.0, -1.5, 0.75])
cases = st.fixed_dictionaries(
    {
        "presence_penalty": penalties,
        "frequency_penalty": penalties,
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.5, 2.0]),
        "min_tokens": st.integers(0, 4),
        "stop_ids": st.lists(tokens, max_size=3).map(tuple),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, 3.0]), max_size=3),
        "allowed_token_ids": st.none() | st.lists(tokens, min_size=1, max_size=4).map(tuple),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3),
    }
)
LOGITS = np.linspace(-3, 4, VOCAB)


@settings(max_examples=300)
@given(
    case=cases,
    prompt=st.lists(tokens, min_size=1, max_size=6),
    output=st.lists(tokens, max_size=6),
)
def test_edits_are_the_plain_definition(policy, case, prompt, output):
    request = policy.make_request(prompt, 20, **case)
    request.output_token_ids += output
    np.testing.assert_allclose(apply(request, LOGITS), plain(request, LOGITS), rtol=1e-6)
    if not LogitEdits.are_needed(request):
        np.testing.assert_array_equal(plain(request, LOGITS), LOGITS)


@settings(max_examples=100)
@given(case=cases, output=st.lists(tokens, min_size=1, max_size=8), again=st.booleans())
def test_edits_follow_the_output_token_by_token(policy, case, output, again):
    """State that is carried along equals state that is built anew, as after a preemption."""
    request = policy.make_request([1, 2], 20, **case)
    carried = LogitEdits(request)
    for token in output:
        carried.current()
        request.output_token_ids.append(token)
        if again:  # a step that is built twice
            carried.current()
    as_map = [
        {t: (s, a) for t, s, a in zip(*(x.tolist() for x in e.current()), strict=True)}
        for e in (carried, LogitEdits(request))
    ]
    assert as_map[0] == as_map[1]


@pytest.mark.parametrize(
    ("kwargs", "needed"),
    [
        ({}, False),
        ({"min_tokens": 2}, False),  # nothing to hold back
        ({"stop_ids": (3,)}, False),
        ({"min_tokens": 2, "stop_ids": (3,)}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"allowed_token_ids": [3]}, True),
        ({"bad_words_ids": [[3]]}, True),
    ],
)
def test_which_requests_need_edits(make, kwargs, needed):
    assert LogitEdits.are_needed(make([1], 9, **kwargs)) == needed


def test_nothing_is_edited_once_min_tokens_are_there(make):
    request = make([1], 9, min_tokens=1, stop_ids=(3,))
    edits = LogitEdits(request)
    assert edits.current()[0].tolist() == [3]
    request.output_token_ids.append(5)
    assert edits.current()[0].tolist() == []


def test_bans_yield_when_they_would_leave_nothing(make):
    request = make([1], 9, min_tokens=5, stop_ids=(3,), allowed_token_ids=[3])
    ids, _, add = LogitEdits(request).current()
    assert ids.tolist() == [3]
    assert add.tolist() == [0.0]


def test_bad_words_reach_back_into_the_prompt(make):
    request = make([4, 5], 9, bad_words_ids=[[4, 5, 6], [7, 8]])
    ids, _, add = LogitEdits(request).current()
    assert (ids.tolist(), add.tolist()) == ([6], [-math.inf])


def test_a_step_rebuilds_nothing_for_penalties(make):
    """With hundreds of running requests, a few arrays made for each row are milliseconds a step."""
    request = make([1, 2], repetition_penalty=1.2, frequency_penalty=0.5)
    edits = LogitEdits(request)
    before = edits.current()
    request.output_token_ids.append(3)
    after = edits.current()
    assert all(np.shares_memory(a, b) for a, b in zip(before, after, strict=True))
    assert after[0].tolist() == [1, 2, 3]
    assert after[2].tolist() == [0.0, 0.0, -0.5]
