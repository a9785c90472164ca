"""Windows of a layer and of a model, compared bit by bit with one row at a time."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import strata_jax as strata
from strata_jax import experts, models, targets

_MAX_WINDOW = 8
# Every width once: windows come in such rounds, so that each has the same number.
_ROUND_ROWS = _MAX_WINDOW * (_MAX_WINDOW + 1) // 2
# Past two blocks of the attention, if there is time for it.
_TEXT_LENGTH = 384
# A one-layer model at a width where batched products do change bits.
MODEL = models.MoeConfig(
    vocab_size=256,
    hidden_size=256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=8,
    num_experts_per_token=2,
    expert_size=256,
    max_position=1024,
)
# 13 bits, as the encoder's scales have; the values' deviation is about 256**-0.5.
_TRELLIS_SCALE = np.float32(6553 * 2.0**-17)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What is compared.

    Attributes:
      name: what the table calls it.
      layouts: the experts' layouts; the experts take them in turn.
      place: "resident" on the device, on the "host", or "cold" on disk.
      num_cached: R, experts that are kept on the device, of those that are not there.
    """

    name: str
    layouts: tuple[experts.ExpertLayout, ...]
    place: str
    num_cached: int = 0


def _uniform(
    name: str, place: str, num_cached: int = 0, *, is_folded: bool = False
) -> Configuration:
    parts = (name, *(["hadamard"] if is_folded else []), place)
    layouts = (experts.uniform_layout(name, is_folded=is_folded),)
    return Configuration("-".join(parts), layouts, place, num_cached)


CONFIGURATIONS = (
    _uniform("float32", "resident"),
    _uniform("bfloat16", "host"),
    _uniform("q8_0", "resident"),
    _uniform("q8_0", "cold", is_folded=True),
    _uniform("q4_0", "host", 3),
    _uniform("q4_1", "cold", 3),
    _uniform("trellis2_mul1", "resident", is_folded=True),
    _uniform("trellis3_mcg", "host", 2),
    _uniform("trellis4_3inst", "cold", 3, is_folded=True),
    Configuration(
        "mixed-cold",
        (
            experts.uniform_layout("float32"),
            experts.uniform_layout("bfloat16"),
            experts.uniform_layout("q8_0", is_folded=True),
            experts.uniform_layout("q4_0"),
            experts.ExpertLayout("q4_1", "q8_0", "bfloat16"),
            experts.uniform_layout("trellis2_mul1", is_folded=True),
            experts.uniform_layout("trellis3_mcg"),
            experts.ExpertLayout(
                "trellis4_3inst", "q4_0", "q8_0", is_folded=True, seed=7
            ),
        ),
        "cold",
        4,
    ),
)


@dataclasses.dataclass(frozen=True)
class Tally:
    """Floats that were compared; `largest_difference` is of those that differ."""

    num_compared: int = 0
    num_different: int = 0
    num_not_finite: int = 0
    largest_difference: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        """Returns the tally of both."""
        return Tally(
            self.num_compared + other.num_compared,
            self.num_different + other.num_different,
            self.num_not_finite + other.num_not_finite,
            max(self.largest_difference, other.largest_difference),
        )


def compare(found: np.ndarray, expected: np.ndarray) -> Tally:
    """Compares float32 arrays bit by bit where both are finite."""
    is_finite = np.isfinite(found) & np.isfinite(expected)
    found, expected = found[is_finite], expected[is_finite]
    is_different = found.view(np.uint32) != expected.view(np.uint32)
    gaps = np.abs(found[is_different] - expected[is_different])
    return Tally(
        num_compared=found.size,
        num_different=int(is_different.sum()),
        num_not_finite=int((~is_finite).sum()),
        largest_difference=float(gaps.max(initial=0)),
    )


def _draw_matrix(
    rng: np.random.Generator, name: str, num_outputs: int, num_inputs: int
) -> np.ndarray:
    """Draws a normal matrix, as it is stored: folding would not change its law."""
    stored = experts.find_format(name)
    if not name.startswith("trellis"):
        shape = (num_outputs, num_inputs)
        weights = rng.standard_normal(shape, np.float32) * num_inputs**-0.5
        return stored.encode(weights.astype(np.float32))
    # Every string of bits is a code, and to search for the best one takes minutes.
    words = rng.integers(0, 2**32, stored.num_words(num_outputs, num_inputs), np.uint32)
    words[0] = _TRELLIS_SCALE.view(np.uint32)
    return words


