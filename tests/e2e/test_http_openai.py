"""The default model on the host, through the official `openai` client."""

import asyncio
import re
import shlex
import signal
import subprocess
import time

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
KEY = "sk-e2e"
SETTINGS = (
    "--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16",
    "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "256MiB", "--api-key", KEY,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(serve):
    with serve(*SETTINGS) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_it_answers_sensibly(client, model):
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=16
    )
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert client.models.retrieve(model).id == model


def test_a_completion_with_everything(client, model):
    reply = client.completions.create(
        model=model, prompt=["One, two,", "Red, green,"], n=2, max_tokens=4, temperature=0.8,
        seed=5, logprobs=2, echo=True, stop=["\n\n"], top_p=0.9, presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias={"5": -10}, user="me",
    )  # fmt: skip
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert all(c.text.startswith(("One, two,", "Red, green,")) for c in reply.choices)
    logprobs = reply.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs)
    assert reply.choices[0].text.startswith("".join(logprobs.tokens[:3]))


def test_scoring_a_prompt_without_generating(client, model):
    reply = client.completions.create(
        model=model, prompt="The capital of France is Paris", echo=True, logprobs=1, max_tokens=0
    )
    choice = reply.choices[0]
    assert choice.text == "The capital of France is Paris"
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[-1] > -2
    assert reply.usage.completion_tokens == 0


def test_chat_logprobs(client, model):
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=6, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)


def test_the_stream_is_the_reply(client, model):
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**body)
    chunks = list(
        client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_errors_are_the_clients_own_classes(client, server, model):
    with pytest.raises(openai.BadRequestError, match="holds 512 together"):
        client.completions.create(model=model, prompt="x", max_tokens=100_000)
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"
    stranger = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", extra_body={"temprature": 1})
    assert caught.value.param == "temprature"


def test_sixteen_streams_at_once_equal_each_alone(client, server, model):
    """Whatever shares their batch, greedy streams say what they say alone."""
    prompts = [f"{count} little ducks went" for count in range(16)]
    body = {"model": model, "temperature": 0, "max_tokens": 8}

    async def one(remote, prompt):
        stream = await remote.completions.create(prompt=prompt, stream=True, **body)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def together():
        url = server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as remote:
            return await asyncio.gather(*(one(remote, prompt) for prompt in prompts))

    texts = asyncio.run(together())
    assert all(texts)
    for prompt, text in list(zip(prompts, texts, strict=True))[::4]:
        alone = client.completions.create(prompt=prompt, **body)
        assert alone.choices[0].text == text


def test_a_killed_client_frees_its_blocks_within_two_steps(server, model):
    """A real client process, killed by a signal that it cannot handle."""
    body = (
        f'{{"model": "{model}", "prompt": "Once", "max_tokens": 480, "ignore_eos": true, '
        '"stream": true}'
    )
    command = [
        "curl", "-sN", server.url + "/v1/completions", "-H", f"Authorization: Bearer {KEY}",
        "-H", "Content-Type: application/json", "-d", body,
    ]  # fmt: skip
    curl = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert curl.stdout.readline().startswith(b"data: ")
    assert server.metrics()["num_requests_running"] == 1
    curl.kill()
    curl.wait()
    curl.stdout.close()
    steps = server.metrics()["iteration_tokens_count"]
    deadline = time.monotonic() + 10
    while server.metrics()["num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    after = server.metrics()
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["kv_cache_usage_perc"] == 0
    assert after["iteration_tokens_count"] - steps <= 2


def test_the_printed_curl_works(server):
    line = next(line for line in server.lines if line.strip().startswith("curl "))
    command = shlex.split(line.replace("$LEADFRAME_API_KEY", KEY))
    done = subprocess.run([*command, "-s"], capture_output=True, text=True, check=True)
    assert '"content":' in done.stdout
    assert '"error"' not in done.stdout


def test_start_up_tells_where_time_and_memory_went(server):
    text = "".join(server.lines)
    assert server.lines[0].startswith("device: cpu:0")
    assert "KV cache: " in text
    assert "maximum concurrency for 512 tokens per request" in text
    metrics = server.http.get("/metrics").text
    for series in ('seconds{[^}]*phase="load"', 'bytes{[^}]*phase="kv"'):
        value = re.search(rf"^leadframe_startup_{series}.*}} (\S+)$", metrics, re.MULTILINE)
        assert value is not None, series
        assert float(value[1]) > 0


def test_sigterm_lets_a_stream_finish(serve):
    with serve(*SETTINGS[:-2], "--shutdown-timeout", "60") as server:
        body = {"prompt": "Once", "max_tokens": 24, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert first.startswith("data: ")
        assert '"finish_reason":"length"' in "".join(rest)
        assert "data: [DONE]" in rest
        assert server.process.wait(30) == 0
