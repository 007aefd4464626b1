"""Architectures without a native file through the engine, against Transformers' `generate`."""

import gc

import pytest
import torch
import transformers

from leadframe import LLM, SamplingParams
from leadframe.cli.main import main
from leadframe.engine import Engine
from leadframe.errors import CheckpointError, ConfigError, RequestError, UnsupportedModel
from leadframe.llm import engine_config
from leadframe_cpu.backend import CpuBackend

VOCAB = 320
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": VOCAB - 1,
    "pad_token_id": 0,
}
CONFIGS = {
    "olmo2": transformers.Olmo2Config(**COMMON, num_key_value_heads=2),
    "gpt_neox": transformers.GPTNeoXConfig(**COMMON, rotary_pct=0.5),
    "cohere2": transformers.Cohere2Config(**COMMON, num_key_value_heads=2, sliding_window=6),
    "llama": transformers.LlamaConfig(**COMMON, num_key_value_heads=2),
}
SMALL = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks_override": 32}
PROMPTS = [[5, 6, 7, 8, 9, 10], [50, 60, 70], [*range(5, 10), *range(11, 25)]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="session")
def saved(tmp_path_factory, tiny_model):
    """Writes a random model with the tiny tokenizer; returns its directory and the original."""
    made = {}

    def make(name):
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            torch.manual_seed(5)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            model.save_pretrained(path)
            for file in tiny_model.glob("tokenizer*"):
                (path / file.name).write_bytes(file.read_bytes())
            made[name] = path, model
        return made[name]

    return make


def _generate(model, prompt, count):
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["olmo2", "gpt_neox", "cohere2"])
@pytest.mark.parametrize("native", ["auto", "off"])
def test_greedy_tokens_are_those_of_generate(saved, name, native):
    path, model = saved(name)
    sizes = {"max_num_batched_tokens": 8, "max_num_seqs": 3}
    settings = SMALL | sizes | {"options": {"native": native}}
    with LLM(str(path), **settings) as llm:
        note = llm.engine.ledger["load"].note
        answers = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
    assert f"Transformers' {type(model).__name__}" in note
    assert answers == [_generate(model, prompt, 12) for prompt in PROMPTS]


def test_logprobs_are_those_of_the_logits(saved):
    path, model = saved("olmo2")
    with LLM(str(path), **SMALL) as llm:
        done = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4, logprobs=2))[
            0
        ]
    ids = torch.tensor([[*PROMPTS[0], *done.token_ids]])
    with torch.inference_mode():
        exact = model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    got = [entry.logprob for entry in done.logprobs]
    want = [row[token].item() for row, token in zip(exact, done.token_ids, strict=True)]
    assert got == pytest.approx(want, abs=2e-4)


def test_schedules_change_nothing(saved):
    path, _ = saved("gpt_neox")
    sampled = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=15, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    schedules = [
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        # five blocks of 16 do not hold three sequences of up to 34 tokens: some are preempted
        {"num_blocks_override": 6, "max_num_seqs": 3, "max_model_len": 48},
    ]
    answers, preempted, hits = [], [], []
    for schedule in schedules:
        with LLM(str(path), **(SMALL | schedule)) as llm:
            twice = [[c.token_ids for c in llm.generate(PROMPTS, sampled)] for _ in range(2)]
            preempted.append(llm.engine.metrics.preemptions.value)
            hits.append(llm.engine.metrics.prefix_hits.value)
        answers += twice
    assert all(answer == answers[0] for answer in answers)
    assert preempted[0] == 0 < preempted[2]
    assert hits[0] == 0 < hits[1]


def test_auto_prefers_the_native_file_and_both_agree(saved):
    path, model = saved("llama")
    found = {}
    for impl in ("auto", "leadframe", "transformers"):
        with LLM(str(path), model_impl=impl, **SMALL) as llm:
            note = llm.engine.ledger["load"].note
            found[impl] = note, llm.generate([PROMPTS[0]], GREEDY)[0].token_ids
    assert "native llama" in found["auto"][0]
    assert "native llama" in found["leadframe"][0]
    assert "Transformers' LlamaForCausalLM" in found["transformers"][0]
    assert {tuple(tokens) for _, tokens in found.values()} == {
        tuple(_generate(model, PROMPTS[0], 12))
    }


def test_limits_are_those_of_any_model(saved):
    path, _ = saved("olmo2")
    with LLM(str(path), **SMALL) as llm:
        info = llm.engine.model_info
        assert (info.vocab_size, info.eos_token_ids) == (VOCAB, (VOCAB - 1,))
        assert llm.engine.max_model_len == COMMON["max_position_embeddings"]
        assert llm.tokenizer.chat_template is not None
        with pytest.raises(RequestError, match="320"):
            llm.generate([[VOCAB]], GREEDY)
        with pytest.raises(RequestError):
            llm.generate([[5] * 96], GREEDY)
    with pytest.raises(ConfigError, match="97"):
        LLM(str(path), **(SMALL | {"max_model_len": 97}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "reference"}, ["olmo2", "torch", "numpy", "leadframe devices"]),
        ({"device": "reference", "model_impl": "transformers"}, ["--model-impl", "torch", "numpy"]),
        ({"tensor_parallel_size": 2}, ["olmo2", "--tensor-parallel-size is 2"]),
        ({"model_impl": "leadframe"}, ["olmo2", "supported are", "llama"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(saved, settings, words):
    path, _ = saved("olmo2")
    with pytest.raises(UnsupportedModel) as caught:
        LLM(str(path), **(SMALL | settings))
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)


def test_the_command_line_says_so_too(saved, capsys):
    path, _ = saved("olmo2")
    command = ["generate", str(path), "--prompt", "a", "--max-tokens", "2"]
    assert main([*command, "--device", "reference", "--model-impl", "transformers"]) == 3
    error = capsys.readouterr().err
    assert "\nleadframe: --model-impl is transformers; that needs a backend whose" in error
    assert main([*command, "--device", "cpu", "--kv-cache-memory-bytes", "100000"]) == 0


def test_closing_frees_the_weights(saved):
    path, _ = saved("olmo2")
    backend = CpuBackend(threads=1, native="off")
    config = engine_config(str(path), **(SMALL | {"options": {}}))
    llm = LLM.from_engine(Engine.from_config(config, backend=backend))
    llm.generate([PROMPTS[0]], GREEDY)
    assert backend.held.current > 100_000
    llm.close()
    gc.collect()
    assert backend.held.current == 0


def test_a_damaged_weight_file_is_an_error_before_anything_is_built(saved, tmp_path):
    path, _ = saved("olmo2")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        LLM(str(tmp_path), **SMALL)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        LLM(str(tmp_path), **SMALL)
