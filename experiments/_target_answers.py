"""Texts that a language model wrote itself, with its hidden states, kept on disk.

A draft head learns to foresee its target on what the target writes, so most of the
data are answers that the target samples: to questions made from templates and words,
and to passages from public-domain text. Each shard of data depends on its number
alone, so a collection that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import _shakespeare_corpus
import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import checkpoints, models

KINDS = ("chat", "code", "prose", "text")
# Temperatures at which answers are sampled, and how often.
_TEMPERATURES = ((1.0, 0.6), (0.7, 0.25), (0.0, 0.15))
_KIND_SHARES = (0.55, 0.15, 0.2, 0.1)
_PASSAGE_TOKENS = 48
_TURNS = 4  # questions that one text may hold
_HELD_OUT_WORDS = 10  # one word in so many is in no training question
_NUM_WORDS = 12_000

_CHAT = (
    "What is {0}?",
    "Explain {0} to a child.",
    "Explain the difference between {0} and {1}.",
    "Tell me about {0}.",
    "Write a short story about {0} and {1}.",
    "Write a poem about {0}.",
    "Give me three facts about {0}.",
    "What are the advantages and disadvantages of {0}?",
    "How does {0} relate to {1}?",
    "Write a paragraph with the words {0} and {1}.",
    "Use the word {0} in a sentence.",
    "List five things that remind you of {0}.",
    "I am worried about {0}. What should I do?",
    "Write a polite email about {0}.",
    "Summarize the history of {0}.",
    "What would happen if there were no {0}?",
    "Give me a recipe that has something to do with {0}.",
    "Why do people like {0}?",
    "How can I learn more about {0}?",
    "Describe {0} without using the word {1}.",
    "Write a dialogue between two friends about {0}.",
    "What does {0} mean, and where does the word come from?",
    "Make a plan for a day that begins with {0} and ends with {1}.",
    "Is {0} more important than {1}?",
    "Write a news report about {0}.",
    "Ask me three questions about {0}.",
    "Translate the word {0} into French, German and Spanish.",
    "Give advice to somebody who wants to start with {0}.",
    "Name ten words that rhyme with or resemble {0}.",
    "Write an advertisement for {0}.",
    "What can science say about {0}?",
    "Compare {0} in the past and today.",
    "Continue: Once upon a time there was {0}",
    "Correct this sentence: they was looking for {0} yesterday.",
    "Write a product description of {0}.",
    "How would you measure {0}?",
)
_CODE = (
    "Write a Python function that counts {0} in a list.",
    "Write a Python class for {0} with methods to add and remove {1}.",
    "Write a JavaScript function that sorts {0} by {1}.",
    "Write a SQL table for {0} and a query that finds all with {1}.",
    "Write a C program that reads {0} and prints {1}.",
    "Write an HTML page about {0} with a list.",
    "Write a JSON document with three records about {0}.",
    "Make a table in Markdown with five rows about {0} and {1}.",
    "Write unit tests for a function called {0}.",
    "Count from 1 to 20 and write {0} after each number.",
    "Repeat the sentence 'I like {0} and {1}' five times.",
    "Fix the error in this code: def {0}(x) return x + 1",
)


class Shard(NamedTuple):
    """Some texts, their target's states, and where they come from."""

    tokens: np.ndarray
    """[N, L] int32."""
    hidden: np.ndarray
    """[N, L, D] float16, after the last layer, before the final norm."""
    log_normalizer: np.ndarray
    """[N, L] float32, log of the sum of the exponentials of the logits."""
    is_written: np.ndarray
    """[N, L] bool, whether the target wrote the token (the others are prompt)."""
    kind: np.ndarray
    """[N] int32, index into `KINDS`."""
    temperature: np.ndarray
    """[N] float32, at which it was written."""


