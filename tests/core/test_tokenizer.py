"""Tokenizers of Hugging Face directories, chat templates, and what they refuse."""

import json

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from leadframe.errors import CheckpointError, ModelNotFound, RequestError, UnsupportedModel
from leadframe.tokenizer import load_tokenizer
from leadframe.tokenizer.chat_template import MAX_PROMPT_CHARS

TEXTS = [
    "Hello world",
    "  two leading, two trailing  ",
    "tabs\tand\n\nlines",
    "日本語 and ünïcödé and 🎉👩‍👧",
    "<s>spelled out</s> special",
    "",
]
SYSTEM_USER = [{"role": "system", "content": "s"}, {"role": "user", "content": "héllo"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def sentence_piece():
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"Helowrd"]
    words = ["lo", "wo", "ld", "▁wo", "Hel", "He"]
    vocab = {token: index for index, token in enumerate(letters + words)}
    merges = [("l", "o"), ("w", "o"), ("l", "d"), ("▁", "wo"), ("H", "e"), ("He", "l")]
    bpe = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend


def write(path, backend, **settings):
    backend.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def add_first_token(backend):
    first = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=first)


def through_transformers(path):
    return transformers.PreTrainedTokenizerFast.from_pretrained(path)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("first", [True, False])
def test_ids_and_text_equal_transformers(tmp_path, make, first):
    backend = make()
    if first:
        add_first_token(backend)
    write(tmp_path, backend, add_bos_token=not first)  # the file with the rules wins
    tokenizer, reference = load_tokenizer(tmp_path), through_transformers(tmp_path)
    for text in TEXTS:
        for add in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=add)
            assert ids == reference.encode(text, add_special_tokens=add)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_ids_of_special_tokens(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, byte_level()))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(2)
    assert tokenizer.special_token_id("</s>") == 1
    assert tokenizer.special_token_id("a") is None
    assert tokenizer.vocab_size == len(through_transformers(tmp_path))


def test_a_token_with_a_role_is_special_even_if_its_file_does_not_say_so(tmp_path):
    backend = byte_level()
    backend.add_tokens(["<end>"])
    tokenizer = load_tokenizer(write(tmp_path, backend, eos_token="<end>"))
    reference = through_transformers(tmp_path)
    ids = tokenizer.encode("a<end>b")
    assert ids == reference.encode("a<end>b")
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "ab"


def test_a_role_may_be_an_object_with_the_text(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), eos_token={"content": "</s>"}))
    assert tokenizer.eos_token_id == 1


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    tokenizer = load_tokenizer(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a longer text")) == "a longer text"
    assert len(tokenizer.encode("a")) == 1


def test_ids_outside_the_vocabulary_have_no_text(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, byte_level()))
    assert tokenizer.decode([10**6, -1, 2**40]) == ""


def test_text_of_half_a_character_is_a_replacement(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, sentence_piece()))
    assert tokenizer.token_text(3 + 0xC3) == "\ufffd"
    assert tokenizer.decode([3 + 0xC3, 3 + 0xA9]) == "é"


