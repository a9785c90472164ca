import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import drafters, gates, targets, verifiers
from strata_jax.targets import TabularParams


class Letters:
    """A tokenizer of eight letters; token 7 ends a text."""

    eos_ids = (7,)
    letters = "abcdefg."

    def encode(self, text):
        return [self.letters.index(letter) for letter in text]

    def decode_stream(self, *, special):
        del special
        letters = self.letters

        class Stream:
            def step(self, token):
                return letters[token]

            def flush(self):
                return ""

        return Stream()


CYCLE = np.roll(np.eye(8), 1, axis=1)  # a -> b -> c ... -> . -> a


@functools.cache
def make_decoder(max_length=64, verifier=verifiers.exact_match, threshold=0.0):
    target = targets.tabular(8, max_length=max_length)
    drafter = drafters.suffix(num_draft_tokens=3, vocab_size=8, min_match=1)
    return strata.speculative_decoder(
        target, drafter, gates.picked(threshold), verifier()
    )


def run(prompt="a", *, table=CYCLE, decoder=None, max_length=64, **arguments):
    decoder = make_decoder(max_length) if decoder is None else decoder
    params = TabularParams(jnp.log(jnp.asarray(table, float)))
    arguments.setdefault("max_new_tokens", 20)
    return strata.generate(decoder, params, Letters(), prompt, **arguments)


def test_text_until_eos():
    generation = run()
    assert generation.text == "bcdefg."
    assert generation.finish_reason == "eos"
    assert generation.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert generation.prompt_tokens.tolist() == [0]
    assert generation.status == strata.Status.OK
    assert int(generation.verdicts.num_emitted.sum()) == 7


def test_eos_inside_a_window_ends_it():
    # The suffix drafter knows the cycle, so "." is drafted with tokens behind it.
    generation = run("abcdefg.abcdef")
    assert generation.text == "g."
    assert generation.finish_reason == "eos"
    assert generation.verdicts.tokens.tolist() == [[6, 7, -1, -1]]
    assert generation.verdicts.num_accepted.tolist() == [2]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["d"], "bcd"),
        (["de"], "bcde"),
        (["fg", "cd"], "bcd"),
        (["cde", "e"], "bcde"),
        (["x"], "bcdefgabcdefgabcdefg"),
    ],
)
@pytest.mark.parametrize("windows_per_call", [1, 8])
def test_stop_texts_are_included(stop, text, windows_per_call):
    table = np.roll(np.eye(8), 1, axis=1)
    table[6] = np.eye(8)[0]  # g -> a: no end
    pieces = []
    generation = run(
        table=table,
        stop=stop,
        on_text=pieces.append,
        windows_per_call=windows_per_call,
    )
    assert generation.text == text
    assert "".join(pieces) == text
    assert generation.finish_reason == ("length" if stop == ["x"] else "stop")
    assert "".join(Letters.letters[t] for t in generation.tokens) == text


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_token_budget(budget):
    generation = run("abcdefgabcd", max_new_tokens=budget, eos_ids=())
    assert len(generation.tokens) == budget
    assert generation.text == "efg.a"[:budget]
    assert generation.finish_reason == "length"


def test_context_limit():
    generation = run("abcd", max_length=9, eos_ids=())
    assert generation.text == "efg.a"
    assert generation.finish_reason == "length"


def test_resume_gives_the_rest():
    random = np.random.default_rng(0).dirichlet(np.ones(8), 8)
    whole = run("abc", table=random, seed=5, eos_ids=())
    first = run("abc", table=random, seed=5, eos_ids=(), max_new_tokens=6)
    rest = run(
        [*first.prompt_tokens, *first.tokens],
        table=random,
        seed=5,
        eos_ids=(),
        prompt_length=3,
    )
    assert first.text + rest.text == whole.text


def test_failure_keeps_what_was_streamed():
    table = np.array(CYCLE)
    table[4] = np.nan  # the row after "e"
    pieces = []
    with pytest.raises(strata.DecodingError, match="NON_FINITE_LOGITS") as error:
        run(table=table, on_text=pieces.append)
    assert "".join(pieces) == "bcde"
    assert error.value.tokens.tolist() == [1, 2, 3, 4]
    generation = run(table=table, throw=False)
    assert generation.text == "bcde"
    assert generation.finish_reason == "failed"
    assert generation.status == strata.Status.NON_FINITE_LOGITS


def test_interrupt_returns_what_there_is():
    pieces = []

    def on_text(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    generation = run(on_text=on_text)
    assert generation.finish_reason == "interrupted"
    assert generation.text == "bcd"
    assert len(generation.tokens) == 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"stop": "text"}, "stop must be a sequence"),
        ({"stop": [""]}, "non-empty"),
        ({"windows_per_call": 0}, "windows_per_call"),
        ({"temperature": -1.0}, "temperature"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"prompt": ""}, "context is empty"),
        ({"prompt": "a" * 65}, "more than max_length"),
    ],
)
def test_bad_input(arguments, match):
    pieces = []
    with pytest.raises(ValueError, match=match):
        run(**{"on_text": pieces.append, **arguments})
    assert not pieces


def test_progress_bar(capsys):
    run(progress=True)
    assert "token" in capsys.readouterr().err


def test_progress_bar_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"strata-jax\[hf\]"):
        run(progress=True)


def test_gated_token_verifier_streams_the_same_law_of_a_certain_text():
    decoder = make_decoder(verifier=verifiers.token, threshold=0.5)
    generation = run("abcdefgabcd", decoder=decoder, max_new_tokens=9)
    assert generation.text == "efg."
    assert jax.tree.leaves(generation.verdicts)[0].shape[0] == len(
        generation.verdicts.num_emitted
    )
