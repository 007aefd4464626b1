"""docs/from-vllm.md says what is: its lists are held to the code."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from leadframe import LLM, SamplingParams
from leadframe.cli.serve import _parser
from leadframe.engine import Completion
from leadframe.errors import ConfigError
from leadframe.metrics import EngineMetrics, StartupLedger
from leadframe.server.schema import ChatBody, CompletionBody

TEXT = (Path(__file__).parents[2] / "docs" / "from-vllm.md").read_text(encoding="utf-8")
MESSAGES = [{"role": "user", "content": "hi"}]
FLAG = r"`(--[a-z-]+)"


def between(start, end):
    return TEXT[TEXT.index(start) :].split(end, 1)[0]


def rows(section):
    """The cells of a section's tables, without their headers."""
    lines = [x for x in between(section, "\n## ").splitlines() if x.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def has_flag(name):
    try:
        return bool(_parser().option(name))
    except ConfigError:
        return False


def test_flags_that_are_the_same_exist():
    flags = re.findall(FLAG, between("The same:", "Other names"))
    assert len(flags) > 20
    assert [name for name in flags if not has_flag(name)] == []


def test_flags_with_another_name_do_not_exist_and_their_counterparts_do():
    table = [line.split(" | ") for line in between("Other names", "\n## ").splitlines()]
    pairs = [(row[0], row[1]) for row in table if row[0].startswith("| `")]
    theirs = [x for left, _ in pairs for x in re.findall(FLAG + "`", left)]
    ours = [x for _, right in pairs for x in re.findall(FLAG, right)]
    assert len(theirs) > 20
    assert [name for name in theirs if has_flag(name)] == []
    assert [name for name in ours if not has_flag(name)] == []


def test_every_flag_is_listed_or_new_here():
    new = {
        "--help", "--device", "--options", "--op", "--op-fallback", "--max-body-bytes",
        "--startup-json", "--log-level",
    }  # fmt: skip
    known = {x for x in _parser()._option_string_actions if x.startswith("--")}
    listed = set(re.findall(FLAG, TEXT))
    assert {x for x in known if not x.startswith("--no-")} - listed <= new


def test_fields_that_are_served_exist_and_refused_ones_do_not():
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields}
    served = re.findall(r"`(\w+)`", between("Served under the same name", "\n\n"))
    assert len(served) > 20
    assert set(served) <= fields
    for left, _ in (row for row in rows("## Request fields") if row[1].startswith("refused")):
        refused = set(re.findall(r"`(\w+)`", left)) - {"image_url", "structural_tag"}
        refused -= {"logprobs", "top_logprobs", "prompt_logprobs"}
        for name in refused - {"json", "regex", "choice", "grammar"}:
            with pytest.raises(ValidationError, match=name):
                ChatBody.model_validate({"messages": MESSAGES, name: "x"})


def test_fields_pass_with_the_values_that_it_lists():
    for name, value in (
        ("tools", []), ("tool_choice", None), ("tool_choice", "none"), ("tool_choice", "auto"),
        ("functions", []), ("echo", False), ("add_special_tokens", False), ("best_of", 1),
        ("continue_final_message", False), ("use_beam_search", False), ("length_penalty", 1),
        ("suffix", ""), ("seed", -1), ("n", 128), ("stop", ["x"] * 16),
    ):  # fmt: skip
        assert f"`{name}" in between("## Request fields", "\n## ")
        ChatBody.model_validate({"messages": MESSAGES, name: value})


def test_metrics_are_the_same_where_it_says_so_and_absent_where_it_says_that():
    metrics = EngineMetrics(ledger=StartupLedger())
    metrics.set_info("cache_config_info", {"block_size": "16"})
    exposed = set(re.findall(r"# TYPE leadframe_(\w+) ", metrics.render().decode()))
    table = rows("## Metrics")
    assert len(table) > 8
    for left, right in table:
        names = set(re.findall(r"`(\w+)`", left))
        missing = names - exposed
        assert missing == (set() if right.startswith("same") else names), left


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (LLM, ["generate", "chat", "stream", "tokenizer"]),
        (Completion, ["text", "token_ids", "finish_reason", "logprobs"]),
        (SamplingParams, ["bad_words_ids", "structured_outputs"]),
    ],
)
def test_python_names_on_the_right_exist(owner, names):
    right = " ".join(row[1] for row in rows("## Python"))
    known = {*dir(owner), *getattr(owner, "__dataclass_fields__", {})}
    assert set(names) <= known
    assert all(re.search(rf"\b{name}\b", right) for name in names if name != "structured_outputs")


def test_python_names_on_the_left_are_absent():
    for name in ("get_tokenizer", "encode", "embed", "classify", "score", "beam_search", "sleep"):
        assert not hasattr(LLM, name)
    for name in ("n", "bad_words"):
        with pytest.raises(TypeError):
            SamplingParams(**{name: 1})
