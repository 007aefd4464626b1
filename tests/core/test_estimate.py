"""What fits a device that is not here, against real starts and against figures done by hand."""

import json

import pytest

from leadframe import LLM
from leadframe.cli.main import main
from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from leadframe.engine.estimate import estimate
from leadframe.errors import ConfigError
from leadframe.models import load_weights, open_checkpoint
from leadframe.models.footprint import describe_model, rank_weight_bytes
from leadframe.platform.reference.backend import ReferenceBackend

GB, GIB = 10**9, 2**30

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
NUM_PARAMETERS = 8_030_261_248
"""As its model card says, to the last."""
EMBEDDING = 128256 * 4096


@pytest.fixture
def config_only(tmp_path):
    """Writes a directory that holds a config.json and nothing else."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changes))
        return tmp_path

    return write


def settings(*, ranks=1, max_num_seqs=256, **cache):
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2**16)
    device = DeviceConfig(tensor_parallel_size=ranks)
    return EngineConfig(scheduler=scheduler, cache=CacheConfig(**cache), device=device)


def test_a_config_alone_says_what_a_known_model_takes(config_only):
    model = describe_model(config_only()).model
    found = estimate(model, settings(), 80 * GB, reserve_bytes=GB)
    constants = 4 * 128 // 2  # rotary frequencies
    assert model.info.num_parameters == NUM_PARAMETERS
    assert found.weight_bytes == 2 * NUM_PARAMETERS + constants
    assert found.token_bytes == 32 * 8 * 128 * 2 * 2
    assert found.budget_bytes == 72 * GB
    assert found.kept_free_bytes == GB + 72 * GB // 50
    room = 72 * GB - found.kept_free_bytes - found.weight_bytes
    assert found.capacity.num_blocks == room // (16 * found.token_bytes)
    assert found.max_model_len == 131_072
    # every step reads all weights but the embedding table
    assert found.step_bytes(1, 0) == found.weight_bytes - 2 * EMBEDDING
    assert found.step_bytes(3, 100) - found.step_bytes(3, 0) == 300 * found.token_bytes


def test_a_tied_head_is_counted_once_and_read_whole(config_only):
    model = describe_model(config_only(tie_word_embeddings=True)).model
    found = estimate(model, settings(), 80 * GB)
    assert found.weight_bytes == 2 * (NUM_PARAMETERS - EMBEDDING) + 256
    assert found.step_bytes(1, 0) == found.weight_bytes


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 4), (8, 1), (16, 1)])
def test_ranks_share_weights_and_heads(config_only, ranks, kv_heads):
    """Norms are on every rank, and so is a KV head where there are fewer than ranks."""
    model = describe_model(config_only()).model
    found = estimate(model, settings(ranks=ranks), 80 * GB)
    norms = 65 * 4096
    kv = 32 * 2 * 4096 * 128  # elements of k and v for one head of each layer
    others = NUM_PARAMETERS - norms - 8 * kv
    assert found.weight_bytes == 2 * (norms + others // ranks + kv_heads * kv) + 256
    assert found.token_bytes == 32 * kv_heads * 128 * 2 * 2
    assert found.capacity.block_bytes == ranks * 16 * found.token_bytes


def test_a_window_bounds_what_is_read_and_not_what_is_kept(config_only):
    window = {"model_type": "mistral", "sliding_window": 4096}
    model = describe_model(config_only(**window)).model
    found = estimate(model, settings(), 80 * GB)
    assert found.step_bytes(2, 10_000) == found.read_bytes + 2 * 4096 * found.token_bytes
    assert found.step_bytes(2, 100) == found.read_bytes + 2 * 100 * found.token_bytes


def test_weights_are_those_that_a_load_uploads(tiny_model):
    checkpoint = open_checkpoint(tiny_model)
    weights = load_weights(ReferenceBackend(), checkpoint, "float32")
    unique = {id(array): array.nbytes for array in weights.values()}
    assert rank_weight_bytes(describe_model(tiny_model).model, 4) == sum(unique.values())


def test_a_start_prints_the_line_that_was_computed(tiny_model):
    cache = {"block_size": 4, "kv_cache_dtype": "float32"}
    config = EngineConfig(dtype="float32", cache=CacheConfig(**cache))
    found = estimate(describe_model(tiny_model).model, config, 2**20)
    size = found.capacity.total_bytes
    with LLM(str(tiny_model), device="reference", kv_cache_memory_bytes=size, **cache) as llm:
        assert llm.engine.capacity_line == found.capacity.line(found.max_model_len)


def test_blocks_that_no_schedule_uses_are_left_out_as_a_start_does(config_only):
    model = describe_model(config_only(max_position_embeddings=2048)).model
    found = estimate(model, settings(max_num_seqs=2), 80 * GB)
    assert found.capacity.num_blocks == 2 * 2 * 2048 // 16 + 1


@pytest.mark.parametrize(
    ("changes", "memory", "message"),
    [
        ({}, 16 * GB, r"no memory is left .* GiB a device are lacking"),
        ({"ranks": 3}, 80 * GB, "32 heads, which do not divide among 3 ranks"),
        ({"kv_cache_dtype": "int3"}, 80 * GB, "--kv-cache-dtype is 'int3'; known are auto"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(config_only, changes, memory, message):
    with pytest.raises(ConfigError, match=message):
        estimate(describe_model(config_only()).model, settings(**changes), memory)


def test_the_command_prints_the_line_and_what_steps_cost(config_only, capsys):
    argv = ["capacity", str(config_only()), "--memory", "80GB", "--bandwidth", "3.35TB"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    found = estimate(describe_model(config_only()).model, settings(), 80 * GB)
    assert found.capacity.line(131_072) in out
    assert "8,030,261,248 parameters" in out
    milliseconds = found.step_bytes(1, 131_072) / 3.35e9
    assert f"1 request         131,072  {found.step_bytes(1, 131_072) / GIB:.2f} GiB" in out
    assert f"{milliseconds:.3g} ms" in out


def test_the_command_says_it_in_json_too(config_only, capsys):
    argv = ["capacity", str(config_only()), "--memory", "24GB", "-tp", "4", "--json"]
    assert main([*argv, "--max-model-len", "32K", "--max-num-seqs", "8"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kv_token_bytes"] == 32_768
    assert result["max_model_len"] == 32_768
    assert result["kv_cache"]["num_tokens"] == 16 * result["kv_cache"]["num_blocks"]
    assert [(s["requests"], s["context"]) for s in result["decode_steps"]] == [
        (1, 32_768), (8, 32_768), (8, 4096)
    ]  # fmt: skip
    assert all(step["seconds"] is None for step in result["decode_steps"])


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--max-model-len", "200000"], "--max-model-len is 200000, and the model serves at most"),
        (["--bandwidth", "0"], "--bandwidth is 0; it must be at least 1"),
    ],
)
def test_what_no_start_would_take_is_refused_in_one_line(config_only, capsys, flags, error):
    assert main(["capacity", str(config_only()), "--memory", "80GB", *flags]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert error in err
    assert err.count("\n") == 1


def test_a_library_model_is_refused_with_the_types_that_are_known(config_only, capsys):
    assert main(["capacity", str(config_only(model_type="gpt2")), "--memory", "1GB"]) != 0
    assert "gpt2" in capsys.readouterr().err
