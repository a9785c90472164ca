"""Tokenizers: text to token ids and back, from a GGUF file or a tokenizer.json."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, final

import numpy as np

from strata_jax.checkpoints._gguf_header import GgufHeader, read_gguf_header
from strata_jax.checkpoints._json import read_json_object
from strata_jax.checkpoints._optional import import_hf

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\ufffd"
_ID_LIMIT = 2**32  # of the tokenizers package
_GGUF_MODELS = ("gpt2",)
_GGUF_PRE_TOKENIZERS = ("smollm",)
# Token types of a GGUF file.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_NAMED_TOKENS = ("bos", "eos", "unk", "pad")
_GGUF_NAMES = {"unk": "unknown", "pad": "padding"}


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back.

    Made by `load_gguf_tokenizer` and `load_tokenizer_json`.

    Attributes:
      backend: the `tokenizers.Tokenizer` that does the work.
      eos_ids: ids that end a text, in the file's order; may be empty.
      chat_template: the file's Jinja template, or None.
      special_tokens: text of the tokens that a template may name, such as
        `bos_token`.

    Exactness: neither; `encode` gives the ids of `transformers`.
    """

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    eos_ids: tuple[int, ...]
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(
        self, text: str, *, special: bool = True, affixes: bool = True
    ) -> list[int]:
        """Converts text to token ids.

        A character is lost if the vocabulary has no token for one of its bytes (a few
        control characters and unassigned planes, in SmolLM2); `transformers` loses it
        too.

        Args:
          text: any text, also empty.
          special: whether a special token written in the text becomes that token.
            False reads text from users as plain text, so that it cannot close its
            turn of a chat; there are then no affixes.
          affixes: whether the tokens that the file puts around a text (BOS, EOS) are
            added. False for text from `apply_chat_template`, which writes its own.

        Returns:
          Token ids.

        Raises:
          TypeError: if `text` is not a str.
          ValueError: if `text` holds a lone surrogate, which is not a character.

        Exactness: neither; the ids are those of `transformers`.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"text must be a str, got {type(text).__name__}; decode bytes with "
                "text.decode('utf-8')"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate {text[error.start]!r} at index "
                f"{error.start}; replace it with "
                "text.encode('utf-8', 'replace').decode('utf-8')"
            ) from error
        backend = self.backend if special else self._plain_backend
        return backend.encode(text, add_special_tokens=special and affixes).ids

    def decode(self, ids: Iterable[SupportsIndex], *, special: bool = True) -> str:
        """Converts token ids to text.

        Args:
          ids: token ids, as ints or an integer array `[T]`.
          special: whether special tokens are written out; False leaves them out.

        Returns:
          The text; bytes that are not UTF-8 become U+FFFD.

        Raises:
          TypeError: if an id is not an integer.
          ValueError: if an id is not in the vocabulary.

        Exactness: neither.
        """
        return self.backend.decode(
            [self._check_id(token_id) for token_id in ids],
            skip_special_tokens=not special,
        )

    def decode_stream(self, *, special: bool = True) -> DecodeStream:
        """Starts to decode ids that arrive one at a time.

        Args:
          special: whether special tokens are written out; False leaves them out.

        Returns:
          A stream whose pieces join to what `decode` gives for all ids.

        Exactness: neither.
        """
        return DecodeStream(self, special=special)

    def token_to_id(self, token: str) -> int:
        """Looks up a token.

        Args:
          token: the token as the vocabulary spells it, such as `<|im_end|>`.

        Returns:
          Its id.

        Raises:
          ValueError: if the vocabulary has no such token.

        Exactness: neither.
        """
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"token {token!r} is not in the vocabulary; text is converted by "
                "encode()"
            )
        return token_id

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Writes a chat as the text that the model was trained on.

        The template is a program from the file: it runs in Jinja's sandbox, sees only
        the arguments here and the special tokens, and has no clock.

        Args:
          messages: turns such as `{"role": "user", "content": "Hello"}`.
          add_generation_prompt: whether the text ends where the model's answer begins.

        Returns:
          Text for `encode(text, affixes=False)`.

        Raises:
          ImportError: if `jinja2` is not installed.
          TypeError: if a message is not a mapping.
          ValueError: if a message has no role, there is no template, or it fails.

        Exactness: neither; the text is that of `transformers`.
        """
        if isinstance(messages, str | Mapping):
            raise TypeError(
                "messages must be a sequence of messages, got one "
                f"{type(messages).__name__}; put it in a list"
            )
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise TypeError(
                    f"messages[{index}] must be a mapping with role and content, got "
                    f"{type(message).__name__}"
                )
            if not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{index}] must have a role that is a str")
        if self.chat_template is None:
            raise ValueError(
                "the tokenizer's file has no chat template; write the prompt as plain "
                "text"
            )
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        # Whatever goes wrong in a program from the file is that file's fault.
        except Exception as error:
            raise ValueError(f"the chat template failed: {error}") from error

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A second one, since the switch is a state that two threads would share.
        plain = import_hf("tokenizers").Tokenizer.from_str(self.backend.to_str())
        plain.encode_special_tokens = True
        return plain

    @functools.cached_property
    def _template(self) -> Any:
        sandbox = import_hf("jinja2.sandbox")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        # Jinja's own filter escapes for HTML.
        environment.filters["tojson"] = functools.partial(
            json.dumps, ensure_ascii=False
        )
        try:
            return environment.from_string(self.chat_template)
        except import_hf("jinja2").TemplateError as error:
            raise ValueError(f"not a Jinja template: {error}") from error

    def _check_id(self, token_id: SupportsIndex) -> int:
        index = operator.index(token_id)
        # Not `index < vocab_size`: the ids of a vocabulary may have gaps.
        in_range = 0 <= index < _ID_LIMIT
        if not in_range or self.backend.id_to_token(index) is None:
            raise ValueError(
                f"token id {index} is not in the vocabulary of {self.vocab_size}"
            )
        return index


