"""The scripted drafter: rows by position, through the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import RowKind

_ABSENT, _OFFERED = int(RowKind.ABSENT), int(RowKind.OFFERED)
_PARAMS = strata.targets.TabularParams(logits=jnp.zeros((3, 3)))


def first_windows(script, prompts, **settings):
    decoder = strata.speculative_decoder(
        strata.targets.tabular(3, max_length=12),
        strata.drafters.scripted(script, num_draft_tokens=3),
        verifier=strata.verifiers.token(),
    )
    step = jax.jit(decoder.step)
    for prompt in prompts:
        _, window = step(_PARAMS, decoder.init(_PARAMS, prompt, **settings))
        assert int(window.verdict.status) == 0
        yield window.proposal


def test_row_i_of_the_script_drafts_position_i():
    # Position 4 has no draft, nor has any from 9 on.
    script = np.random.default_rng(0).dirichlet(np.ones(3), 9).astype(np.float32)
    script[4] = 0
    prompts = [[0] * length for length in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)]
    wanted = [3, 2, 1, 0, 3, 3, 2, 1, 0, 0]
    for prompt, count, proposal in zip(
        prompts, wanted, first_windows(script, prompts), strict=True
    ):
        assert proposal.kind.tolist() == [_OFFERED] * count + [_ABSENT] * (3 - count)
        start = len(prompt)
        np.testing.assert_array_equal(
            proposal.measure[:count], script[start : start + count]
        )
        assert not np.asarray(proposal.measure[count:]).any()


def test_a_point_mass_is_drafted_whatever_the_uniform():
    script = np.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1, 2, 0]]
    prompts = [[first, 0] for first in range(3)]
    for proposal in first_windows(script, prompts, seed=4):
        assert proposal.tokens.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    "row",
    [
        [0.5, 0.5, 0.1],
        [0.5, 0.4, 0.0],
        [np.nan, 0.5, 0.5],
        [1.5, -0.5, 0.0],
        [np.inf, 0.0, 0.0],
        [-1.0, 0.5, 0.5],
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_is_no_distribution(row, place):
    script = np.full((3, 3), 1 / 3)
    script[place] = row
    with pytest.raises(ValueError, match=rf"probs\[{place}\] is no distribution"):
        strata.drafters.scripted(script, num_draft_tokens=2)


def test_what_the_factory_refuses():
    with pytest.raises(ValueError, match="probs must have shape"):
        strata.drafters.scripted(np.full(3, 1 / 3), num_draft_tokens=1)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="num_draft_tokens"):
            strata.drafters.scripted(np.full((2, 3), 1 / 3), num_draft_tokens=wrong)