def _draw_experts(
    rng: np.random.Generator, layouts: Sequence[experts.ExpertLayout]
) -> experts.PackedExperts:
    hidden_size, expert_size = MODEL.hidden_size, MODEL.expert_size
    shape = experts.PackedShape(tuple(layouts), hidden_size, expert_size)
    words = np.zeros((MODEL.num_experts, shape.num_words), np.uint32)
    index = np.arange(MODEL.num_experts, dtype=np.int32) % len(layouts)
    for expert, row in enumerate(words):
        layout = layouts[expert % len(layouts)]
        packed = np.concatenate(
            [
                _draw_matrix(rng, layout.gate, expert_size, hidden_size),
                _draw_matrix(rng, layout.up, expert_size, hidden_size),
                _draw_matrix(rng, layout.down, hidden_size, expert_size),
            ]
        )
        row[: packed.size] = packed
    return experts.PackedExperts(jnp.asarray(words), jnp.asarray(index), shape)


def _place(params: models.MoeParams, place: str, cold: pathlib.Path) -> Any:
    if place == "host":
        return models.experts_on_host(params)
    if place == "cold":
        return models.experts_on_disk(params, cold)[0]
    return params


def _on_device(state: Any) -> Any:
    # As a program's results are, so that the second call does not compile again.
    return jax.device_put(state, jax.devices()[0])


