"""A thousand clients that leave at random moments leave nothing behind."""

import asyncio
import json
import random
import time

NUM_REQUESTS = 1000
AT_ONCE = 32


def test_a_thousand_random_aborts(serve, tiny_model):
    with serve(
        str(tiny_model), "--device", "cpu", "--max-num-seqs", "16", "--max-num-batched-tokens",
        "64", "--kv-cache-memory-bytes", "256KiB", "--log-level", "warning",
    ) as server:  # fmt: skip
        port = int(server.url.rsplit(":", 1)[1])
        asyncio.run(_crowd(port))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            metrics = server.metrics()
            if not metrics["num_requests_running"] + metrics["num_requests_waiting"]:
                break
            time.sleep(0.05)
        gauges = (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
            "oldest_request_age_seconds", "leaked_blocks",
        )  # fmt: skip
        assert {name: metrics[name] for name in gauges} == dict.fromkeys(gauges, 0.0)
        assert metrics["prompt_tokens_total"] == metrics["request_prompt_tokens_sum"]
        assert metrics["generation_tokens_total"] == metrics["request_generation_tokens_sum"]
        assert metrics["metrics_errors_total"] == 0
        text = server.http.get("/metrics").text
        aborted = next(line for line in text.splitlines() if 'finished_reason="abort"' in line)
        assert float(aborted.rsplit(" ", 1)[1]) > NUM_REQUESTS / 4
        reply = server.http.post("/v1/completions", json={"prompt": "still here"})
        assert reply.status_code == 200


async def _crowd(port):
    rng = random.Random(11)
    room = asyncio.Semaphore(AT_ONCE)
    plans = [
        (rng.random() * 0.2, rng.choice((1, 8, 60)), rng.random() < 0.5, rng.randint(1, 2))
        for _ in range(NUM_REQUESTS)
    ]

    async def one(delay, num_chars, stream, n):
        async with room:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = {
                "prompt": "abcdefgh" * num_chars, "max_tokens": 180 - 2 * num_chars, "n": n,
                "stream": stream, "ignore_eos": True,
            }  # fmt: skip
            if num_chars == 60:
                body |= {"prompt": "abc" * 60, "max_tokens": 60}
            data = json.dumps(body).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
                % (len(data), data)
            )
            await writer.drain()
            await asyncio.sleep(delay)
            writer.transport.abort()

    await asyncio.gather(*(one(*plan) for plan in plans))
