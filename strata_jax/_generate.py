"""Text in, text out: the host's loop around `decode`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks
from strata_jax._decode import decode, output_tokens
from strata_jax._request import DecoderState
from strata_jax._status import Status, raise_if_failed
from strata_jax._types import FinishReason, SpeculativeDecoder, Verdict

# Requests of at least so many tokens show a progress bar, unless text is streamed.
_LONG_RUN = 64


class TextStream(Protocol):
    """Turns token ids into text as they come."""

    def step(self, token: int, /) -> str:
        """Returns the text that became certain with this token."""
        ...

    def flush(self) -> str:
        """Returns what was held back."""
        ...


class TextCodec(Protocol):
    """What `generate` needs of a tokenizer."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Token ids that end a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns token ids."""
        ...

    def decode_stream(self, *, special: bool) -> TextStream:
        """Returns a new stream."""
        ...


@dataclasses.dataclass(frozen=True)
class Generation:
    """A finished run.

    Attributes:
      text: the generated text, up to and with a stop string.
      tokens: `[n]` int32, the tokens it consists of.
      prompt_tokens: `[m]` int32.
      finish_reason: "eos", "stop", "length", "failed" or "interrupted".
      status: `Status` bits; not OK if it failed.
      verdicts: those of all windows that ran, as NumPy arrays, leading axis windows.
        They may hold tokens behind a stop string.
      call_seconds: wall time of each call of `decode`; the first one compiles.
      windows_per_call: windows of each of these calls.
      prompt_seconds: wall time of checking and reading the prompt.
    """

    text: str
    tokens: np.ndarray
    prompt_tokens: np.ndarray
    finish_reason: str
    status: Status
    verdicts: Verdict
    call_seconds: tuple[float, ...]
    windows_per_call: int
    prompt_seconds: float


def generate(
    decoder: SpeculativeDecoder,
    params: Any,
    tokenizer: TextCodec,
    prompt: str | Sequence[int] | np.ndarray,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    on_text: Callable[[str], None] | None = None,
    progress: bool | None = None,
    windows_per_call: int = 8,
    throw: bool = True,
    **settings: Any,
) -> Generation:
    """Generates text for one request and streams it.

    Args:
      decoder: the decoder.
      params: the weights.
      tokenizer: text to ids and back, as `strata_jax.checkpoints` loads it.
      prompt: text, or token ids.
      max_new_tokens: the token budget, which counts the output of a resumed run.
      stop: texts that end the generation; the stop text itself is part of the result.
      eos_ids: token ids that end the generation; None takes the tokenizer's, () none.
      on_text: called with each new piece of text.
      progress: whether to show a progress bar on stderr; None shows one on long runs
        whose text is not streamed.
      windows_per_call: windows between two looks at the text, in one program.
      throw: whether to raise if the request fails.
      **settings: what `decoder.init` takes: seed, temperature, ..., the gate's. A run
        is resumed by giving prompt and output as `prompt`, with `prompt_length` (and
        `window`, for verifiers that draw by window).

    Returns:
      The generation. Ctrl-C ends it early, with what there is.

    Raises:
      ValueError: if an argument is wrong, before any work starts.
      DecodingError: if the request fails and `throw`; all text was streamed before,
        and the error holds its tokens.

    Exactness: that of the decoder; stop texts only cut the output.
    """
    max_new_tokens = _checks.check_integer("max_new_tokens", max_new_tokens, 0)
    windows_per_call = _checks.check_integer("windows_per_call", windows_per_call, 1)
    if isinstance(stop, str) or not isinstance(stop, Iterable):
        raise ValueError(f"stop must be a sequence of texts, got {stop!r}")
    stop = tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop must hold non-empty texts, got {list(stop)!r}")
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids

    started = time.perf_counter()
    state = decoder.init(
        params, ids, max_new_tokens=max_new_tokens, eos_ids=eos_ids, **settings
    )
    prompt_tokens = np.asarray(ids, np.int32)
    already = int(state.counts.num_output)
    jax.block_until_ready(state.target_state)
    read = time.perf_counter()

    if progress is None:
        progress = on_text is None and max_new_tokens >= _LONG_RUN
    output = _Output(tokenizer, stop, on_text)
    verdicts: list[Verdict] = []
    call_seconds: list[float] = []
    interrupted = False
    with _progress_bar(progress, max_new_tokens - already) as advance:
        try:
            while not output.is_stopped and _is_running(state):
                called = time.perf_counter()
                state, chunk = decode(
                    decoder, params, state, windows_per_call, throw=False
                )
                verdicts.append(jax.tree.map(np.asarray, chunk))
                call_seconds.append(time.perf_counter() - called)
                advance(output.extend(verdicts[-1].tokens))
        except KeyboardInterrupt:
            interrupted = True
    output.finish()

    status = Status(int(state.status)) if not interrupted else Status.OK
    if output.is_stopped:
        reason = "stop"
    elif interrupted:
        reason = "interrupted"
    else:
        reason = FinishReason(int(state.finish_reason)).name.lower()
    if throw and reason == "failed":
        raise_if_failed(status, output_tokens(state))
    return Generation(
        text=output.text,
        tokens=np.asarray(output.tokens, np.int32),
        prompt_tokens=prompt_tokens,
        finish_reason=reason,
        status=status,
        verdicts=_concatenate(verdicts, decoder.num_draft_tokens),
        call_seconds=tuple(call_seconds),
        windows_per_call=windows_per_call,
        prompt_seconds=read - started,
    )


