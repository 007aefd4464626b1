"""KV arithmetic, to the byte."""

import pytest

from leadframe.errors import ConfigError
from leadframe.kv_cache.capacity import (
    KVCapacity,
    blocks_for,
    capacity_of,
    fit_max_model_len,
    format_gib,
    kv_token_bytes,
)
from leadframe.platform.backend import KVLayerSpec

GIB = 2**30


def test_the_line_is_exactly_what_operators_search_for():
    capacity = KVCapacity(num_blocks=1235, block_size=16, block_bytes=1_070_000)
    assert capacity.line(4096) == (
        "KV cache: 1,234 blocks × 16 tokens = 19,744 tokens (1.23 GiB); maximum concurrency "
        "for 4,096 tokens per request: 4.82x"
    )


def test_bytes_are_two_times_layers_heads_dim_and_element_size():
    smollm2 = [KVLayerSpec(num_kv_heads=3, head_dim=64)] * 30
    assert kv_token_bytes(smollm2, 4) == 2 * 30 * 3 * 64 * 4 == 46_080
    assert kv_token_bytes(smollm2, 2) == 23_040
    mixed = [KVLayerSpec(8, 128), KVLayerSpec(1, 256)]
    assert kv_token_bytes(mixed, 2) == 2 * 2 * (8 * 128 + 256)


def test_shown_blocks_tokens_and_bytes_leave_the_null_block_out():
    block_bytes = 16 * 46_080
    capacity = capacity_of(GIB, 16, block_bytes)
    assert capacity.num_blocks == GIB // block_bytes == 1456
    assert capacity.num_usable_blocks == 1455
    assert capacity.num_tokens == 1455 * 16
    assert capacity.usable_bytes == 1455 * 16 * 46_080 == capacity.num_tokens * 46_080
    assert capacity.total_bytes == 1456 * block_bytes <= GIB
    assert "1,455 blocks × 16 tokens = 23,280 tokens (1.00 GiB)" in capacity.line(2048)


def test_concurrency_counts_whole_blocks():
    capacity = KVCapacity(101, 16, 1)
    assert capacity.max_concurrency(16) == 100
    assert capacity.max_concurrency(17) == 50
    assert capacity.max_concurrency(1600) == 1
    assert capacity.max_concurrency(1601) < 1


@pytest.mark.parametrize(
    ("available", "num_blocks"), [(0, 0), (-5, 0), (99, 0), (100, 1), (199, 1), (200, 2)]
)
def test_no_byte_more_than_is_available(available, num_blocks):
    capacity = capacity_of(available, 4, 100)
    assert capacity.num_blocks == num_blocks
    assert capacity.num_usable_blocks == max(0, num_blocks - 1)


@pytest.mark.parametrize(
    ("num_blocks", "wanted"), [(2, 2), (255, 255), (257, 256), (1003, 1000), (71_234, 71_168)]
)
def test_a_few_blocks_more_or_less_are_the_same_pool(num_blocks, wanted):
    steadied = KVCapacity(num_blocks, 16, 1024).steadied()
    assert steadied == KVCapacity(wanted, 16, 1024)
    assert steadied == steadied.steadied()
    assert wanted > num_blocks * (1 - 1 / 128) - 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens, 16) == blocks


def test_format_gib():
    assert format_gib(GIB) == "1.00 GiB"
    assert format_gib(GIB * 3 // 2) == "1.50 GiB"


class TestFitMaxModelLen:
    capacity = KVCapacity(num_blocks=11, block_size=16, block_bytes=1000)  # 160 tokens

    def test_nothing_asked_takes_the_models_limit(self):
        assert fit_max_model_len(self.capacity, None, 100) == 100

    def test_nothing_asked_shrinks_to_what_fits(self):
        assert fit_max_model_len(self.capacity, None, 4096) == 160

    @pytest.mark.parametrize("asked", [1, 159, 160])
    def test_what_was_asked_is_kept_if_it_fits(self, asked):
        assert fit_max_model_len(self.capacity, asked, 4096) == asked

    def test_what_does_not_fit_is_an_error_with_every_number(self):
        with pytest.raises(ConfigError) as caught:
            fit_max_model_len(self.capacity, 161, 4096)
        message = str(caught.value)
        for number in ("161 tokens", "12 blocks of 16", "1,000 bytes", "12,000 bytes", "11 blocks"):
            assert number in message
        for number in ("11,000 bytes", "160 tokens", "--max-model-len to at most 160"):
            assert number in message

    def test_the_named_length_does_fit(self):
        assert fit_max_model_len(self.capacity, 160, 4096) == 160

    @pytest.mark.parametrize("num_blocks", [0, 1])
    def test_no_usable_block_at_all(self, num_blocks):
        with pytest.raises(ConfigError, match=f"room for {num_blocks} blocks") as caught:
            fit_max_model_len(KVCapacity(num_blocks, 16, 1000), None, 4096)
        assert "max-model-len" not in str(caught.value)