def _draw_widths(rng: np.random.Generator, num_rounds: int) -> np.ndarray:
    rounds = np.tile(np.arange(1, _MAX_WINDOW + 1), (num_rounds, 1))
    return rng.permuted(rounds, axis=1).reshape(-1)


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Rows of an expert layer, and how they are cut into windows."""

    states: np.ndarray  # [N, D] float32
    routing: np.ndarray  # [N, k] int32
    widths: np.ndarray  # [windows], their sum is N


def _draw_layer_inputs(rng: np.random.Generator, comparisons: int) -> LayerInputs:
    per_row = MODEL.num_experts_per_token * MODEL.hidden_size
    num_rounds = -(-comparisons // (per_row * _ROUND_ROWS))
    num_rows = num_rounds * _ROUND_ROWS
    # Which experts are popular drifts, so that a cache has to follow.
    turns = 4 * np.arange(num_rows)[:, None] / num_rows
    turns = turns + np.arange(MODEL.num_experts) / MODEL.num_experts
    scores = 2 * np.sin(2 * np.pi * turns) + rng.gumbel(size=turns.shape)
    routing = np.argsort(-scores, axis=1)[:, : MODEL.num_experts_per_token]
    return LayerInputs(
        states=rng.standard_normal((num_rows, MODEL.hidden_size), np.float32),
        routing=routing.astype(np.int32),
        widths=_draw_widths(rng, num_rounds),
    )


@functools.partial(jax.jit, static_argnames="mode")
def _run_layer(
    bank: Any,
    cache: experts.ExpertCache | None,
    states: jax.Array,
    routing: jax.Array,
    num_rows: jax.Array,
    *,
    mode: str,
) -> tuple[jax.Array, experts.ExpertCache | None, jax.Array]:
    """Returns outputs `[T, k, D]`, the cache and Status bits."""
    status = jnp.zeros((), jnp.int32)
    if cache is not None:
        cache, status = experts.adapt(bank, cache)
    outputs, fault = experts.run_jobs(bank, cache, states, routing, num_rows, mode=mode)
    if cache is not None:
        cache = experts.count_uses(cache, routing, num_rows)
    return outputs, cache, status | fault


def run_alone(bank: Any, inputs: LayerInputs, num_rows: int) -> np.ndarray:
    """Runs rows one by one through the program for one: `[num_rows, k, D]`."""
    outputs = []
    for row in range(num_rows):
        piece = slice(row, row + 1)
        output, _, status = _run_layer(
            bank,
            None,
            inputs.states[piece],
            inputs.routing[piece],
            np.int32(1),
            mode="singleton",
        )
        strata.raise_if_failed(status)
        outputs.append(np.asarray(output))
    return np.concatenate(outputs)


def run_windows(
    bank: Any,
    cache: experts.ExpertCache | None,
    inputs: LayerInputs,
    expected: np.ndarray,
    mode: str,
) -> tuple[dict[int, Tally], int]:
    """Runs all windows through one program with room for 8 rows.

    Returns:
      A tally for each width, and how often an expert was brought into the cache.
    """
    tallies = dict.fromkeys(range(1, _MAX_WINDOW + 1), Tally())
    num_brought = 0
    start = 0
    for width in inputs.widths.tolist():
        rows = slice(start, start + width)
        # Rows that are not live hold what must not be seen.
        states = np.full((_MAX_WINDOW, MODEL.hidden_size), np.nan, np.float32)
        states[:width] = inputs.states[rows]
        routing = np.zeros((_MAX_WINDOW, inputs.routing.shape[1]), np.int32)
        routing[:width] = inputs.routing[rows]
        before = cache
        outputs, cache, status = _run_layer(
            bank, cache, states, routing, np.int32(width), mode=mode
        )
        strata.raise_if_failed(status)
        if before is not None and cache is not None:
            num_brought += np.sum(np.asarray(before.expert) != np.asarray(cache.expert))
        tallies[width] += compare(np.asarray(outputs)[:width], expected[rows])
        start += width
    return tallies, int(num_brought)


@dataclasses.dataclass(frozen=True)
class TextWindow:
    """A window of the whole model; its rows from `num_kept` on are rejected."""

    tokens: np.ndarray  # [8] int32
    position: int
    width: int
    num_kept: int


def _draw_text_windows(
    rng: np.random.Generator, text: np.ndarray
) -> Iterator[TextWindow]:
    """Cuts a text into windows, every second one with drafts that are wrong."""
    position = 0
    for count, width in enumerate(_draw_widths(rng, len(text)).tolist()):
        width = min(width, len(text) - position)
        num_kept = int(rng.integers(1, width + 1)) if count % 2 else width
        tokens = np.zeros(_MAX_WINDOW, np.int32)
        tokens[:width] = text[position : position + width]
        wrong = tokens[num_kept:width]
        wrong[:] = (wrong + 1) % MODEL.vocab_size
        yield TextWindow(tokens, position, width, num_kept)
        position += num_kept
        if position == len(text):
            return


class Scorer:
    """A target's state, and its compiled functions."""

    def __init__(self, target: strata.TargetModel, params: Any):
        """Starts with an empty context."""
        self._params = params
        self._state = _on_device(target.init(params))
        self._score = jax.jit(target.score, donate_argnums=1)
        self._commit = jax.jit(target.commit, donate_argnums=0)

    def score(self, window: TextWindow) -> np.ndarray:
        """Returns hidden states and logits of the kept rows, `[num_kept, D + V]`."""
        position = np.int32(window.position)
        rows, self._state = self._score(
            self._params, self._state, window.tokens, position, np.int32(window.width)
        )
        strata.raise_if_failed(rows.status)
        self._state = self._commit(self._state, position, np.int32(window.num_kept))
        parts = [np.asarray(part) for part in (rows.features, rows.logits)]
        return np.concatenate(parts, axis=1)[: window.num_kept]


def score_text(
    params: Any,
    placed: Any,
    num_cached: int,
    text: np.ndarray,
    windows: Sequence[TextWindow],
) -> tuple[dict[int, Tally], Tally]:
    """Compares a text's rows in the whole model: by width, and in the control."""
    length = len(text)
    alone = Scorer(targets.singleton(MODEL, max_length=length), params)
    expected = np.concatenate(
        [
            alone.score(TextWindow(text[place : place + 1], place, 1, 1))
            for place in range(length)
        ]
    )
    scorer = Scorer(
        targets.singleton(MODEL, max_length=length, num_cached_experts=num_cached),
        placed,
    )
    control = Scorer(
        targets.batched(MODEL, max_length=length, max_window=_MAX_WINDOW), params
    )
    tallies = dict.fromkeys(range(1, _MAX_WINDOW + 1), Tally())
    batched = Tally()
    for window in windows:
        wanted = expected[window.position : window.position + window.num_kept]
        tallies[window.width] += compare(scorer.score(window), wanted)
        batched += compare(control.score(window), wanted)
    return tallies, batched