class Prompts:
    """Makes the texts that answers are written to.

    Args:
      tokenizer: the target's.
      corpus: public-domain documents.
      is_held_out: whether to use the words and documents that are held out.
    """

    def __init__(
        self,
        tokenizer: checkpoints.Tokenizer,
        corpus: _shakespeare_corpus.Corpus,
        *,
        is_held_out: bool,
    ) -> None:
        documents = corpus.held_out if is_held_out else corpus.training
        self._tokenizer = tokenizer
        self._words = _find_words(tokenizer, is_held_out)
        self._documents = [text.decode() for text in documents.values()]

    def make(
        self, number: int, num_texts: int, length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns prompts `[N, M]`, kinds `[N]` and temperatures `[N]` of a shard.

        In a prompt -1 stands where the target writes until it ends its turn.

        Args:
          number: of the shard.
          num_texts: N.
          length: L, of each text in tokens.
        """
        rng = np.random.default_rng([number, 0x616E73])
        kinds = rng.choice(len(KINDS), size=num_texts, p=_KIND_SHARES)
        values, shares = zip(*_TEMPERATURES, strict=True)
        temperatures = rng.choice(values, size=num_texts, p=shares)
        prompts = np.full((num_texts, length), -1, np.int32)
        for row, kind in zip(prompts, kinds, strict=True):
            pieces = list(self._pieces(rng, KINDS[kind], length))
            ids = np.concatenate(pieces)[:length]
            row[: len(ids)] = ids
        return prompts, kinds.astype(np.int32), temperatures.astype(np.float32)

    def _pieces(
        self, rng: np.random.Generator, kind: str, length: int
    ) -> Iterator[np.ndarray]:
        stop = np.array([-1], np.int32)
        if kind in ("prose", "text"):
            document = self._documents[rng.integers(len(self._documents))]
            start = int(rng.integers(max(1, len(document) - 8 * length)))
            start = document.find("\n", start) + 1
            ids = self._tokenizer.encode(document[start : start + 8 * length])
            yield np.array(ids[: _PASSAGE_TOKENS if kind == "prose" else length])
            yield stop
            return
        templates = _CHAT if kind == "chat" else _CODE
        for turn in range(_TURNS):
            words = [self._words[i] for i in rng.integers(len(self._words), size=2)]
            question = templates[rng.integers(len(templates))].format(*words)
            yield np.array(self._turn(question, is_first=turn == 0), np.int32)
            yield stop

    def _turn(self, question: str, *, is_first: bool) -> list[int]:
        chat = [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(chat)
        if not is_first:
            # The system's turn stands once; the end of the last answer is written.
            text = "\n" + text[text.index("<|im_start|>user") :]
        return self._tokenizer.encode(text, affixes=False)


def _find_words(tokenizer: checkpoints.Tokenizer, is_held_out: bool) -> list[str]:
    """Words of the vocabulary, which is in the order of their frequency."""
    words = []
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token])
        if re.fullmatch(r" [a-z]{4,}", text):
            words.append(text[1:])
    held_out = {
        word
        for word in words
        if hashlib.sha256(word.encode()).digest()[0] % _HELD_OUT_WORDS == 0
    }
    return [word for word in words[:_NUM_WORDS] if (word in held_out) == is_held_out]


def write_shard(
    config: models.LlamaConfig,
    params: models.LlamaParams,
    prompts: Prompts,
    number: int,
    *,
    num_texts: int,
    length: int,
    eos_id: int,
    is_rounded: bool = False,
) -> Shard:
    """Lets the target write one shard of texts.

    Args:
      config: the target's shape.
      params: its weights.
      prompts: where texts begin.
      number: of the shard; all of it depends on this.
      num_texts: N.
      length: L.
      eos_id: the token that ends a turn.
      is_rounded: whether the factors of matrix products are rounded to bfloat16, which
        takes half the time and is close enough to learn from.
    """
    dtype = jnp.dtype(jnp.bfloat16 if is_rounded else jnp.float32)
    given, kind, temperature = prompts.make(number, num_texts, length)
    key = jax.random.key(number)
    tokens, hidden, normalizer, is_written = _write(
        config, eos_id, dtype, params, given, temperature, key
    )
    hidden = np.asarray(hidden)
    if not np.isfinite(hidden).all():
        raise ValueError("hidden states do not fit float16; use another target")
    return Shard(
        tokens=np.asarray(tokens),
        hidden=hidden,
        log_normalizer=np.asarray(normalizer),
        is_written=np.asarray(is_written),
        kind=kind,
        temperature=temperature,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _write(
    config: models.LlamaConfig,
    eos_id: int,
    dtype: jnp.dtype,
    params: models.LlamaParams,
    given: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    num_texts, length = given.shape
    rows = jnp.arange(num_texts, dtype=jnp.int32)
    shape = (length, config.num_kv_heads, config.head_dim, num_texts)
    keys = values = jnp.zeros(shape)
    params = _with_matrices(params, dtype)
    layers = range(config.num_layers)

    def next_token(carry: tuple, position: jax.Array) -> tuple:
        cache, token, place, is_written = carry
        logits, hidden, cache = _run_texts(config, params, cache, token, position)
        uniforms = jax.random.uniform(jax.random.fold_in(key, position), (2, num_texts))
        drawn, normalizer = _draw(logits, temperature, uniforms)
        prompt = given[rows, jnp.minimum(place, length - 1)]
        writes = (prompt < 0) | (place >= length)
        following = jnp.where(writes, drawn, prompt)
        # At the end of its turn the target is given the next question.
        goes_on = ~writes | (drawn == eos_id)
        place = place + goes_on.astype(jnp.int32)
        outputs = (token, hidden.astype(jnp.float16), normalizer, is_written)
        return (cache, following, place, writes), outputs

    carry = (
        (tuple(keys for _ in layers), tuple(values for _ in layers)),
        given[:, 0],
        jnp.ones(num_texts, jnp.int32),
        jnp.zeros(num_texts, bool),
    )
    positions = jnp.arange(length, dtype=jnp.int32)
    _, outputs = jax.lax.scan(next_token, carry, positions)
    tokens, hidden, normalizer, is_written = (
        jnp.swapaxes(leaf, 0, 1) for leaf in outputs
    )
    return tokens, hidden, normalizer, is_written


def _with_matrices(params: models.LlamaParams, dtype: jnp.dtype) -> models.LlamaParams:
    def convert(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if leaf.ndim > 1 else leaf

    return jax.tree.map(convert, params)


def _run_texts(
    config: models.LlamaConfig,
    params: models.LlamaParams,
    cache: tuple,
    tokens: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array, tuple]:
    """Runs the next token of all texts together: logits, hidden states, the cache.

    The texts are the last axis of the cache, so that attention is a loop over positions
    of elementwise products; as many small matrix products it would take most of the
    time.
    """
    num_texts, width = tokens.shape[0], config.head_dim
    groups = config.num_heads // config.num_kv_heads
    keys, values = list(cache[0]), list(cache[1])
    half = width // 2
    frequencies = config.rope_theta ** (-jnp.arange(half) / half)
    cosine, sine = jnp.cos(position * frequencies), jnp.sin(position * frequencies)

    def norm(states: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jnp.mean(states * states, axis=-1, keepdims=True)
        return states * jax.lax.rsqrt(mean + config.norm_epsilon) * scale

    def turn(states: jax.Array) -> jax.Array:
        first, second = jnp.split(states.reshape(num_texts, -1, width), 2, axis=-1)
        return jnp.concatenate(
            [first * cosine - second * sine, second * cosine + first * sine], axis=-1
        )

    def multiply(states: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.dot(
            states.astype(matrix.dtype), matrix, preferred_element_type=jnp.float32
        )

    hidden = params.embedding[tokens].astype(jnp.float32)
    for index, layer in enumerate(params.layers):
        normed = norm(hidden, layer.attention_norm)
        query = turn(multiply(normed, layer.query)) * width**-0.5
        query = query.reshape(num_texts, config.num_kv_heads, groups, width)
        key = turn(multiply(normed, layer.key))
        value = multiply(normed, layer.value).reshape(num_texts, -1, width)
        start = (position, 0, 0, 0)
        keys[index] = jax.lax.dynamic_update_slice(
            keys[index], _texts_last(key)[None], start
        )
        values[index] = jax.lax.dynamic_update_slice(
            values[index], _texts_last(value)[None], start
        )
        mixed = _attend(_texts_last(query), keys[index], values[index], position)
        mixed = jnp.moveaxis(mixed, -1, 0)
        hidden = hidden + multiply(mixed.reshape(num_texts, -1), layer.output)
        normed = norm(hidden, layer.feed_forward_norm)
        inner = jax.nn.silu(multiply(normed, layer.gate)) * multiply(normed, layer.up)
        hidden = hidden + multiply(inner, layer.down)
    table = params.embedding if params.head is None else params.head
    logits = multiply(norm(hidden, params.final_norm), table.T)
    return logits, hidden, (tuple(keys), tuple(values))


def _texts_last(states: jax.Array) -> jax.Array:
    return jnp.moveaxis(states, 0, -1)


def _attend(
    query: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array
) -> jax.Array:
    """Attention of `[kv, groups, head_dim, N]` to the positions up to this one."""
    num_kv_heads, groups, width, num_texts = query.shape

    def score(row: jax.Array, scores: jax.Array) -> jax.Array:
        products = query * keys[row][:, None]
        # Four sums side by side, since one waits for each of its terms.
        sums = [
            functools.reduce(
                jnp.add, [products[:, :, i] for i in range(start, width, 4)]
            )
            for start in range(4)
        ]
        return scores.at[row].set(functools.reduce(jnp.add, sums))

    def mix(row: jax.Array, mixed: jax.Array) -> jax.Array:
        return mixed + weights[row][:, :, None] * values[row][:, None]

    shape = (keys.shape[0], num_kv_heads, groups, num_texts)
    scores = jnp.full(shape, -jnp.inf)
    weights = jax.nn.softmax(jax.lax.fori_loop(0, position + 1, score, scores), axis=0)
    return jax.lax.fori_loop(0, position + 1, mix, jnp.zeros_like(query))


def _draw(
    logits: jax.Array, temperature: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws a token of each row, and returns the log of its sum at temperature 1.

    In two steps, a block of the vocabulary and a token in it: data for training need
    not be drawn as the library draws.
    """
    num_texts, vocab_size = logits.shape
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    normalizer = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1)) + largest[:, 0]
    scaled = (logits - largest) / jnp.maximum(temperature, 1e-3)[:, None]
    padded = jnp.pad(jnp.exp(scaled), ((0, 0), (0, -vocab_size % 64)))
    blocks = padded.reshape(num_texts, -1, 64)
    ends = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    block = jnp.sum(ends <= uniforms[0, :, None] * ends[:, -1:], axis=-1)
    weights = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    ends = jnp.cumsum(weights, axis=-1)
    place = jnp.sum(ends <= uniforms[1, :, None] * ends[:, -1:], axis=-1)
    drawn = jnp.minimum(block * 64 + place, vocab_size - 1).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, best), normalizer


def save_shard(path: pathlib.Path, shard: Shard) -> None:
    """Writes a shard, whole or not at all."""
    checkpoints.save_safetensors(path, shard._asdict())


def load_shard(path: pathlib.Path) -> Shard:
    """Reads a shard that `save_shard` wrote."""
    return Shard(**checkpoints.read_safetensors(path))
