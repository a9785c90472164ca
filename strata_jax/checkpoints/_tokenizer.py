"""Text to token ids and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, final

from strata_jax.checkpoints._optional import import_hf

if TYPE_CHECKING:
    import tokenizers


_REPLACEMENT = "\ufffd"


ID_LIMIT = 2**32  # of the tokenizers package
# The special tokens that a chat template may name.
NAMED_TOKENS = ("bos", "eos", "unk", "pad")


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
        in_range = 0 <= index < ID_LIMIT
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


def _raise_exception(message: str) -> NoReturn:
    raise import_hf("jinja2").TemplateError(message)
