"""Tokenizers built from GGUF vocabularies equal Transformers' of the same file."""

import json

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from leadframe.errors import CheckpointError, UnsupportedModel
from leadframe.models.default_model import default_model_path
from leadframe.tokenizer import load_tokenizer

TEXTS = [
    "Hello world, don't we'll I'M",
    "  leading, trailing  ",
    "tabs\tand\n\n\nlines \r\n end",
    "日本語テスト ünïcödé 🎉👩‍👧 नमस्ते",
    "x=1;y=22;z=333,4444.5 1a2b",
    "def f(x):\n    return x**2  # comment\n",
    "CamelCase snake_case HTTPServer!!! ...",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]
CHAT = [{"role": "user", "content": "Hello 1 2"}, {"role": "assistant", "content": "x"}]


def through_transformers(path):
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def write(path, arch, model, tokens, **fields):
    """Writes a GGUF file with nothing but a vocabulary, and what Transformers wants of a model."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def trained():
    """(tokens, merges) of a byte-level vocabulary trained on the texts."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=special)
    backend.train_from_iterator(TEXTS * 5, trainer)
    data = backend.get_vocab()
    tokens = sorted(data, key=data.get)

    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return tokens, merges


def byte_level(path, trained, pre, arch="llama", **fields):
    tokens, merges = trained
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    given = {"token_merges": merges, "token_types": kinds, "bos_token_id": 0, "eos_token_id": 2}
    return write(path, arch, "gpt2", tokens, tokenizer_pre=pre, **(given | fields))


def same(path, texts=TEXTS, reference=None):
    tokenizer, reference = load_tokenizer(path), reference or through_transformers(path)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    return tokenizer


class TestDefaultModel:
    def test_ids_text_and_chat_equal_transformers(self):
        path = default_model_path()
        reference = through_transformers(path)
        tokenizer = same(path, reference=reference)
        got = tokenizer.apply_chat_template(CHAT)
        assert got == reference.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
        assert tokenizer.encode("x")[0] != 1
        assert tokenizer.vocab_size == 49152

    def test_every_digit_is_split_off_before_merging(self):
        """As the original tokenizer and llama.cpp do; Transformers leaves it out for GGUF."""
        tokenizer = load_tokenizer(default_model_path())
        ids = tokenizer.encode("a  12")
        assert [tokenizer.token_text(i) for i in ids] == ["a", "  ", "1", "2"]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "tekken", "llama-bpe"])
@pytest.mark.parametrize("first", [True, False])
def test_byte_level(tmp_path, trained, pre, first):
    arch = "qwen2" if pre == "qwen2" else "llama"
    path = byte_level(tmp_path / "x.gguf", trained, pre, arch, add_bos_token=first)
    tokenizer = same(path)
    assert (tokenizer.encode("x")[0] == 0) == first


def test_llama_3_files_that_do_not_say_start_with_the_first_token(tmp_path, trained):
    tokenizer = load_tokenizer(byte_level(tmp_path / "x.gguf", trained, "llama-bpe"))
    assert tokenizer.encode("x")[0] == 0
    tokenizer = load_tokenizer(byte_level(tmp_path / "y.gguf", trained, "gpt-2"))
    assert tokenizer.encode("x")[0] != 0


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_a_word_that_no_merge_makes_is_a_token_for_llama_3_only(tmp_path, trained, pre, whole):
    tokens, merges = trained
    fields = {"tokenizer_pre": pre, "token_merges": merges, "add_bos_token": False}
    path = write(tmp_path / "x.gguf", "llama", "gpt2", [*tokens, "qzqz"], **fields)
    assert (load_tokenizer(path).encode("qzqz") == [len(tokens)]) == whole


def test_digits_never_merge_where_they_are_split_off(tmp_path, trained):
    tokens, merges = trained
    fields = {"token_merges": [*merges, "1 2"], "tokenizer_pre": "smollm"}
    path = write(tmp_path / "x.gguf", "llama", "gpt2", [*tokens, "12"], **fields)
    assert len(load_tokenizer(path).encode("12")) == 2


def test_user_defined_tokens_stay_whole_and_are_text(tmp_path, trained):
    tokens, merges = trained
    kinds = [3] * 3 + [1] * (len(tokens) - 3) + [4]
    fields = {"token_merges": merges, "token_types": kinds, "tokenizer_pre": "gpt-2"}
    path = write(tmp_path / "x.gguf", "llama", "gpt2", [*tokens, "<think>"], **fields)
    tokenizer = same(path, ["a<think>b"])
    assert len(tokens) in tokenizer.encode("a<think>b")
    assert tokenizer.decode([len(tokens)]) == "<think>"


SPM_WORDS = ["▁", "l", "o", "w", "e", "r", "d", "H", "lo", "wo", "▁wo", "ld", "rld", "Hel", "He"]
SPM_WORDS += ["▁▁", "é", "▁H", "▁He", "▁Hello", "llo", "Hello"]


def sentence_piece(path, arch, spaces="▁▁", **fields):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = [spaces if word == "▁▁" else word for word in SPM_WORDS]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    given = {
        "token_scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "token_types": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    return write(path, arch, "llama", [*tokens, *words], **(given | fields))


SPM_TEXTS = ["Hello world", " Hello  world ", "lower   Helo é ü 🎉", "", "</s> Hello"]


@pytest.mark.parametrize("fields", [{}, {"add_bos_token": False}])
def test_sentence_piece_of_llama(tmp_path, fields):
    tokenizer = same(sentence_piece(tmp_path / "x.gguf", "llama", **fields), SPM_TEXTS)
    assert (tokenizer.encode("Hello")[0] == 1) != bool(fields)
    assert tokenizer.decode(tokenizer.encode("Hello  é🎉")) == "Hello  é🎉"


def test_sentence_piece_of_gemma(tmp_path):
    misleading = [float(i * 7 % 11) for i in range(259 + len(SPM_WORDS))]
    fields = {"add_bos_token": True, "token_scores": misleading}
    path = sentence_piece(tmp_path / "x.gguf", "gemma3", spaces="  ", **fields)
    tokenizer = same(path, SPM_TEXTS)
    assert tokenizer.decode(tokenizer.encode("  Hello")) == "  Hello"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"tokenizer_pre": "chameleon"}, UnsupportedModel, "chameleon"),
        ({"token_types": [1]}, CheckpointError, "token_type has 1 entries"),
        ({"token_merges": ["no such"]}, CheckpointError, "merges do not fit"),
    ],
)
def test_byte_level_vocabularies_that_cannot_be_used(tmp_path, trained, changes, error, said):
    pre = changes.pop("tokenizer_pre", "gpt-2")
    with pytest.raises(error, match=said):
        load_tokenizer(byte_level(tmp_path / "x.gguf", trained, pre, **changes))


def test_vocabularies_of_other_kinds_and_none(tmp_path):
    path = write(tmp_path / "x.gguf", "llama", "bert", ["a"])
    with pytest.raises(UnsupportedModel, match="'bert'"):
        load_tokenizer(path)
    path = sentence_piece(tmp_path / "y.gguf", "llama", token_scores=[0.0])
    with pytest.raises(CheckpointError, match="scores has 1 entries"):
        load_tokenizer(path)
    writer = gguf.GGUFWriter(tmp_path / "z.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="no vocabulary"):
        load_tokenizer(tmp_path / "z.gguf")
