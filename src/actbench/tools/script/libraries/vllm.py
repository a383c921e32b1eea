"""vLLM beside a simulated training: an engine in the same process takes its share of the card, and nothing computes.

An engine holds ``gpu_memory_utilization`` of the card's memory, for weights, cache, graphs and temporaries together:
the limit that vLLM documents for an instance, which its cache fills. Sleep mode frees all of it. A server holds nothing
of this card. Both complete prompts by tokens without meaning, as many as the settings allow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from actbench.device.patches import attribute
from actbench.errors import MeasurementError
from actbench.tools.script.libraries.importpatches import Change, Make, rebind
from actbench.tools.script.libraries.loggers import Silent, silent_module
from actbench.units import format_bytes

Note = Callable[[str], None]
Taken = Callable[[list[Tensor]], object]
"""Told of tensors that stand for what an engine takes of the card."""

UTILIZATION = 0.92
"""The share of the card that an engine takes where the script names none: the default of vLLM 0.33."""

_VERSION = "0.31.0"  # the newest that TRL 1.16 knows
_VOCABULARY = 64  # of a server that is never asked; every model has as many tokens
_LONGEST = 2048  # tokens, where a config names no length
_ENGINES = ("AsyncLLM", "AsyncLLMEngine", "LLMEngine")
_WITH_COPIES = ("trl.generation.vllm_generation", "trl.experimental.online_dpo.online_dpo_trainer")
"""Modules that import vLLM's classes if it is installed when they are imported."""


class SamplingParams:
    """What is asked of a completion; of all settings only those that say how much comes back have an effect."""

    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    temperature = 1.0
    detokenize = True

    def __init__(self, n: int = 1, **settings: Any) -> None:
        self.n = n
        vars(self).update(settings)

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return SamplingParams(**vars(self))


@dataclass
class Logprob:
    """A token's logarithmic probability, which is made up."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]


@dataclass
class CompletionOutput:
    """One completion of a prompt; its text is decoded when it is read."""

    index: int
    token_ids: list[int]
    logprobs: Logprobs | None
    decode: Callable[[list[int]], str] = field(repr=False)
    finish_reason: str = "length"
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """The text of the tokens."""
        return self.decode(self.token_ids)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the logarithmic probabilities."""
        return None if self.logprobs is None else -float(len(self.token_ids))

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return True


