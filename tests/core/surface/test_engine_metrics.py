"""What a real engine reports: preemption, recomputed tokens, leaked blocks, facts."""

from leadframe.sampling_params import SamplingParams


def value(engine, name):
    text = engine.metrics.render().decode()
    line = next(x for x in text.splitlines() if x.startswith(f"leadframe_{name}{{"))
    return float(line.rsplit(" ", 1)[1])


def run_two(scripted, num_blocks):
    engine = scripted.make_engine(scripted.echoes, num_blocks=num_blocks, max_model_len=24)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name, prompt in (("a", [1] * 8), ("b", [2] * 8)):
        engine.add_request(name, prompt, params)
    while engine.has_work:
        engine.step()
        engine.check()
    return engine


def test_preemption_counts_the_work_that_it_costs(scripted):
    """Two requests of 8 + 12 tokens in 8 usable blocks of 4: one must give way."""
    roomy, tight = run_two(scripted, 64), run_two(scripted, 9)
    assert value(roomy, "num_preemptions_total") == value(roomy, "recomputed_tokens_total") == 0
    assert value(tight, "num_preemptions_total") >= 1
    extra = value(tight, "iteration_tokens_sum") - value(roomy, "iteration_tokens_sum")
    assert value(tight, "recomputed_tokens_total") == extra > 0
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        assert value(tight, name) == value(roomy, name)


def test_no_block_leaks_and_one_that_does_is_seen(scripted):
    engine = run_two(scripted, 64)
    assert value(engine, "leaked_blocks") == 0
    kv = engine.parts.scheduler.kv
    kv._pool.take(1)
    engine.add_request("c", [3], SamplingParams(max_tokens=1))
    engine.step()
    assert value(engine, "leaked_blocks") == 1


def test_the_server_exports_facts(world):
    assert 'device="scripted:0"' in world.http.get("/metrics").text
