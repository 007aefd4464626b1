"""`leadframe generate [MODEL] --prompt …`: completes prompts in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leadframe.cli.engine_args import (
    add_engine_arguments,
    announce_device,
    engine_config,
    parse_with_config_file,
)
from leadframe.cli.parser import Parser, add_field, token_count
from leadframe.config import EngineConfig
from leadframe.errors import ConfigError, LeadframeError
from leadframe.sampling_params import SamplingParams

if TYPE_CHECKING:
    from leadframe.engine import Completion, Engine, RequestOutput


def run(argv: Sequence[str]) -> int:
    """Completes one prompt as a stream, or many as a batch.

    Returns:
      0, or 1 when a prompt failed.
    """
    args = parse_with_config_file(_parser(), argv)
    config, params, prompts = engine_config(args), _params(args), _prompts(args)

    announce_device(config, sys.stderr)

    from leadframe.cli.progress import progress_bar
    from leadframe.engine import Engine

    with progress_bar("loading weights", is_bytes=True) as progress:
        engine = Engine.from_config(config, progress=progress)
    try:
        session = _Session(engine, params, args.chat)
        if len(prompts) == 1 and not args.json:
            return session.stream(prompts[0])
        return session.batch(prompts, as_json=args.json)
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class _Session:
    """Prompts on one engine, with one set of sampling parameters."""

    engine: Engine
    params: SamplingParams
    chat: bool

    def stream(self, prompt: str) -> int:
        """Prints the text of one completion as it comes."""
        self.engine.add_request("0", self._encode(prompt), self.params)
        last: RequestOutput | None = None
        while self.engine.has_work:
            for last in self.engine.step():
                print(last.text, end="", flush=True)
        print()
        if last is not None and last.error:
            raise LeadframeError(f"generation failed: {last.error}")
        return 0

    def batch(self, prompts: Sequence[str], *, as_json: bool) -> int:
        """Completes prompts together and prints them in order."""
        from leadframe.cli.progress import progress_bar
        from leadframe.engine import Completion

        results: dict[str, Completion] = {}
        for index, prompt in enumerate(prompts):
            ids = self._encode(prompt)
            self.engine.add_request(str(index), ids, self.params)
            results[str(index)] = Completion(str(index), ids, prompt)
        done = 0
        with progress_bar("generating") as progress:
            progress(0, len(prompts))
            while self.engine.has_work:
                for output in self.engine.step():
                    results[output.request_id].add(output)
                    done += output.finished
                progress(done, len(prompts))
        for result in results.values():
            print(json.dumps(_row(result)) if as_json else _text(result))
        return int(any(result.error for result in results.values()))

    def _encode(self, prompt: str) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ConfigError("the model has no tokenizer; it can only be served token ids")
        if not self.chat:
            return list(tokenizer.encode(prompt))
        return list(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))


def _row(result: Completion) -> dict[str, Any]:
    reason = result.finish_reason
    return {
        "prompt": result.prompt,
        "text": result.text,
        "finish_reason": None if reason is None else reason.value,
        "prompt_tokens": len(result.prompt_token_ids),
        "output_tokens": len(result.token_ids),
        "error": result.error,
    }


def _text(result: Completion) -> str:
    prompt = json.dumps(result.prompt, ensure_ascii=False)
    return f"### {prompt}\n{result.error or result.text}\n"


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt)
    if args.prompts_file:
        prompts += _read_prompts(args.prompts_file)
    if not prompts:
        raise ConfigError("no prompt is given; use --prompt TEXT or --prompts-file FILE")
    return prompts


def _read_prompts(path: str) -> list[str]:
    """Reads one prompt a line; a line that is a JSON string or has a "prompt" may span lines."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts-file {path}: {error}") from None
    return [_prompt_of(line) for line in text.splitlines() if line.strip()]


def _prompt_of(line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, dict):
        value = value.get("prompt")
    return value if isinstance(value, str) else line


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def _parser() -> Parser:
    parser = Parser(prog="leadframe generate", description="Complete prompts in the terminal.")
    add_field(parser, EngineConfig, "model", "model", nargs="?", metavar="MODEL")
    text = parser.add_argument_group("prompts")
    text.add_argument(
        "-p", "--prompt", action="append", default=[], metavar="TEXT",
        help="what to complete; one prompt streams, several run as a batch",
    )  # fmt: skip
    text.add_argument(
        "--prompts-file", metavar="FILE",
        help="one prompt a line, as text, as a JSON string or as an object with a \"prompt\"; "
        "- reads standard input",
    )  # fmt: skip
    text.add_argument(
        "--chat", action="store_true", help="send each prompt as a user's message, through the "
        "model's chat template",
    )  # fmt: skip
    text.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    sampling = parser.add_argument_group("sampling")
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
        add_field(sampling, SamplingParams, name, type=kind)
    add_field(sampling, SamplingParams, "max_tokens", type=token_count, default=128)
    add_field(sampling, SamplingParams, "stop", action="append", default=[], metavar="TEXT")
    add_field(sampling, SamplingParams, "ignore_eos", action="store_true")
    add_engine_arguments(parser)
    return parser