@dataclass
class RequestOutput:
    """The completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Logprobs | None
    outputs: list[CompletionOutput]
    finished: bool = True


class Engine:
    """An engine in this process: a pool on the card, in the two parts that wake up by themselves.

    Attributes:
        llm_engine: Answers what loads weights, and does nothing.
    """

    note: Note
    taken: Taken

    def __init__(
        self,
        model: str,
        *,
        tokenizer: Any = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = UTILIZATION,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        enable_sleep_mode: bool = False,
        trust_remote_code: bool = False,
        seed: int | None = 0,
        **settings: Any,
    ) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        self._vocabulary = text.vocab_size
        self._longest = max_model_len or getattr(text, "max_position_embeddings", None) or _LONGEST
        self._tokenizer, self._named, self._trusts = tokenizer, tokenizer or model, trust_remote_code
        self._draws, self._sleeps = random.Random(seed), enable_sleep_mode
        self._parts = self._shares(config, tensor_parallel_size, gpu_memory_utilization, kv_cache_memory_bytes)
        self._held: dict[str, Tensor] = {}
        self.llm_engine = Silent()
        vars(self.llm_engine)["model_config"] = Silent()
        vars(self.llm_engine.model_config)["max_model_len"] = self._longest
        self.wake_up()

    def _shares(self, config: Any, cards: int, utilization: float, cache_bytes: int | None) -> dict[str, int]:
        """Return the bytes of weights, and of all else, by what vLLM calls them when they wake up."""
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        weights_bytes = -(-weights_bytes_of(config, trusted=self._trusts) // cards)
        pool_bytes = math.ceil(total_bytes * utilization) if cache_bytes is None else weights_bytes + cache_bytes
        if pool_bytes <= weights_bytes:
            raise ValueError(
                f"No available memory for the cache blocks: gpu_memory_utilization={utilization:g} is "
                f"{format_bytes(pool_bytes)} of the card, and the weights take {format_bytes(weights_bytes)}"
            )
        self.note(
            f"vLLM is not run: {format_bytes(pool_bytes)} of the card stand for its engine "
            f"(gpu_memory_utilization={utilization:g}), all completions have the greatest length, and "
            + ("sleep mode frees the engine's memory." if self._sleeps else "without sleep mode it is never freed.")
        )
        if free_bytes < pool_bytes:
            self.note(
                f"vLLM's engine would not start: it takes {format_bytes(pool_bytes)} of the card, and "
                f"{format_bytes(free_bytes)} are free when it begins"
            )
        return {"weights": weights_bytes, "kv_cache": pool_bytes - weights_bytes}

    def sleep(self, level: int = 1, **options: Any) -> None:
        """Free what the engine has of the card; level 0 only pauses it."""
        if level and self._sleeps:
            self._held.clear()
            torch.cuda.empty_cache()  # as vLLM does then

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take the parts again that ``tags`` names, all without it; return whether the engine has all of them."""
        for tag, amount in self._parts.items():
            if tag not in self._held and (tags is None or tag in tags):
                self._held[tag] = torch.empty(amount, dtype=torch.uint8, device="cuda")
                self.taken([self._held[tag]])
        return len(self._held) == len(self._parts)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *arguments: Any,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return completions of prompts: of texts, lists of token ids, or dictionaries with either."""
        is_one = isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int))
        asked = sampling_params or SamplingParams()
        each_asked = repeat(asked) if isinstance(asked, SamplingParams) else asked
        return [
            self._complete(str(place), prompt, params)
            for place, (prompt, params) in enumerate(zip([prompts] if is_one else prompts, each_asked, strict=False))
        ]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *arguments: Any,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return completions of conversations."""
        given = {name: options[name] for name in ("chat_template", "tools") if options.get(name) is not None}
        given |= {"add_generation_prompt": True, **(options.get("chat_template_kwargs") or {})}
        many = [messages] if isinstance(messages[0], dict) else messages
        texts = [self.get_tokenizer().apply_chat_template(each, tokenize=False, **given) for each in many]
        ids = [self.get_tokenizer()(each, add_special_tokens=False)["input_ids"] for each in texts]
        prompts = [{"prompt": text, "prompt_token_ids": each} for text, each in zip(texts, ids, strict=True)]
        return self.generate(prompts, sampling_params)

    def _complete(self, name: str, prompt: Any, params: SamplingParams) -> RequestOutput:
        given = prompt if isinstance(prompt, dict) else {"prompt" if isinstance(prompt, str) else "ids": prompt}
        ids = given.get("prompt_token_ids", given.get("ids"))
        ids = list(self.get_tokenizer()(given["prompt"])["input_ids"] if ids is None else ids)
        room = self._longest - len(ids)
        if room <= 0:
            raise ValueError(f"The prompt of {len(ids)} tokens leaves no room in the model's length of {self._longest}")
        length = room if params.max_tokens is None else min(params.max_tokens, room)
        outputs = []
        for index in range(params.n):
            tokens = _tokens(self._draws, length, self._vocabulary)
            outputs.append(CompletionOutput(index, tokens, self._logprobs(tokens, params.logprobs), self._decode))
        of_prompt = self._logprobs(ids, params.prompt_logprobs)
        return RequestOutput(name, given.get("prompt"), ids, of_prompt and [None, *of_prompt[1:]], outputs)

    def _logprobs(self, tokens: Sequence[int], most: int | None) -> Logprobs | None:
        if most is None:
            return None
        return [
            {(token + k) % self._vocabulary: Logprob(-1.0 - k, k + 1) for k in range(_width(most, self._vocabulary))}
            for token in tokens
        ]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.get_tokenizer().decode(tokens, skip_special_tokens=True))

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        if self._tokenizer is None or isinstance(self._tokenizer, str):
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._named, trust_remote_code=self._trusts)
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return settings as they are when none are given."""
        return SamplingParams()

    def collective_rpc(self, *arguments: Any, **options: Any) -> list[Any]:
        """Call nothing: no worker is there."""
        return []

    def apply_model(self, function: Any) -> list[Any]:
        """Call nothing: no model is there."""
        return []

    def reset_prefix_cache(self, *arguments: Any, **options: Any) -> bool:
        """Do nothing: the cache stays as large as it is."""
        return True

    def start_profile(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""

    def stop_profile(self) -> None:
        """Do nothing."""


def weights_bytes_of(config: Any, *, trusted: bool) -> int:
    """Return the bytes of a model's weights: vLLM takes float16 or bfloat16, also where the config says float32."""
    import transformers

    usual = partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=trusted)
    make: Any = getattr(transformers, (config.architectures or [""])[0], usual)
    with torch.device("meta"):
        model: nn.Module = make(config)
    return 2 * sum(each.numel() for each in model.parameters())


