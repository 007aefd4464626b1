"""A real server, engine thread, scheduler and block pool over a model that follows a script."""

import contextlib
import json
import threading
import time
from pathlib import Path

import httpx
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from leadframe.config import CacheConfig, EngineConfig, SchedulerConfig
from leadframe.engine import AsyncEngine, Engine, TokenLogprobs
from leadframe.engine.startup import EngineParts
from leadframe.kv_cache import KVCacheManager
from leadframe.metrics import EngineMetrics, StartupLedger
from leadframe.models import ModelInfo
from leadframe.models.info import GenerationDefaults
from leadframe.platform import Capabilities
from leadframe.runner.result import StepResult
from leadframe.scheduler import Scheduler
from leadframe.server.lifecycle import Server, bind
from leadframe.server.services import Services
from leadframe.server.settings import ServerConfig
from leadframe.tokenizer import Tokenizer
from leadframe.tokenizer.tokenizer import TokenizerConfig

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = len(LETTERS)
BOS = EOS + 1
VOCAB = 1000
"""The logits are wider than the tokenizer, as padded vocabularies are."""

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.content == 'refuse me' %}{{ raise_exception('no such talk') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(template=TEMPLATE):
    """One token a byte, and two special tokens; no token is added to a plain text."""
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<s>"])
    config = TokenizerConfig(
        {"eos_token": "</s>", "bos_token": "<s>"}, {} if template is None else {"default": template}
    )
    return Tokenizer(backend, config)


TOKENIZER = make_tokenizer()


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def says(text, end=EOS):
    """A script: the same text for every request, then end of sequence."""
    tokens = ids_of(text)
    return lambda request, position: tokens[position] if position < len(tokens) else end


def echoes(request, position):
    """A script: each request repeats its own prompt, for ever."""
    return request.prompt_token_ids[position % request.num_prompt_tokens]


class ScriptedRunner:
    """Samples what the script says; `None` stands for logits that are not finite.

    Every log-probability is a function of token and rank, so that replies can be computed by hand.
    """

    def __init__(self, script, step_seconds=0.0):
        self.script, self.step_seconds = script, step_seconds
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.error = None

    def execute(self, schedule, on_launch):
        on_launch()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        time.sleep(self.step_seconds)
        self.num_steps += 1
        rows = schedule.rows
        result = StepResult([None] * len(rows), [True] * len(rows), [None] * len(rows))
        for i, row in enumerate(rows):
            request = row.request
            if row.samples:
                token = self.script(request, len(request.output_token_ids))
                result.finite[i] = token is not None
                result.tokens[i] = token
                if request.params.logprobs is not None and token is not None:
                    result.logprobs[i] = entry(token, request.params.logprobs)
            if request.params.prompt_logprobs is not None:
                end = min(row.start + row.num_tokens + 1, request.num_prompt_tokens)
                for p in range(row.start + 1, end):
                    scored = entry(request.prompt_token_ids[p], request.params.prompt_logprobs)
                    result.scored.append((i, p, scored))
        return result

    def scrub(self, block_ids):
        self.scrubbed = list(block_ids)

    def close(self):
        pass


def entry(token, count):
    top = tuple(((token + i) % VOCAB, -0.25 - i) for i in range(count))
    return TokenLogprobs(token, -0.25, 1, top)


class NoBackend:
    caps = Capabilities(family="scripted", asynchronous=True)

    def close(self):
        pass


class Plan:
    line = "KV cache: a scripted one"


def make_engine(
    script,
    *,
    max_model_len=256,
    num_blocks=512,
    step_seconds=0.0,
    tokenizer=TOKENIZER,
    generation=GenerationDefaults(),  # noqa: B008
    **scheduling,
):
    """A real Engine over a scripted runner; block size 4."""
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64} | scheduling
    config = EngineConfig(scheduler=SchedulerConfig(**settings), cache=CacheConfig(block_size=4))
    info = ModelInfo(
        architecture="scripted",
        vocab_size=VOCAB,
        hidden_size=1,
        max_position_embeddings=max_model_len,
        num_heads=1,
        kv_layers=(),
        attn=(),
        eos_token_ids=(EOS,),
        weight_bytes=0,
        num_parameters=0,
        generation=generation,
    )
    kv = KVCacheManager(num_blocks, 4, enable_prefix_caching=True)
    ledger = StartupLedger()
    return Engine(
        EngineParts(
            config=config,
            backend=NoBackend(),
            runner=ScriptedRunner(script, step_seconds),
            scheduler=Scheduler(config.scheduler, kv, max_model_len),
            tokenizer=tokenizer,
            model_info=info,
            model_name="scripted",
            model_path=Path(),
            max_model_len=max_model_len,
            metrics=EngineMetrics("scripted", ledger),
            ledger=ledger,
            ops=None,
            kv_plan=Plan(),
            device_summary="scripted:0",
            device_note="",
        )
    )


class World:
    """One running server.

    Attributes:
      http: a client whose base URL is the server.
      engine: the synchronous engine inside.
      runner: the scripted runner; clear its `gate` to hold steps back.
    """

    def __init__(self, script, *, template=None, server=None, **engine):
        self.engine = make_engine(script, **engine)
        self.runner = self.engine.parts.runner
        self.async_engine = AsyncEngine(self.engine)
        config = ServerConfig(**({"port": 0, "shutdown_timeout": 2.0} | (server or {})))
        sock = bind(config)
        self.services = Services(self.async_engine, config, template)
        self.port = sock.getsockname()[1]
        ready = threading.Event()
        self.server = Server(self.services, ready.set)
        self._thread = threading.Thread(target=self.server.run, args=([sock],), daemon=True)
        self._thread.start()
        assert ready.wait(10), "the server did not start"
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20)

    def post(self, path, body, **kwargs):
        return self.http.post(path, json=body, **kwargs)

    def complete(self, prompt="hi", **body):
        return self.post("/v1/completions", {"prompt": prompt, **body})

    def chat(self, content="hi", **body):
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **body})

    def metric(self, name):
        text = self.engine.metrics.render().decode()
        line = next(x for x in text.splitlines() if x.startswith(f"leadframe_{name}{{"))
        return float(line.rsplit(" ", 1)[1])

    def wait_idle(self, seconds=5.0):
        """Waits until no request is in the engine, then audits the block pool."""
        wait_for(lambda: not self.engine.has_work and not self.services.live, seconds)
        self.check_free()

    def check_free(self):
        kv = self.engine.parts.scheduler.kv
        self.engine.check()
        assert kv.usage == 0
        assert self.metric("num_requests_running") == 0
        assert self.metric("num_requests_waiting") == 0
        assert self.metric("kv_cache_usage_perc") == 0

    def stop(self):
        self.runner.gate.set()
        self.http.close()
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not stop"


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextlib.contextmanager
def running(script, **kwargs):
    world = World(script, **kwargs)
    try:
        yield world
    finally:
        world.stop()


def events_of(response):
    """The decoded `data:` payloads of a stream, and "[DONE]" as it is."""
    found = []
    for block in response.text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            payload = block.removeprefix("data: ")
            found.append(payload if payload == "[DONE]" else json.loads(payload))
    return found
