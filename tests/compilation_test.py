"""One compilation serves every request: whatever its numbers are.

Traces are counted by a target whose Python functions count their calls: `prefill` is
called once whenever `init` is traced, and `score` a fixed number of times whenever a
scan of windows is. Compiled programs call neither.
"""

import jax.numpy as jnp
import numpy as np

import strata_jax as strata
from strata_jax.targets import TabularParams

_VOCAB, _SIZE = 7, 24


class TraceCounter:
    """Wraps a target and counts how often its functions are traced."""

    def __init__(self, target):
        self.num_prefills = 0
        self.num_scores = 0

        def prefill(*args):
            self.num_prefills += 1
            return target.prefill(*args)

        def score(*args):
            self.num_scores += 1
            return target.score(*args)

        self.target = target._replace(prefill=prefill, score=score)


def make_requests():
    """50 requests with different numbers of every kind."""
    rng = np.random.default_rng(0)
    for seed in range(50):
        length = int(rng.integers(1, 12))
        request = {
            "temperature": float(rng.choice([0.0, 1e-6, 0.5, 1.0, 3.0])),
            "top_k": int(rng.integers(-1, 9)),
            "top_p": float(rng.choice([0.0, 0.5, 0.9, 1.0])),
            "min_p": float(rng.choice([0.0, 0.1, 1.0])),
            "repetition_penalty": float(rng.uniform(0.8, 1.5)),
            "presence_penalty": float(rng.uniform(-1, 1)),
            "frequency_penalty": float(rng.uniform(-1, 1)),
            "logit_bias": {int(rng.integers(0, _VOCAB)): float(rng.normal())},
            "eos_ids": rng.choice(_VOCAB, int(rng.integers(0, 4))).tolist(),
            "min_tokens": int(rng.integers(0, 4)),
            "max_new_tokens": int(rng.integers(0, 20)),
            "threshold": float(rng.uniform()),
            "max_entropy": float(rng.choice([0.0, 1.0, np.inf])),
            "window": int(rng.integers(0, 100)),
            "seed": seed * 1000,
        }
        # Python numbers, NumPy's and JAX's; some are left at their defaults.
        if seed % 3 == 1:
            request["temperature"] = np.float64(request["temperature"])
            request["top_k"] = np.int64(request["top_k"])
        if seed % 3 == 2:
            request["threshold"] = jnp.float32(request["threshold"])
            request["temperature"] = int(request["temperature"])
            del request["logit_bias"], request["top_p"], request["max_new_tokens"]
        prompt = rng.integers(0, _VOCAB, length)
        yield (prompt.tolist() if seed % 2 else prompt), request


def test_fifty_requests_trace_once():
    counter = TraceCounter(strata.targets.tabular(_VOCAB, max_length=_SIZE))
    decoder = strata.speculative_decoder(
        counter.target,
        strata.drafters.suffix(num_draft_tokens=2, vocab_size=_VOCAB, min_match=1),
        strata.gates.all_of(strata.gates.picked(), strata.gates.entropy()),
        strata.verifiers.token(),
    )
    logits = np.random.default_rng(1).normal(size=(_VOCAB, _VOCAB))
    params = TabularParams(logits=jnp.asarray(logits, jnp.float32))

    scores_of_one_trace = None
    outputs = set()
    for prompt, request in make_requests():
        state = decoder.init(params, prompt, **request)
        state, _ = strata.decode(decoder, params, state, 4)
        # Going on with the state that a scan returned is no new shape either.
        state, _ = strata.decode(decoder, params, state, 4)
        outputs.add(tuple(strata.output_tokens(state).tolist()))
        assert counter.num_prefills == 1
        if scores_of_one_trace is None:
            scores_of_one_trace = counter.num_scores
        assert counter.num_scores == scores_of_one_trace
    assert scores_of_one_trace > 0
    # The requests were really different.
    assert len(outputs) > 20

    # The count can see a trace: another number of windows is another program, ...
    state = decoder.init(params, [0], threshold=0.5, max_entropy=1.0)
    strata.decode(decoder, params, state, 5)
    assert counter.num_scores > scores_of_one_trace
    # ... and so are weights of another dtype, for both functions.
    half = TabularParams(logits=params.logits.astype(jnp.bfloat16))
    state = decoder.init(half, [0], threshold=0.5, max_entropy=1.0)
    assert counter.num_prefills == 2
