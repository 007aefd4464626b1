"""The simulated device does to software what silicon does."""

import time

import numpy as np
import pytest

from leadframe import SamplingParams
from leadframe.conformance.batches import BatchSpec, Row, make_batch
from leadframe.errors import BackendBug, ConfigError, DeviceLost, DeviceNotFound, DeviceOOM
from leadframe.platform import KVLayerSpec, KVSpec, PlatformError, create_backend, select_device
from leadframe_sim.backend import SimBackend
from leadframe_sim.device import SimDevice

SPEC = KVSpec((KVLayerSpec(1, 8),), 16)
BATCH = make_batch(BatchSpec((Row(1, 1, (1,)),), 16, 1))


def backend(graph="record", **device):
    return SimBackend(SimDevice(total=1 << 24, **device), graph)


def test_the_host_sees_poison_until_it_waits():
    sim = backend()
    x = sim.upload(np.ones(4, np.float32))
    y = x + x
    assert np.isnan(np.asarray(y)).all()
    np.testing.assert_array_equal(sim.download(y), [2, 2, 2, 2])
    np.testing.assert_array_equal(np.asarray(y), [2, 2, 2, 2])


def test_memory_is_an_address_space_with_a_limit():
    sim = backend()
    x = sim.upload(np.zeros(1024, np.float32))
    assert sim.memory().used == 4096
    y = sim.upload(np.zeros(1024, np.float32))
    assert y.address != x.address
    del x
    assert sim.memory().used == 4096
    with pytest.raises(DeviceOOM):
        sim.upload(np.zeros(1 << 23, np.float32))


def test_kv_that_was_freed_is_gone():
    sim = backend()
    kv = sim.kv_alloc(SPEC, 4)
    sim.kv_free(kv)
    with pytest.raises(ValueError, match="freed or donated"):
        sim.kv_read(kv[0], [0])


def _double(weights, kv, arrays):
    return {"y": weights["x"] + weights["x"]}, kv


def _touch(weights, kv, arrays):
    return {}, [layer + 1.0 for layer in kv]


def test_a_recording_has_its_addresses_baked_in():
    sim = backend()
    kv = sim.kv_alloc(SPEC, 4)
    step = sim.compile(_double, BATCH.bucket, {"x": sim.upload(np.ones(2, np.float32))}, kv)
    first, kv = step.run(BATCH, kv)
    second, kv = step.run(BATCH, kv)
    assert first["y"].address == second["y"].address
    with pytest.raises(PlatformError, match="moved"):
        step.run(BATCH, sim.kv_alloc(SPEC, 4))


def test_a_recording_does_not_call_the_step_again():
    sim, calls = backend(), []

    def step(weights, kv, arrays):
        calls.append(1)
        return {}, kv

    kv = sim.kv_alloc(SPEC, 4)
    compiled = sim.compile(step, BATCH.bucket, {}, kv)
    for _ in range(3):
        compiled.run(BATCH, kv)
    assert len(calls) == 1
    uncaptured = sim.compile(step, BATCH.bucket, {}, kv, capture=False)
    uncaptured.run(BATCH, kv)
    assert len(calls) == 2


def test_an_executable_kills_what_was_donated():
    sim = backend("compile")
    kv = sim.kv_alloc(SPEC, 4)
    step = sim.compile(_touch, BATCH.bucket, {}, kv)
    _, new = step.run(BATCH, kv)
    np.testing.assert_array_equal(sim.kv_read(new[0], [1]), np.ones((1, 2, 16, 1, 8)))
    with pytest.raises(ValueError, match="freed or donated"):
        sim.kv_read(kv[0], [1])
    _, newer = step.run(BATCH, new)
    np.testing.assert_array_equal(sim.kv_read(newer[0], [1]), np.full((1, 2, 16, 1, 8), 2.0))


def test_an_executable_takes_only_its_bucket():
    sim = backend("compile")
    kv = sim.kv_alloc(SPEC, 4)
    step = sim.compile(_touch, BATCH.bucket, {}, kv)
    other = make_batch(BatchSpec((Row(2, 2, (1,)),), 16, 0))
    with pytest.raises(PlatformError, match="the batch is for"):
        step.run(other, kv)


def test_kernels_take_the_time_that_they_are_given():
    sim = backend("none", latency=0.01)
    x = sim.upload(np.ones(2, np.float32))
    started = time.monotonic()
    y = x + x + x + x
    assert time.monotonic() - started < 0.01
    sim.download(y)
    assert time.monotonic() - started > 0.01


