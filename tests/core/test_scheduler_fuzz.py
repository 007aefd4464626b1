"""Random traffic: whatever the schedule, every request says what it says alone.

The model under `policy.Harness` reads the blocks through the tables of the batch, and invariants
are recomputed after every call.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadframe.errors import RequestError
from leadframe.platform.capabilities import Capabilities
from leadframe.request import FinishReason

BLOCK_SIZE = 4

CAPS = {
    "exact": Capabilities("numpy"),
    "record": Capabilities("torch", graph="record"),
    "static": Capabilities("jax", graph="compile", static_shapes=True),
}

configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(8, 24),
        "caching": st.booleans(),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 7, 16, 64]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "watermark": st.sampled_from([0.0, 0.2]),
        "caps": st.sampled_from(sorted(CAPS)),
    }
)

prompts = st.tuples(
    st.sampled_from([0, 4, 8, 9]),  # tokens shared with the others
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
).map(lambda parts: [7] * parts[0] + parts[1])

requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.integers(0, 9),
        "stop_ids": st.sampled_from([(), (3, 17), tuple(range(10))]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(-2, 2),
        "salt": st.sampled_from(["", "", "tenant"]),
        "priority": st.integers(0, 2),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
    }
)

events = st.lists(
    st.one_of(
        requests,
        st.sampled_from(["step", "step", "step", "step", "drop", "preempt", "fail", "reset"]),
        st.integers(0, 30).map(lambda i: ("abort", i)),
        st.integers(0, 30).map(lambda i: ("abort mid-step", i)),
    ),
    max_size=40,
)


class Traffic:
    """Plays events on a harness and remembers the requests."""

    def __init__(self, policy, config):
        config = dict(config)
        self.policy = policy
        self.caps = CAPS[config.pop("caps")]
        self.harness = policy.Harness(
            block_size=BLOCK_SIZE, caps=self.caps, max_model_len=48, **config
        )
        self.requests = []

    def play(self, event):
        match event:
            case dict():
                self.add(event)
            case "step":
                self.harness.step()
            case "drop":  # an output that is never executed
                self.harness.schedule()
            case "preempt":
                self.harness.scheduler.preempt_newest()
            case "fail":
                self.step_with(self.fail_one)
            case "reset":
                self.harness.kv.reset_prefix_cache()
            case ("abort", index):
                self.abort(index)
            case ("abort mid-step", index):
                self.step_with(lambda output: self.abort(index))
        self.harness.scheduler.check()

    def add(self, event):
        request = self.policy.make_request(**event)
        try:
            self.harness.add(request)
        except RequestError:
            needed = max(request.num_prompt_tokens, request.max_total_tokens - 1)
            assert -(-needed // BLOCK_SIZE) > self.harness.kv.num_blocks
        else:
            self.requests.append(request)

    def abort(self, index):
        if self.requests:
            request = self.requests[index % len(self.requests)]
            self.harness.scheduler.abort(request.request_id)
            assert request.is_finished

    def fail_one(self, output):
        request = output.rows[0].request
        self.harness.scheduler.finish(request, FinishReason.ERROR)
        for block_id in self.harness.scheduler.take_discarded_blocks():
            start = block_id * BLOCK_SIZE
            self.harness.model.positions[start : start + BLOCK_SIZE] = -1

    def step_with(self, interruption):
        output = self.harness.schedule()
        if output.rows:
            sampled = self.harness.execute(output)
            interruption(output)
            self.harness.update(output, sampled)

    def check_end(self):
        self.harness.run()
        for request in self.requests:
            expected = self.policy.solo_tokens(request)
            output = request.output_token_ids
            if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert output == expected[: len(output)]
            else:
                assert output == expected
                stopped = bool(output) and output[-1] in request.stop_ids
                assert request.finish_reason is (
                    FinishReason.STOP if stopped else FinishReason.LENGTH
                )


@settings(max_examples=150)
@given(config=configs, events=events)
def test_random_traffic_says_what_each_request_says_alone(policy, config, events):
    traffic = Traffic(policy, config)
    for event in events:
        traffic.play(event)
    traffic.check_end()


@pytest.mark.parametrize("caps", sorted(CAPS))
@pytest.mark.parametrize("num_blocks", [10, 14, 100])
@pytest.mark.parametrize("budget", [4, 5, 64])
def test_schedule_independence_of_one_workload(policy, caps, num_blocks, budget):
    """Chunk size × batch mix × preemption × padding, on one fixed workload."""
    harness = policy.Harness(
        num_blocks, max_num_seqs=4, max_num_batched_tokens=budget, caps=CAPS[caps]
    )
    requests = [policy.make_request([7] * 8 + [i], 14, temperature=i % 2, seed=i) for i in range(6)]
    harness.add(*requests)
    harness.run()
    assert [r.output_token_ids for r in requests] == [policy.solo_tokens(r) for r in requests]
    if num_blocks == 10:
        assert any(r.num_preemptions for r in requests), "the small pool must preempt"