def _total(tallies: dict[int, Tally]) -> Tally:
    return sum(tallies.values(), Tally())


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def run_configuration(
    configuration: Configuration,
    seed: int,
    comparisons: int,
    cold: pathlib.Path,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Compares one configuration with the singleton and with the control.

    Args:
      configuration: what to compare.
      seed: of everything that is drawn.
      comparisons: least number of floats to compare in the expert layer's windows.
      cold: the file to write cold experts to, if that is their place.
      show: is called with what is about to be done.

    Returns:
      The entry of the report.
    """
    began = time.monotonic()
    rng = np.random.default_rng([seed, zlib.crc32(configuration.name.encode())])
    resident = _draw_experts(rng, configuration.layouts)
    inputs = _draw_layer_inputs(rng, comparisons)
    num_rows = len(inputs.states)
    text = rng.integers(0, MODEL.vocab_size, min(_TEXT_LENGTH, num_rows // 2), np.int32)
    windows = list(_draw_text_windows(rng, text))

    params = models.random_moe_params(MODEL, jax.random.key(seed), with_mtp=False)
    layer = dataclasses.replace(params.layers[0], experts=resident)
    params = dataclasses.replace(params, layers=(layer,))
    placed = _place(params, configuration.place, cold)
    bank = placed.layers[0].experts
    cache = None
    if configuration.num_cached:
        cache = _on_device(
            experts.empty_expert_cache(
                configuration.num_cached, resident.shape.num_words, MODEL.num_experts
            )
        )

    show("one row at a time")
    expected = run_alone(resident, inputs, num_rows)
    exact: dict[str, dict[int, Tally]] = {}
    show("windows")
    exact["windows"], num_brought = run_windows(
        bank, cache, inputs, expected, "singleton"
    )
    show("windows, experts decoded once for all of their rows")
    exact["windows_shared"], _ = run_windows(bank, cache, inputs, expected, "shared")
    if configuration.place != "resident":
        show("one row at a time, where the experts are")
        few = expected[: num_rows // 8]
        exact["alone"] = {1: compare(run_alone(bank, inputs, len(few)), few)}
    show("the batched control")
    batched, _ = run_windows(resident, None, inputs, expected, "batched")
    show("the whole model")
    exact["model"], batched_model = score_text(
        params, placed, configuration.num_cached, text, windows
    )

    ends = np.cumsum(inputs.widths)[:-1]
    jobs = [np.bincount(rows.ravel()) for rows in np.split(inputs.routing, ends)]
    controls = {"windows": _total(batched), "model": batched_model}
    return {
        "layouts": [dataclasses.asdict(layout) for layout in configuration.layouts],
        "place": configuration.place,
        "num_cached": configuration.num_cached,
        "inputs_sha256": _digest(
            np.asarray(resident.words),
            inputs.states,
            inputs.routing,
            inputs.widths,
            text,
            *(window.tokens for window in windows),
            *(np.asarray(leaf) for leaf in jax.tree.leaves(params)),
        ),
        "num_windows": len(inputs.widths) + len(windows),
        "num_rows": num_rows + len(text),
        "num_jobs": sum(int((counts > 0).sum()) for counts in jobs),
        "num_jobs_of_several_rows": sum(int((counts > 1).sum()) for counts in jobs),
        "num_brought_into_cache": num_brought,
        "exact": dataclasses.asdict(sum(map(_total, exact.values()), Tally())),
        "parts": {
            part: {
                str(width): dataclasses.asdict(tally)
                for width, tally in tallies.items()
                if tally.num_compared or tally.num_not_finite
            }
            for part, tallies in exact.items()
        },
        "control": {
            part: {
                **dataclasses.asdict(tally),
                "share": tally.num_different / max(tally.num_compared, 1),
            }
            for part, tally in controls.items()
        },
        "seconds": round(time.monotonic() - began, 1),
    }
