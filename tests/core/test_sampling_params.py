"""Any value of any field makes parameters that work, or a RequestError that names the field."""

import numpy as np
import pytest

from leadframe import SamplingParams
from leadframe.errors import RequestError
from leadframe.sampling_params import FIELD_NAMES

NAN, INF = float("nan"), float("inf")
HUGE = 10**6000
NONSENSE = (
    None, True, 0, 1, -1, 2, 1.5, 2**31, 2**63, 10**400, HUGE, -HUGE, 1e300, 1e-320, NAN, INF, -INF,
    "", "q", "\ud800", b"q", [], [1], [-1], [HUGE], [NAN], [None], [True], ["q"], [""], ["\ud800"],
    [[1]], [[]], [[HUGE]], [["q"]], (1, 2), {}, {1: 1.0}, {1: HUGE}, {HUGE: 1}, {HUGE: HUGE},
    {1: NAN}, {1: None}, {"1": 1}, {"q": 1}, {None: 1}, {-1: 1}, {1.0: 1}, {320: 1}, {1}, object(),
    range(3), [0] * 2000, dict.fromkeys(range(2000), 1), np.array([1, 2]), np.array([]),
    np.float32(1), np.int64(1),
)  # fmt: skip
PARAM = {"bad_words_ids": "bad_words"}


@pytest.fixture(scope="module")
def llm(tiny_model):
    """One engine for the whole file: a bad request must leave it as it was."""
    from leadframe import LLM

    with LLM(str(tiny_model), device="reference", num_blocks_override=64, block_size=4) as llm:
        yield llm


def attempt(llm, fields):
    """Generates with the given fields; None, or the error's field."""
    fields = {"max_tokens": 2} | fields
    try:
        llm.generate([[1, 2, 3]], SamplingParams(**fields))
    except RequestError as error:
        return error.param, str(error)
    return None


@pytest.mark.parametrize("field", FIELD_NAMES)
def test_any_value_of_a_field_works_or_is_refused_by_name(llm, field):
    for value in NONSENSE:
        if field == "max_tokens" and value is None:
            continue
        refusal = attempt(llm, {field: value})
        if refusal is not None:
            allowed = {PARAM.get(field, field), *(("min_tokens",) if field == "max_tokens" else ())}
            assert refusal[0] in allowed, (value if value is not HUGE else "huge", refusal)
            assert len(refusal[1]) < 300
    assert attempt(llm, {"temperature": 0.0}) is None
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("field", "same"),
    [("stop", ()), ("stop_token_ids", ()), ("bad_words_ids", ()), ("logit_bias", {})],
)
def test_none_asks_for_nothing(field, same):
    assert SamplingParams(**{field: None}) == SamplingParams(**{field: same}) == SamplingParams()


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="ab").stop == ("ab",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": NAN}, r"temperature is nan; it must be a number in \[0, 2\]"),
        ({"temperature": 10**400}, r"temperature is 1000.*\.\.\.; it must be a number"),
        ({"top_k": HUGE}, "top_k is a int with a very large integer; it must be 0 or -1"),
        ({"stop": 5}, "stop is 5; it must be a list of at most 16 non-empty strings"),
        ({"stop": {"a"}}, "stop is .*; it must be a list"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
        ({"logit_bias": [1]}, "logit_bias is .1.; it must be a mapping"),
        ({"logit_bias": {7: 101}}, r"logit_bias is \{7: 101\}; it must be made of numbers"),
        ({"bad_words_ids": [3]}, "bad_words is 3; it must be a list of 1 to 1024 token ids"),
        ({"allowed_token_ids": []}, "it must be a list of 1 to 1024 token ids"),
    ],
)
def test_what_failed_the_value_and_the_limit(fields, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**fields)
    assert caught.value.param in {*fields, *(PARAM.get(name) for name in fields)}


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], 5, "greedy", [None]])
def test_what_are_no_parameters_is_refused(llm, params):
    with pytest.raises(RequestError, match=r"params is .*; it must be a SamplingParams"):
        llm.generate(["a"], params)
