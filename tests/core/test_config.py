"""Settings: any value works or is a ConfigError that names flag, value and rule."""

import dataclasses
import pathlib

import pytest

from leadframe import LLM, SamplingParams
from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from leadframe.errors import ConfigError
from leadframe.llm import engine_config
from leadframe.server.settings import ServerConfig

NAN, INF = float("nan"), float("inf")
NONSENSE = (
    None, True, False, 0, 1, -1, 1.5, 2**40, 2**70, 10**400, 10**6000, NAN, INF, -INF, "", "16",
    "auto", b"auto", [], [1], (), (1,), {}, {1: 2}, {"a": 1}, {"a": "b"}, {"a": ("b",)},
    {"a": (1,)}, object(),
)  # fmt: skip
CONFIGS = (EngineConfig, SchedulerConfig, CacheConfig, DeviceConfig, ServerConfig)
SETTINGS = [(config, field.name) for config in CONFIGS for field in dataclasses.fields(config)]


def refusal_of(config, **settings):
    try:
        config(**settings)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("config", "name"), SETTINGS)
def test_any_value_of_a_setting_works_or_is_refused_by_name(config, name):
    flag = name.replace("_", "-").removesuffix("s")
    accepted = []
    for value in NONSENSE:
        refusal = refusal_of(config, **{name: value})
        if refusal:
            assert flag in refusal, refusal
            assert len(refusal) < 300
        else:
            accepted.append(type(value))
    assert len(set(accepted)) <= 3, f"values of many types were accepted: {accepted}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": "16"}, "--block-size is '16'; it must be an integer or None"),
        ({"block_size": True}, "--block-size is True; it must be an integer or None"),
        ({"block_size": 0}, "--block-size is 0; it must be at least 1"),
        ({"max_num_seqs": None}, "--max-num-seqs is None; it must be an integer"),
        ({"max_num_seqs": 10**12}, "--max-num-seqs is 1000000000000; it must be at most 65536"),
        ({"max_num_seqs": 10**6000}, "--max-num-seqs is a very large integer; it must be at most"),
        ({"max_num_seqs": 4.0}, "--max-num-seqs is 4.0; it must be an integer"),
        ({"enforce_eager": 1}, "--enforce-eager is 1; it must be True or False"),
        ({"policy": "best"}, "--policy is 'best'; it must be 'fcfs' or 'priority'"),
        ({"gpu_memory_utilization": NAN}, "--gpu-memory-utilization is nan; it must be in"),
        ({"gpu_memory_utilization": "1"}, "is '1'; it must be a number or None"),
        ({"options": {"a": 1}}, "it must be a mapping of a string to a string"),
        ({"op_order": {"attention": "x"}}, "to a tuple, each entry a string"),
        ({"model": 5}, "--model is 5; it must be a string or None"),
        ({"seed": 2**70}, "--seed is .* it must be at most"),
        ({"scheduler": 5}, "unknown setting 'scheduler'"),
        ({"blocksize": 16}, "unknown setting 'blocksize'; did you mean 'block_size'"),
        ({"tensor_parallel": 2}, "did you mean 'tensor_parallel_size'"),
    ],
)
def test_what_failed_the_value_and_the_limit(settings, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**settings)


def test_sections_must_be_sections():
    with pytest.raises(ConfigError, match="it must be a SchedulerConfig"):
        EngineConfig(scheduler={"max_num_seqs": 3})


def test_a_path_is_a_model():
    assert engine_config(pathlib.Path("a/b")).model == "a/b"


def test_the_seed_of_the_engine_fixes_requests_that_bring_none(tiny_llm):
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def draw(seed):
        return [c.token_ids for c in tiny_llm(seed=seed).generate(["a", "a"], params)]

    first = draw(7)
    assert draw(7) == first
    assert draw(8) != first
    assert first[0] != first[1]
    assert draw(None) != draw(None)