@final
class DecodeStream:
    """Decodes ids one at a time without ever emitting half a character.

    Made by `Tokenizer.decode_stream`. The pieces that `step` and one final `flush`
    return join to what `Tokenizer.decode` gives for all ids at once.

    Exactness: neither.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        self._decode = functools.partial(tokenizer.decode, special=special)
        # The ids of the piece before: some decoders write a token by its neighbour.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._num_emitted = 0  # characters of `_pending` already returned

    def step(self, token_id: SupportsIndex) -> str:
        """Takes the next id.

        Args:
          token_id: a token id.

        Returns:
          The text that is now certain; empty while a character is incomplete.

        Raises:
          TypeError: if the id is not an integer.
          ValueError: if the id is not in the vocabulary; the stream is unchanged.

        Exactness: neither.
        """
        text = self._pending_text([*self._pending, operator.index(token_id)])
        self._pending.append(operator.index(token_id))
        # The bytes of an incomplete character decode to U+FFFD at the end.
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._num_emitted :]
        self._num_emitted += len(piece)
        if text and certain == text:
            self._context, self._pending, self._num_emitted = self._pending, [], 0
        return piece

    def flush(self) -> str:
        """Ends the text.

        Returns:
          What was held back: U+FFFD for an incomplete character, or empty. The stream
          then starts a new text.

        Exactness: neither.
        """
        piece = self._pending_text(self._pending)[self._num_emitted :]
        self._context, self._pending, self._num_emitted = [], [], 0
        return piece

    def _pending_text(self, pending: list[int]) -> str:
        before = self._decode(self._context)
        return self._decode([*self._context, *pending])[len(before) :]


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
        for name in _NAMED_TOKENS
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


def load_tokenizer_json(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads a Hugging Face `tokenizer.json`.

    From the files beside it, where they exist: `eos_ids` (`generation_config.json`,
    else `config.json`, else the `eos_token` of `tokenizer_config.json`), the chat
    template (`chat_template.jinja`, else `tokenizer_config.json`) and the special
    tokens. Truncation and padding that the file asks for are switched off: an id
    must not depend on how long the text is.

    Args:
      path: a `tokenizer.json`, or the folder that holds one.

    Returns:
      The tokenizer.

    Raises:
      ImportError: if the `tokenizers` package is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: naming the file and the fault, if one of the files is damaged.

    Exactness: neither; the ids are those of `transformers`.
    """
    tokenizers = import_hf("tokenizers")
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    text = path.read_bytes()
    read_json_object(path, text)
    try:
        backend = tokenizers.Tokenizer.from_buffer(text)
    # The package raises bare exceptions.
    except Exception as error:
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    settings_path = path.with_name("tokenizer_config.json")
    settings = _read_if_present(settings_path)
    special_tokens = {}
    for name in _NAMED_TOKENS:
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special_tokens[f"{name}_token"] = token
    template_path = path.with_name("chat_template.jinja")
    if template_path.exists():
        template = template_path.read_text(encoding="utf-8")
    else:
        template = _default_template(settings_path, settings.get("chat_template"))
    return Tokenizer(
        backend=backend,
        eos_ids=_eos_ids(path, backend, special_tokens.get("eos_token")),
        chat_template=template,
        special_tokens=special_tokens,
    )


def _raise_exception(message: str) -> NoReturn:
    raise import_hf("jinja2").TemplateError(message)


def _read_if_present(path: pathlib.Path) -> dict[str, Any]:
    return read_json_object(path, path.read_bytes()) if path.exists() else {}


def _default_template(path: pathlib.Path, stated: Any) -> str | None:
    if stated is None or isinstance(stated, str):
        return stated
    # Several templates: a list of names and texts.
    for entry in stated if isinstance(stated, list) else ():
        if isinstance(entry, dict) and entry.get("name") == "default":
            return _default_template(path, entry.get("template"))
    raise ValueError(
        f"{path}: chat_template must be text or have a default, got neither"
    )


def _eos_ids(
    path: pathlib.Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        source = path.with_name(name)
        stated = _read_if_present(source).get("eos_token_id")
        if stated is None:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < _ID_LIMIT:
                raise ValueError(f"{source}: eos_token_id {token_id!r} is not an id")
        return tuple(ids)
    if eos_token is None:
        return ()
    token_id = backend.token_to_id(eos_token)
    if token_id is None:
        raise ValueError(f"{path}: eos_token {eos_token!r} is not in the vocabulary")
    return (token_id,)


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
