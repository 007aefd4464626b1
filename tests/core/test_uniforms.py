"""Philox against Random123's known answers, and the uniforms built on it."""

import numpy as np
import pytest

from leadframe.runner.uniforms import WINDOW, philox4x32, uniform_windows

# Random123, kat_vectors: philox4x32 10, counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return np.array([int(word, 16) for word in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, result):
    found = philox4x32(words(counter)[:, None, None], words(key)[:, None])
    np.testing.assert_array_equal(found[:, 0, 0], words(result))


def test_philox_is_elementwise():
    counters = np.stack([words(c) for c, _, _ in KNOWN_ANSWERS], axis=1)
    keys = np.stack([words(k) for _, k, _ in KNOWN_ANSWERS], axis=1)
    found = philox4x32(counters[:, :, None], keys)
    np.testing.assert_array_equal(found[:, :, 0].T, [words(r) for _, _, r in KNOWN_ANSWERS])


def draws(seed, window):
    return uniform_windows(np.array([seed % 2**64], np.uint64), np.array([window]))[0]


def test_position_is_word_of_counter():
    """Position p is the high 24 bits of word p % 4 of counter p // 4, keyed by the seed."""
    seed = 0x299F31D0A4093822  # low word first in the key
    for position in (0, 1, 5, WINDOW - 1, WINDOW, 7 * WINDOW + 6):
        counter = np.array([position // 4, 0, 0, 0], np.uint64)[:, None, None]
        key = np.array([0xA4093822, 0x299F31D0], np.uint64)[:, None]
        word = int(philox4x32(counter, key)[position % 4, 0, 0])
        found = draws(seed, position // WINDOW)[position % WINDOW]
        assert found == np.float32((word >> 8) / 2**24)


def test_first_draws_are_pinned():
    """Seeded outputs must not change between releases."""
    expected = [0x6627E8, 0xE169C5, 0xBC57AC, 0x9B00DB]
    np.testing.assert_array_equal(draws(0, 0)[:4] * 2**24, expected)


def test_draws_are_24_bit_and_below_one():
    sample = np.concatenate([draws(seed, 3) for seed in range(200)])
    assert sample.dtype == np.float32
    assert sample.min() >= 0
    assert sample.max() < 1
    np.testing.assert_array_equal(sample * 2**24, np.round(sample * 2**24))
    assert abs(sample.mean() - 0.5) < 0.01
    assert len(np.unique(sample)) > 0.99 * len(sample)


def test_windows_depend_on_their_own_seed_only():
    seeds = np.array([1, 2, 2**63 + 5, 2**64 - 1], np.uint64)
    windows = np.array([0, 3, 1, 0])
    together = uniform_windows(seeds, windows)
    for row, seed, window in zip(together, seeds.tolist(), windows.tolist(), strict=True):
        np.testing.assert_array_equal(row, draws(seed, window))
    assert not np.array_equal(draws(1, 0), draws(2, 0))
    assert not np.array_equal(draws(1, 0), draws(1 + 2**32, 0)), "the high word of the seed counts"
    assert not np.array_equal(draws(1, 0), draws(1, 1))
