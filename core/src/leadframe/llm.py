"""Offline generation: a model, a list of prompts, a list of completions."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from leadframe.engine import Completion, Engine, RequestOutput
from leadframe.errors import ConfigError, EngineDead, RequestError
from leadframe.sampling_params import SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids."""

_SECTIONS: dict[str, type[SchedulerConfig] | type[CacheConfig] | type[DeviceConfig]] = {
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "device": DeviceConfig,
}


def engine_config(model: str | os.PathLike[str] | None = None, **settings: Any) -> EngineConfig:
    """Builds an `EngineConfig` from flat keyword arguments, as the command line names them.

    Args:
      model: a Hugging Face directory, a GGUF file, or None for the embedded default model.
      **settings: any field of `EngineConfig` or of its sections, such as `max_num_seqs=64`.

    Raises:
      ConfigError: a name is unknown, or a value is of another type or out of range.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for key, value in settings.items():
        owner = _owner_of(key)
        if owner is None:
            top[key] = value
        else:
            sections[owner][key] = value
    for name, values in sections.items():
        top[name] = _SECTIONS[name](**values)
    return EngineConfig(model=model, **top)


def _owner_of(key: str) -> str | None:
    owners = {f.name: name for name, section in _SECTIONS.items() for f in _fields(section)}
    own = [f.name for f in _fields(EngineConfig) if f.name not in (*_SECTIONS, "model")]
    if key not in owners and key not in own:
        raise ConfigError(_unknown(key, [*own, *owners]))
    return owners.get(key)


def _fields(section: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(section)


def _unknown(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
    return f"unknown setting {key!r}{hint}"


class LLM:
    """A model on a device, for scripts.

    Args:
      model: a Hugging Face directory, a GGUF file, or None for the embedded default model.
      progress: called with (done, total) bytes while weights load; None shows nothing.
      **settings: see `engine_config`.

    Raises:
      ConfigError: a setting is wrong.
      ModelError: the model cannot be loaded.
      PlatformError: the device cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        config = engine_config(model, **settings)
        self._set_engine(Engine.from_config(config, progress=progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wraps an engine that nobody else drives."""
        llm = cls.__new__(cls)
        llm._set_engine(engine)
        return llm

    def _set_engine(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        # One mailbox a call, shared by its requests: calls may overlap, also across threads.
        self._mail: dict[str, deque[RequestOutput]] = {}
        self._lock = threading.RLock()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[Completion]:
        """Completes every prompt; the scheduler batches them.

        Args:
          prompts: one prompt or many.
          params: for all prompts, or one each; None takes the defaults.
          on_output: called with every output as it comes, for progress.

        Returns:
          One completion a prompt, in order.

        Raises:
          RequestError: a prompt or its parameters are invalid; nothing was generated.
        """
        batch = _as_batch(prompts)
        each = _params_for(batch, params)
        completions: dict[str, Completion] = {}
        mailbox: deque[RequestOutput] = deque()
        try:
            for prompt, own in zip(batch, each, strict=True):
                request_id, ids = self._add(prompt, own, mailbox)
                text = prompt if isinstance(prompt, str) else None
                completions[request_id] = Completion(request_id, ids, text)
            for output in self._outputs(mailbox, len(completions), self._advance):
                completions[output.request_id].add(output)
                if on_output is not None:
                    on_output(output)
        finally:
            self._forget(completions)
        return list(completions.values())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
    ) -> Completion:
        """Completes one conversation, rendered with the model's chat template.

        Raises:
          RequestError: the model has no chat template, or the messages do not fit it.
        """
        ids = self.engine.tokenizer.apply_chat_template(list(messages))
        return self.generate([ids], params)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt and yields its outputs as they come."""
        mailbox: deque[RequestOutput] = deque()
        request_id, _ = self._add(prompt, params or SamplingParams(), mailbox)
        try:
            yield from self._outputs(mailbox, 1, self._step)
        finally:
            self._forget([request_id])

    def close(self) -> None:
        """Frees the device."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            return list(self.engine.tokenizer.encode(prompt))
        except (TypeError, UnicodeError) as error:
            raise RequestError("the prompt is not valid Unicode text", param="prompt") from error

    def _add(
        self, prompt: Prompt, params: SamplingParams, mailbox: deque[RequestOutput]
    ) -> tuple[str, list[int]]:
        ids = self._encode(prompt)
        with self._lock:
            request_id = f"llm-{next(self._ids)}"
            self.engine.add_request(request_id, ids, params)
            self._mail[request_id] = mailbox
        return request_id, ids

    def _outputs(
        self, mailbox: deque[RequestOutput], num_open: int, drive: Callable[[], None]
    ) -> Iterator[RequestOutput]:
        """Yields what arrives for one call until its requests have ended; drives the engine."""
        while num_open:
            while mailbox:
                output = mailbox.popleft()
                num_open -= output.finished
                yield output
            if num_open:
                with self._lock:
                    if mailbox:  # another thread's step brought something meanwhile
                        continue
                    if not self.engine.has_work:
                        raise EngineDead("the engine was closed, or its request ended elsewhere")
                    drive()

    def _step(self) -> None:
        """Runs a step and has what it sampled at once."""
        self._post(self.engine.step())

    def _advance(self) -> None:
        """Runs a step while the outputs of the one before are made."""
        self.engine.advance(self._post)
        if not self.engine.has_work:
            self._post(self.engine.settle())

    def _post(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            mailbox = self._mail.get(output.request_id)
            if mailbox is not None:
                mailbox.append(output)

    def _forget(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._mail.pop(request_id, None)
                self.engine.abort(request_id)
            if not self.engine.has_work:  # nobody will drive the engine: others may wait for this
                self._post(self.engine.settle())


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or any(isinstance(item, Mapping) for item in prompts):
        raise RequestError("a prompt is a dict; give text, or a list of token ids", param="prompt")
    if hasattr(prompts, "tolist"):  # a NumPy array of ids
        prompts = cast("Sequence[int]", prompts.tolist())
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _params_for(
    batch: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(batch)
    is_list = isinstance(params, Sequence)
    if not is_list or not all(isinstance(own, SamplingParams) for own in params):
        raise RequestError(
            f"params is {repr(params)[:64]}; it must be a SamplingParams, or a list of one for "
            "each prompt",
            param="params",
        )
    if len(params) != len(batch):
        raise RequestError(
            f"{len(batch)} prompts came with {len(params)} sampling parameters; "
            "give one for all, or one each",
            param="params",
        )
    return list(params)
