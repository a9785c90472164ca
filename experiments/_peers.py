"""Systems that write text, behind one face: this library's, and what people use."""

from __future__ import annotations

import importlib
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from _models import Model
from _policies import build_decoder

import strata_jax as strata
from strata_jax.diagnostics import cost


class Run(NamedTuple):
    """One text that was written."""

    tokens: list[int]
    """What was written."""
    num_timed: int
    """How many of these tokens the seconds are of."""
    seconds: float
    """Of writing, without reading the prompt."""
    num_windows: int | None = None
    """How many windows wrote it, where the system tells."""


class System(Protocol):
    """Something that writes."""

    def run(
        self, prompt: list[int], temperature: float, seed: int, max_new_tokens: int
    ) -> Run:
        """Writes up to so many tokens, or to the end of the text."""
        ...


class OwnSystem:
    """This library, on some weights, with some policy."""

    def __init__(
        self,
        model: Model,
        drafter: str,
        policy: cost.Policy,
        max_length: int,
    ) -> None:
        self._decoder, self._settings = build_decoder(
            model, drafter, policy, max_length
        )
        self._model = model

    def run(
        self, prompt: list[int], temperature: float, seed: int, max_new_tokens: int
    ) -> Run:
        """As `System.run`."""
        found = strata.generate(
            self._decoder,
            self._model.params,
            self._model.tokenizer,
            prompt,
            max_new_tokens=max_new_tokens,
            progress=False,
            **{"temperature": temperature, "seed": seed, **self._settings},
        )
        tokens = found.tokens.tolist()
        num_windows = int((found.verdicts.num_emitted > 0).sum())
        return Run(tokens, len(tokens), sum(found.call_seconds), num_windows)


class _Times:
    """Notes when tokens come."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.counts.append(int(tokens.numel()))
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """`transformers` on PyTorch, in float32, with the same weights."""

    def __init__(self, model: Model, *, is_lookup: bool, shared: Any = None) -> None:
        """Copies the weights.

        Args:
          model: with float32 weights.
          is_lookup: whether it drafts by prompt lookup.
          shared: another system of this class, whose copy of the weights to use.

        Raises:
          ImportError: if PyTorch or transformers is missing; says what to install.
        """
        torch, transformers = _import("torch"), _import("transformers")
        torch.set_num_threads(num_cores())
        transformers.logging.set_verbosity_error()
        self._torch, self._set_seed = torch, transformers.set_seed
        self._is_lookup = is_lookup
        self._eos_ids = list(model.tokenizer.eos_ids)
        self.module = shared.module if shared else _torch_module(model)
        self.version = f"transformers {transformers.__version__}, {torch.__version__}"

    def run(
        self, prompt: list[int], temperature: float, seed: int, max_new_tokens: int
    ) -> Run:
        """As `System.run`."""
        options: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if self._is_lookup:
            options["prompt_lookup_num_tokens"] = 7
        times = _Times()
        self._set_seed(seed)
        ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            found = self.module.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                eos_token_id=self._eos_ids,
                pad_token_id=self._eos_ids[0],
                streamer=times,
                **options,
            )
        tokens = found[0, len(prompt) :].tolist()
        # The first count is of the prompt, the second of what its pass gave.
        seconds = times.times[-1] - times.times[1]
        return Run(tokens, sum(times.counts[2:]), seconds)


def _torch_module(model: Model) -> Any:
    torch, transformers = _import("torch"), _import("transformers")
    config, params = model.config, model.params
    module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.norm_epsilon,
            max_position_embeddings=config.max_position,
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()

    def tensor(array: Any) -> Any:
        return torch.tensor(np.asarray(array))

    names = {
        "self_attn.q_proj": "query",
        "self_attn.k_proj": "key",
        "self_attn.v_proj": "value",
        "self_attn.o_proj": "output",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    }
    norms = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
    }
    state = {
        "model.embed_tokens.weight": tensor(params.embedding),
        "model.norm.weight": tensor(params.final_norm),
        "lm_head.weight": tensor(
            params.embedding if params.head is None else params.head
        ),
    }
    for index, layer in enumerate(params.layers):
        start = f"model.layers.{index}."
        for name, field in names.items():
            state[f"{start}{name}.weight"] = tensor(getattr(layer, field)).T
        for name, field in norms.items():
            state[f"{start}{name}.weight"] = tensor(getattr(layer, field))
    module.load_state_dict(state)
    return module


class LlamaCpp:
    """llama.cpp through `llama-cpp-python`, on the GGUF file itself."""

    def __init__(self, path: pathlib.Path, max_length: int) -> None:
        """Loads the file.

        Raises:
          ImportError: if llama-cpp-python is missing; says what to install.
        """
        llama_cpp = _import("llama_cpp")
        self._model = llama_cpp.Llama(
            str(path),
            n_ctx=max_length,
            n_threads=num_cores(),
            n_threads_batch=num_cores(),
            verbose=False,
        )
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def run(
        self, prompt: list[int], temperature: float, seed: int, max_new_tokens: int
    ) -> Run:
        """As `System.run`."""
        model = self._model
        model.reset()
        model.set_seed(seed)
        tokens, times = [], []
        for token in model.generate(
            prompt, temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            tokens.append(int(token))
            times.append(time.perf_counter())
            if token == model.token_eos() or len(tokens) == max_new_tokens:
                break
        return Run(tokens, len(tokens) - 1, times[-1] - times[0])


def _import(name: str) -> Any:
    """Imports a peer's package, which is no part of any extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = {"llama_cpp": "llama-cpp-python"}.get(name, name)
        raise ImportError(f"no {name}: pip install {package}") from error


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def try_peers(
    makers: dict[str, Callable[[], Any]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Makes the peers that are installed; those that are not, with the reason."""
    found, missing = {}, {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            missing[name] = str(error)
    return found, missing