def test_directories_without_tokenizer_json_go_through_transformers(tmp_path):
    backend = byte_level()
    data = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(data["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in data["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hello world") == backend.encode("Hello world").ids
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize("text", ["", "{}", "nonsense"])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_no_tokenizer_at_all(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_decoder_that_needs_more_than_one_token_is_refused(tmp_path):
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        load_tokenizer(write(tmp_path, backend))


class TestChat:
    def test_ids_equal_transformers(self, tmp_path):
        tokenizer = load_tokenizer(write(tmp_path, byte_level()))
        reference = through_transformers(tmp_path)
        for prompt in (True, False):
            got = tokenizer.apply_chat_template(SYSTEM_USER, add_generation_prompt=prompt)
            want = reference.apply_chat_template(SYSTEM_USER, add_generation_prompt=prompt)
            assert got == want["input_ids"]

    def test_exactly_one_first_token(self, tmp_path):
        """Behaviour 22: the template writes it, so encoding adds none."""
        backend = byte_level()
        add_first_token(backend)
        tokenizer = load_tokenizer(write(tmp_path, backend))
        assert tokenizer.encode("x")[0] == tokenizer.bos_token_id
        assert tokenizer.apply_chat_template(SYSTEM_USER).count(tokenizer.bos_token_id) == 1

    def test_no_template_says_which_flag_to_use(self, tmp_path):
        """Behaviour 23."""
        tokenizer = load_tokenizer(write(tmp_path, byte_level(), chat_template=None))
        assert tokenizer.chat_template is None
        with pytest.raises(RequestError, match="--chat-template"):
            tokenizer.apply_chat_template(SYSTEM_USER)
        given = tokenizer.apply_chat_template(SYSTEM_USER, chat_template="{{ bos_token }}")
        assert given == [tokenizer.bos_token_id]
        ours = load_tokenizer(tmp_path, chat_template="x")
        assert ours.decode(ours.apply_chat_template(SYSTEM_USER)) == "x"

    @pytest.mark.parametrize("place", ["config", "json", "jinja", "list"])
    def test_every_place_where_a_template_may_be(self, tmp_path, place):
        named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
        value = {"config": "D", "list": named}.get(place, "old")
        write(tmp_path, byte_level(), chat_template=value)
        if place == "json":
            (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
        if place == "jinja":
            (tmp_path / "chat_template.jinja").write_text("D")
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.chat_template == "D"
        tools = [{"type": "function"}]
        text = tokenizer.decode(tokenizer.apply_chat_template(SYSTEM_USER, tools=tools))
        assert text == ("T" if place == "list" else "D")

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[9].content }}", "UndefinedError"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{% for x in %}", "not valid"),
            ("{{ ''.__class__.__mro__ }}", "SecurityError"),
            ("{{ messages.append(1) }}", "SecurityError"),
            ("{% set n = namespace(__init__=1) %}", "SecurityError"),
            ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
            ("{% for i in range(10**9) %}x{% endfor %}", "Range"),
        ],
    )
    def test_a_failing_template_is_the_requests_error(self, tmp_path, template, said):
        tokenizer = load_tokenizer(write(tmp_path, byte_level()))
        with pytest.raises(RequestError, match=said) as caught:
            tokenizer.apply_chat_template(SYSTEM_USER, chat_template=template)
        assert caught.value.status == 400

    def test_a_template_cannot_exhaust_memory(self, tmp_path):
        tokenizer = load_tokenizer(write(tmp_path, byte_level()))
        loop = "{% for i in range(90000) %}{{ '" + "x" * 1000 + "' }}{% endfor %}"
        with pytest.raises(RequestError, match=f"{MAX_PROMPT_CHARS:,}"):
            tokenizer.apply_chat_template(SYSTEM_USER, chat_template=loop)

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            ("{% generation %}a{% endgeneration %}b", "ab"),
            (
                "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                "01",
            ),
            ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
            ("{{ strftime_now('%Y') | length }}", "4"),
            ("{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}", "2"),
            ("{{ messages[-1]['content'].strip() }}", "héllo"),
            ("{{ extra }}", "given"),
        ],
    )
    def test_what_templates_may_use(self, tmp_path, template, text):
        tokenizer = load_tokenizer(write(tmp_path, byte_level()))
        ids = tokenizer.apply_chat_template(SYSTEM_USER, chat_template=template, extra="given")
        assert tokenizer.decode(ids) == text

    def test_many_templates_do_not_pile_up(self, tmp_path):
        tokenizer = load_tokenizer(write(tmp_path, byte_level()))
        for i in range(40):
            tokenizer.apply_chat_template(SYSTEM_USER, chat_template=f"{i}")
        assert len(tokenizer._compiled) <= 8