def _is_running(state: DecoderState) -> bool:
    return int(state.finish_reason) == FinishReason.RUNNING


class _Output:
    """Text so far; watches for stop texts."""

    def __init__(
        self,
        tokenizer: TextCodec,
        stop: Sequence[str],
        on_text: Callable[[str], None] | None,
    ):
        self.text = ""
        self.tokens: list[int] = []
        self.is_stopped = False
        self._stream = tokenizer.decode_stream(special=False)
        self._stop = stop
        self._reach = max((len(text) for text in stop), default=1) - 1
        self._on_text = on_text

    def extend(self, tokens: jax.Array) -> int:
        """Takes in emitted tokens, up to a stop text; returns how many."""
        before = len(self.tokens)
        for token in np.ravel(tokens):
            if token >= 0 and not self.is_stopped:
                self.tokens.append(int(token))
                self._append(self._stream.step(int(token)))
        return len(self.tokens) - before

    def finish(self) -> None:
        if not self.is_stopped:
            self._append(self._stream.flush())

    def _append(self, piece: str) -> None:
        start = max(len(self.text) - self._reach, 0)
        text = self.text + piece
        ends = [
            place + len(stop)
            for stop in self._stop
            if (place := text.find(stop, start)) >= 0
        ]
        if ends:
            self.is_stopped = True
            text = text[: min(ends)]
        piece, self.text = text[len(self.text) :], text
        if piece and self._on_text is not None:
            self._on_text(piece)


@contextlib.contextmanager
def _progress_bar(is_shown: bool, total: int) -> Iterator[Callable[[int], object]]:
    if not is_shown:
        yield lambda count: None
        return
    try:
        import tqdm
    except ImportError as error:
        raise ImportError(
            "a progress bar needs tqdm: pip install 'strata-jax[hf]', or give "
            "progress=False"
        ) from error
    with tqdm.tqdm(total=total, unit="token", desc="generate") as bar:
        yield bar.update


def _concatenate(verdicts: list[Verdict], num_draft_tokens: int) -> Verdict:
    none = jnp.zeros(0, jnp.int32)
    empty = Verdict(
        tokens=jnp.zeros((0, num_draft_tokens + 1), jnp.int32),
        num_accepted=none,
        num_emitted=none,
        source=none,
        status=none,
        kind=jnp.zeros((0, num_draft_tokens), jnp.int32),
    )
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), empty, *verdicts)
    ran = (joined.num_emitted > 0) | (joined.status != 0)
    return jax.tree.map(lambda leaf: leaf[ran], joined)
