"""The tokenizer that a GGUF file describes."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from strata_jax.checkpoints._gguf_header import GgufHeader, read_gguf_header
from strata_jax.checkpoints._optional import import_hf

if TYPE_CHECKING:
    pass
from strata_jax.checkpoints._tokenizer import NAMED_TOKENS, Tokenizer

_GGUF_MODELS = ("gpt2",)


_GGUF_PRE_TOKENIZERS = ("smollm",)


# Token types of a GGUF file.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5


_GGUF_NAMES = {"unk": "unknown", "pad": "padding"}


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Control tokens become special tokens, user-defined tokens are recognised anywhere
    in a text. `eos_ids` are the file's end-of-text, end-of-turn and end-of-message ids.

    Args:
      path: a GGUF file with a `gpt2` vocabulary and the pre-tokenizer `smollm` (each
        digit by itself, then the words of GPT-2, as bytes).

    Returns:
      The tokenizer.

    Raises:
      ImportError: if the `tokenizers` package is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: naming the file and the fault, if it is damaged, has no usable
        vocabulary, or needs another model or pre-tokenizer.

    Exactness: neither; the ids are those of `transformers`.
    """
    tokenizers = import_hf("tokenizers")
    header = read_gguf_header(pathlib.Path(path))
    _check_kind(header, "model", _GGUF_MODELS)
    _check_kind(header, "pre", _GGUF_PRE_TOKENIZERS)
    for key in ("add_space_prefix", "add_bos_token", "add_eos_token"):
        if (value := header.metadata.get(f"tokenizer.ggml.{key}", False)) is not False:
            raise ValueError(
                f"{header.path}: tokenizer.ggml.{key} = {value!r} is not supported; "
                "supported: absent or False"
            )
    tokens = _strings(header, "tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{header.path}: tokenizer.ggml.tokens lists a token twice")
    merges = [tuple(merge.split(" ")) for merge in _strings(header, "merges")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise ValueError(
                f"{header.path}: tokenizer.ggml.merges: {' '.join(merge)!r} is not two "
                "tokens that make a third"
            )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    # Added in the order of their ids, which they already have in the vocabulary.
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, _token_types(header, tokens), strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    named = {
        name: _token_id(header, _GGUF_NAMES.get(name, name), tokens)
        for name in NAMED_TOKENS
    }
    ends = [named["eos"], *(_token_id(header, n, tokens) for n in ("eot", "eom"))]
    template = header.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"{header.path}: tokenizer.chat_template must be text")
    return Tokenizer(
        backend=backend,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        chat_template=template,
        special_tokens={
            f"{name}_token": tokens[token_id]
            for name, token_id in named.items()
            if token_id is not None
        },
    )


def _check_kind(header: GgufHeader, key: str, supported: tuple[str, ...]) -> None:
    kind = header.metadata.get(f"tokenizer.ggml.{key}")
    # The type first: the entry may be an array, which compares element by element.
    if type(kind) is not str or kind not in supported:
        raise ValueError(
            f"{header.path}: tokenizer.ggml.{key} {kind!r} is not supported; "
            f"supported: {', '.join(supported)}"
        )


def _strings(header: GgufHeader, key: str) -> list[str]:
    values = header.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise ValueError(
            f"{header.path}: tokenizer.ggml.{key} must be a list of strings"
        )
    return values


def _token_types(header: GgufHeader, tokens: list[str]) -> list[int]:
    values = header.metadata.get("tokenizer.ggml.token_type")
    # Without them, chat markup would silently be read as plain text.
    if not isinstance(values, np.ndarray) or len(values) != len(tokens):
        raise ValueError(
            f"{header.path}: tokenizer.ggml.token_type must have one integer for each "
            f"of the {len(tokens)} tokens"
        )
    known = (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED)
    kinds = values.tolist()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind not in known:
            raise ValueError(
                f"{header.path}: token {token!r} has type {kind}, which a "
                f"{_GGUF_MODELS[0]} vocabulary cannot have"
            )
    return kinds


def _token_id(header: GgufHeader, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = header.metadata.get(key)
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise ValueError(
            f"{header.path}: {key} = {token_id!r} is not one of the {len(tokens)} ids"
        )
    return token_id