class Client:
    """What TRL's client of a server answers without one: nothing is on this card, and nothing is sent."""

    note: Note

    def __init__(self, base_url: str | None = None, *arguments: Any, **options: Any) -> None:
        self.base_url, self.model, self.communicator = base_url or "", "", None
        self._draws = random.Random(0)
        self.note("vLLM's server is not asked: all completions have the greatest length.")

    def get_server_info(self) -> dict[str, Any]:
        """Return the settings that TRL asks for."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": {"backend": "nccl"}}

    def get_world_size(self) -> int:
        """Return the number of the server's workers."""
        return 1

    def image_features(self, images: Iterable[Any], *arguments: Any, **options: Any) -> list[Any]:
        """Return a place for each image of each prompt."""
        return [{"mm_placeholders": {"image": [{} for _ in each]}} if each else None for each in images]

    def generate(
        self,
        prompts: Sequence[Any],
        *arguments: Any,
        n: int = 1,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        generation_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return ``n`` completions of each prompt, a list of token ids or a text."""
        more = generation_kwargs or {}
        length, most = more.get("max_tokens", max_tokens), more.get("logprobs", logprobs)
        tokens = [_tokens(self._draws, length, _VOCABULARY) for _ in range(len(prompts) * n)]
        known = most is not None
        width = _width(most or 0, _VOCABULARY)
        return {
            # a token of a text has at least one byte
            "prompt_ids": [list(each.encode()) if isinstance(each, str) else list(each) for each in prompts],
            "completion_ids": tokens,
            "logprobs": [[[-1.0 - k for k in range(width)] for _ in each] for each in tokens] if known else None,
            "logprob_token_ids": [
                [[(token + k) % _VOCABULARY for k in range(width)] for token in each] for each in tokens
            ]
            if known
            else None,
        }

    def chat(self, messages: Sequence[Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return completions of conversations."""
        return self.generate([" ".join(str(each["content"]) for each in many) for many in messages], **options)

    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top_logprobs: int = 100,
        *arguments: Any,
        **options: Any,
    ) -> dict[str, Any]:
        """Return logarithmic probabilities of what follows the prompts."""
        rests = [list(each[length:]) for each, length in zip(sequences, prompt_lengths, strict=True)]
        return {
            "logprobs": [[[-1.0 - k for k in range(top_logprobs)] for _ in each] for each in rests],
            "logprob_token_ids": [[list(range(top_logprobs)) for _ in each] for each in rests],
            "actual_logprobs": [[[-1.0] for _ in each] for each in rests],
            "actual_token_ids": [[[token] for token in each] for each in rests],
        }

    def init_communicator(self, *arguments: Any, **options: Any) -> None:
        """Join nothing."""

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Group nothing."""
        yield

    def update_named_params(self, metadata: Any, named_params: Iterable[Any]) -> None:
        """Send nothing; parameters are gathered, as each is asked for."""
        for _ in named_params:
            pass

    def reset_prefix_cache(self) -> None:
        """Do nothing."""

    def close_communicator(self) -> None:
        """Leave nothing."""


def _tokens(draws: random.Random, length: int, vocabulary: int) -> list[int]:
    """Return tokens from the middle of a vocabulary: special ones, which would end a completion, are at its ends."""
    return draws.choices(range(vocabulary // 4, max(3 * vocabulary // 4, vocabulary // 4 + 1)), k=length)


def _width(most: int, vocabulary: int) -> int:
    """Return how many probabilities a token has: its own beside those of the ``most`` likely; -1 asks for all."""
    return vocabulary if most < 0 else min(most + 1, vocabulary)


def parts(note: Note, taken: Taken) -> tuple[dict[str, Change], dict[str, Make]]:
    """Return the changes of libraries that use vLLM, and what makes the modules that stand in for it."""
    engine = type("LLM", (Engine,), {"note": staticmethod(note), "taken": staticmethod(taken)})
    names: dict[str, Any] = {
        each.__name__: each for each in (engine, SamplingParams, Logprob, CompletionOutput, RequestOutput)
    }
    names |= {"StructuredOutputsParams": Silent}

    def copied(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:  # TRL may have been imported before, when vLLM was not there
            for name, value in names.items():
                stack.enter_context(attribute(module, name, value))
            return stack.pop_all()

    def served(module: ModuleType) -> AbstractContextManager[object]:
        own = {name: value for name, value in vars(Client).items() if name == "__init__" or not name.startswith("_")}
        with ExitStack() as stack:
            for name, value in {**own, "note": staticmethod(note)}.items():
                stack.enter_context(attribute(module.VLLMClient, name, value))
            return stack.pop_all()

    changes: dict[str, Change] = dict.fromkeys(_WITH_COPIES, copied)
    changes["trl.generation.vllm_client"] = served
    changes["trl.import_utils"] = lambda module: rebind(
        module, "is_vllm_available", lambda own: lambda *arguments, **options: True
    )
    refused = {name: _refusing(name) for name in _ENGINES}
    return changes, {"vllm": lambda: silent_module(__version__=_VERSION, **names, **refused)}


def _refusing(name: str) -> type:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise MeasurementError(f"vllm.{name} is not simulated; vllm.LLM is, which holds the same memory")

    return type(name, (), {"__init__": refuse, "from_engine_args": refuse, "from_vllm_config": refuse})
