import json
import pathlib

import jax.numpy as jnp
import numpy as np

import strata_jax as strata
from strata_jax import diagnostics, drafters, gates, targets, verifiers
from strata_jax.targets import TabularParams

TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"


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


def summary_of(case):
    return diagnostics.summarize_acceptance(
        verdicts(
            [
                (row["offered"], row["accepted"], "null_at" in row)
                for row in case["inputs"]["rounds"]
            ]
        )
    )


def test_bug_053():
    cases = json.loads((TESTDATA / "cases.json").read_text("utf-8"))
    (case,) = (case for case in cases if case["id"] == "bug-053")
    expected, wrong = case["expected"], case["naive_wrong"]
    summary = summary_of(case)
    assert summary.num_offered == expected["offered_total"]
    assert summary.num_accepted == expected["accepted_total"]
    assert summary.acceptance_rate == expected["acceptance_rate"]
    assert summary.num_windows == expected["windows"]
    assert summary.num_windows_with_offer == expected["windows_with_offer"]
    assert summary.num_tokens == expected["emitted_total"]
    assert summary.tokens_per_window == expected["mean_emitted_per_window"]
    assert abs(
        summary.tokens_per_window_with_offer - expected["mean_accept_len_with_offer"]
    ) < float(case["tolerance"])
    assert summary.num_null == expected["null_rows"]
    assert summary.offered_by_row.tolist() == expected["offered_per_position"]
    assert summary.accepted_by_row.tolist() == expected["accepted_per_position"]
    # The two wrong rates: over all configured rows, and counting the final tokens.
    num_rows = 4 * 4
    assert summary.num_accepted / num_rows == wrong["configured_denominator"]
    assert summary.acceptance_rate != wrong["configured_denominator"]
    assert abs(summary.acceptance_rate - wrong["drafted_incl_bonus"]) > 0.1


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