@pytest.mark.parametrize(
    ("kind", "error"), [("oom", DeviceOOM), ("lost", DeviceLost), ("bug", BackendBug)]
)
def test_failure_switches(kind, error):
    sim = create_backend(select_device("sim:nograph", {}), {"fail": f"{kind}@5"})
    weights = {"x": sim.upload(np.ones(2, np.float32))}
    kv = sim.kv_alloc(SPEC, 2)
    step = sim.compile(_double, BATCH.bucket, weights, kv)
    with pytest.raises(error):
        step.run(BATCH, kv)
    outputs, _ = step.run(BATCH, kv)  # it fails once
    np.testing.assert_array_equal(sim.download(outputs["y"]), [2, 2])


@pytest.mark.parametrize("text", ["oom", "fire@3", "oom@x"])
def test_a_bad_switch_is_refused(text):
    with pytest.raises(ConfigError, match="oom@N, lost@N or bug@N"):
        create_backend(select_device("sim", {}), {"fail": text})


def test_the_device_can_be_absent():
    with pytest.raises(DeviceNotFound, match="LEADFRAME_SIM_ABSENT"):
        select_device("sim", {"LEADFRAME_SIM_ABSENT": "1"})


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WAYS = [
    GREEDY,
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True, repetition_penalty=1.4, min_p=0.01),
    SamplingParams(seed=2, max_tokens=12, top_k=9, structured_outputs={"regex": "(ab|c[de]){20}"}),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, logit_bias={3: 2.0}),
]
PROMPTS = ["the quick brown fox", "a", "jumps over", "lazy dogs sleep all day long"]


def _tokens(llm, params=GREEDY):
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("device", ["sim", "sim:compile", "sim:nograph"])
def test_the_engine_serves_the_same_tokens_as_on_the_reference(tiny_llm, device):
    want = _tokens(tiny_llm(block_size=16))
    limits = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    got = _tokens(tiny_llm(device=device, max_model_len=64, **limits))
    assert got == want


def test_steps_that_are_recorded_whole_change_no_token_and_are_counted(tiny_llm):
    want = [_tokens(tiny_llm(block_size=16), params) for params in (WAYS, WAYS[::-1])]
    limits = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    llm = tiny_llm(device="sim", max_model_len=64, **limits)
    late = llm.engine.metrics.late_compiles
    assert [_tokens(llm, params) for params in (WAYS, WAYS[::-1])] == want
    counted = late.value
    assert counted > 0
    assert _tokens(llm, WAYS) == want[0]
    assert late.value == counted
    _tokens(llm)
    assert late.value == counted, "greedy decodes are ready at start-up"


def test_steps_made_while_serving_give_way_when_memory_runs_out(tiny_llm, caplog):
    limits = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    limits |= {"max_model_len": 64, "num_blocks_override": 32}
    roomy = tiny_llm(device="sim", **limits)
    used = roomy.engine.parts.backend.memory().used
    want = [_tokens(roomy, params) for params in (WAYS, WAYS[::-1])]
    late = [step.bytes for step in roomy.engine.parts.runner._late.values()]
    room = 2 * max(late)
    assert sum(late) > room
    tight = tiny_llm(device="sim", options={"memory_bytes": str(used + room)}, **limits)
    assert [_tokens(tight, params) for params in (WAYS, WAYS[::-1])] == want
    assert "freed the steps that were made while serving" in caplog.text
    assert tight.engine.metrics.preemptions.value == 0


def test_a_start_captures_greedy_steps_and_only_runs_the_other_ways(tiny_llm, monkeypatch):
    """Steps are recorded whole here: each other way would hold a program of its own."""
    captured, ran = [], []
    compile_step = SimBackend.compile

    def noted(self, step, bucket, weights, kv, capture=True):
        (captured if capture else ran).append(bucket)
        return compile_step(self, step, bucket, weights, kv, capture)

    monkeypatch.setattr(SimBackend, "compile", noted)
    runner = tiny_llm(device="sim", block_size=16, max_num_seqs=4).engine.parts.runner
    common = [b for b in runner._policy.common_buckets() if b.sample != "greedy"]
    assert captured == runner._policy.all_buckets()
    assert common
    assert set(common) <= set(ran)
    assert not runner._late
