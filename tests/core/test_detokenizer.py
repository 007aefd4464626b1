"""Text that streams is the text of the whole, whatever the tokens are and however they come."""

import time
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from leadframe.models.default_model import default_model_path
from leadframe.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from leadframe.tokenizer.tokenizer import TokenizerConfig

WORDS = ["▁Hello", "▁world", "▁", "ing", "é", "▁日本", "x"]


def sentence_piece():
    """Ids: 0 <unk>, 1 <s>, 2 </s>, 3 + byte, then words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(t, special=True) for t in tokens[:3]])
    return backend


FALLBACK = sentence_piece()
SPM = Tokenizer(FALLBACK, TokenizerConfig())
SMOL = load_tokenizer(default_model_path())
SMOL_BACKEND = SMOL._backend


def stream(tokenizer, prompt, output, cuts=(), skip=True):
    """The emitted texts, the output pushed in pieces."""
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    edges = sorted({0, len(output), *(c for c in cuts if c < len(output))})
    texts = [detokenizer.push(output[a:b]) for a, b in pairwise(edges)]
    return [*texts, detokenizer.finish()]


def is_continuation(prompt_text, whole, added, num_marks=1):
    """Whether `added` continues the prompt: all of it, or all but its incomplete last character.

    That stands in the prompt's text as at most `num_marks` replacement characters.
    """
    head = whole[: len(whole) - len(added)]
    heads = [head + "\ufffd" * count for count in range(num_marks + 1)]
    return head + added == whole and prompt_text in heads


# Bytes of many scripts, special tokens, words: half of the ids are single bytes.
SMOL_LETTERS = map(SMOL_BACKEND.token_to_id, tokenizers.pre_tokenizers.ByteLevel.alphabet())
SMOL_BYTES = sorted(i for i in SMOL_LETTERS if i is not None)
SMOL_IDS = st.lists(st.one_of(st.sampled_from(SMOL_BYTES), st.integers(0, 49_200)), max_size=24)
SPM_IDS = st.lists(st.integers(0, len(FALLBACK.get_vocab()) + 2), max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=24)


@settings(max_examples=300, deadline=None)
@given(prompt=SMOL_IDS, output=SMOL_IDS, cuts=CUTS, skip=st.booleans())
def test_byte_level_text_is_what_the_tokenizers_library_decodes(prompt, output, cuts, skip):
    whole = SMOL_BACKEND.decode([i for i in prompt + output if i < 49_152], skip)
    assert SMOL.decode(prompt + output, skip) == whole
    added = "".join(stream(SMOL, prompt, output, cuts, skip))
    assert is_continuation(
        SMOL_BACKEND.decode([i for i in prompt if i < 49_152], skip), whole, added
    )


@settings(max_examples=300, deadline=None)
@example(prompt=[240, 163], output=[], cuts=[], skip=False)
@given(prompt=SPM_IDS, output=SPM_IDS, cuts=CUTS, skip=st.booleans())
def test_byte_fallback_text_is_what_decoding_the_whole_gives(prompt, output, cuts, skip):
    whole = SPM.decode(prompt + output, skip)
    added = "".join(stream(SPM, prompt, output, cuts, skip))
    # this decoder writes a mark for each byte, and three may lack their last
    assert is_continuation(SPM.decode(prompt, skip), whole, added, num_marks=3)


VALID = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=3).map(lambda s: [3 + b for b in s.encode()]),
        st.sampled_from(range(259, 259 + len(WORDS))).map(lambda i: [i]),
        st.sampled_from([[1], [2]]),
    ),
    max_size=8,
).map(lambda parts: [i for part in parts for i in part])


@settings(max_examples=300, deadline=None)
@given(ids=VALID, skip=st.booleans())
def test_byte_fallback_of_valid_text_is_what_the_tokenizers_library_decodes(ids, skip):
    assert SPM.decode(ids, skip) == FALLBACK.decode(ids, skip)


def test_a_good_character_survives_a_bad_byte_after_it():
    """The library gives up on a whole run of bytes; a stream has sent its beginning already."""
    euro = [3 + b for b in "€".encode()]
    assert SPM.decode([*euro, 3 + 0xC3]) == "€\ufffd"
    assert FALLBACK.decode([*euro, 3 + 0xC3]) == "\ufffd" * 4


def test_half_a_character_is_held_back():
    fire = [3 + b for b in "🔥".encode()]
    assert stream(SPM, [1], fire, cuts=[1, 2, 3]) == ["", "", "", "🔥", ""]
    assert stream(SPM, [1], fire[:3], cuts=[1, 2]) == ["", "", "", "\ufffd"]
    assert stream(SPM, [1], [*fire[:2], 259], cuts=[1, 2]) == ["", "", "\ufffd Hello", ""]


def test_the_output_completes_a_character_that_the_prompt_began():
    fire = [3 + b for b in "🔥".encode()]
    assert stream(SPM, [259, *fire[:2]], fire[2:]) == ["🔥", ""]


@pytest.mark.parametrize(
    ("prompt", "text"), [([], "Hello"), ([1], "Hello"), ([260], " Hello"), ([261], " Hello")]
)
def test_a_space_is_dropped_at_the_start_of_the_whole_text_only(prompt, text):
    assert "".join(stream(SPM, prompt, [259])) == text
    assert SPM.decode([*prompt, 259]) == SPM.decode(prompt) + text


def test_special_tokens_are_text_only_when_asked_for():
    """Behaviour 43."""
    assert "".join(stream(SPM, [260], [259, 2])) == " Hello"
    assert "".join(stream(SPM, [260], [259, 2], skip=False)) == " Hello</s>"
    assert SMOL.decode([SMOL.eos_token_id]) == ""
    assert SMOL.special_token_id("<|im_end|>") == SMOL.eos_token_id == 2


def test_cost_of_a_token_does_not_grow_with_the_text():
    def seconds(count):
        detokenizer, ids = Detokenizer(SMOL, [1]), SMOL.encode("word " * count)
        start = time.process_time()
        for token_id in ids:
            detokenizer.push([token_id])
        return (time.process_time() - start) / len(ids)

    seconds(100)
    assert min(seconds(20_000) for _ in range(3)) < 5 * min(seconds(1000) for _ in range(5))
