import jax.numpy as jnp
import numpy as np

import strata_jax as strata
from strata_jax import diagnostics, drafters, gates, targets, verifiers
from strata_jax.targets import TabularParams


def verdicts(rounds, num_draft_tokens=4):
    kind, accepted = [], []
    for offered, num_accepted, null in rounds:
        row = [1] * offered + [2] * null
        kind.append(row + [0] * (num_draft_tokens - len(row)))
        accepted.append(num_accepted)
    accepted = np.asarray(accepted, np.int32)
    zeros = np.zeros(len(rounds), np.int32)
    return strata.Verdict(
        tokens=np.zeros((len(rounds), num_draft_tokens + 1), np.int32),
        num_accepted=accepted,
        num_emitted=accepted + 1,
        source=zeros,
        status=zeros,
        kind=np.asarray(kind, np.int32),
    )


def test_counts_by_hand():
    summary = diagnostics.summarize_acceptance(
        verdicts([(4, 4, 0), (4, 1, 0), (2, 0, 0), (0, 0, 0), (0, 0, 1)])
    )
    assert summary.num_offered == 10
    assert summary.num_accepted == 5
    assert summary.acceptance_rate == 0.5
    assert summary.num_windows == 5
    assert summary.num_windows_with_offer == 3
    assert summary.num_tokens == 10
    assert summary.tokens_per_window == 2.0
    np.testing.assert_allclose(summary.tokens_per_window_with_offer, 8 / 3)
    assert summary.num_null == 1
    assert summary.num_absent == 20 - 10 - 1
    assert summary.offered_by_row.tolist() == [3, 3, 2, 2]
    assert summary.accepted_by_row.tolist() == [2, 1, 1, 1]


def test_finished_windows_do_not_count():
    some = verdicts([(4, 2, 0), (0, 0, 0)])
    some = strata.Verdict(**{**vars(some), "num_emitted": np.asarray([3, 0], np.int32)})
    summary = diagnostics.summarize_acceptance(some)
    assert summary.num_windows == 1
    assert summary.num_absent == 0


def test_no_windows():
    summary = diagnostics.summarize_acceptance(verdicts([]))
    assert summary.acceptance_rate == 0.0
    assert summary.tokens_per_window == 0.0


def test_row_masses_of_traced_windows():
    p, q = np.array([0.5, 0.5]), np.array([0.875, 0.125])
    target = targets.tabular(2, max_length=8, order=0)
    decoder = strata.speculative_decoder(
        target,
        drafters.model(target, num_draft_tokens=1),
        gates.picked(0.5),
        verifiers.token(),
    )
    params = strata.Params(
        target=TabularParams(jnp.log(jnp.asarray(p, float))),
        drafter=TabularParams(jnp.log(jnp.asarray(q, float))),
    )
    state = decoder.init(params, [0], max_new_tokens=7)
    _, windows = strata.decode(decoder, params, state, 7, trace=True)
    masses = diagnostics.row_masses(windows)
    assert masses.is_attempted.any()
    attempted = masses.is_attempted
    np.testing.assert_allclose(masses.null_mass[attempted], 0.125, rtol=1e-6)
    np.testing.assert_allclose(masses.overlap[attempted], 0.5, rtol=1e-6)
    assert not masses.overlap[~attempted].any()
