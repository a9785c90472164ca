"""Cases of public bug reports, through the library.

Every check is a function of a value: what the library gives must pass it, and what the
fault gives (`naive_wrong`) must fail the very same check. A case is tested here, or in
the place named in `_ELSEWHERE`, or waits in `_NOT_BUILT_YET` for its part.
"""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_weights import moe_weights, quick_compilation

import strata_jax as strata
from strata_jax import (
    Committed,
    Context,
    DraftRow,
    DraftStep,
    FinishReason,
    Params,
    Proposal,
    RowKind,
    Status,
    measures,
    models,
)
from strata_jax.audit import WindowEnumerator, host_states, sequence_laws, stack
from strata_jax.models import LlamaConfig, LlamaLayer, LlamaParams, random_params
from strata_jax.models._router import route
from strata_jax.sampling import (
    chain_probs,
    count_tokens,
    draw_token,
    sampling_settings,
)
from strata_jax.targets import TabularParams

_DIRECTORY = pathlib.Path(__file__).parent
_CASES = {
    case["id"]: case
    for case in json.loads((_DIRECTORY / "testdata" / "cases.json").read_text())
}
_ELSEWHERE = {
    "bug-013": "verifiers/token_test.py::test_bug_013_golden_traces",
    "bug-035": "sampling/draw_test.py::test_bug_035_tail_mass_is_reached",
    "bug-050": "drafters/suffix_test.py::test_bug_050",
    "bug-053": "diagnostics/acceptance_test.py::test_bug_053",
    "bug-058": "checkpoints/safetensors_test.py",
    "bug-059": "checkpoints/moe_safetensors_test.py::test_bug_059_completeness",
}
_NOT_BUILT_YET = {
    "bug-046": "no model has a ring cache",
    "bug-047": "no model has a recurrent state",
}


def load(case_id):
    case = _CASES[case_id]
    return case["inputs"], case["expected"], case["naive_wrong"]


def close(found, wanted, atol=1e-6):
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(wanted, np.float64), rtol=0, atol=atol
    )


def equal(found, wanted):
    assert found == wanted


def check(found, wanted, *naive, by=close):
    """The value passes; each of the wrong ones fails the same check."""
    by(found, wanted)
    for wrong in naive:
        with pytest.raises(AssertionError):
            by(wrong, wanted)


def row(values):
    return jnp.asarray(values, jnp.float32)


def log(probs):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64))


def test_every_case_is_in_exactly_one_place():
    here = {
        "bug-" + name.split("_")[2]
        for name in globals()
        if name.startswith("test_bug_")
    }
    places = [here, set(_ELSEWHERE), set(_NOT_BUILT_YET)]
    assert sum(map(len, places)) == len(_CASES) == 40
    assert set.union(*places) == set(_CASES)


@pytest.mark.parametrize("case_id", sorted(_ELSEWHERE))
def test_the_other_places_exist(case_id):
    path, _, name = _ELSEWHERE[case_id].partition("::")
    text = (_DIRECTORY / path).read_text()
    assert case_id in text or case_id.replace("-", "_") in text
    if name:
        assert f"def {name}(" in text


# One row: its measure, acceptance and residual; and its law by enumeration of the loop.


def row_numbers(p, q, admit):
    """mu, acceptance, residual, overall acceptance and law, from `measures`."""
    target = row(p)
    measure = measures.retain(row(q), jnp.asarray(admit))
    accept = measures.acceptance(target, measure)
    residual = measures.residual(target, measure)
    accepted = np.asarray(measure, np.float64) * np.asarray(accept, np.float64)
    law = accepted + (1 - accepted.sum()) * np.asarray(residual, np.float64)
    return measure, accept, residual, float(measures.overlap(target, measure)), law


_VOCAB, _SIZE, _START = 4, 8, 3


def padded_table(first, later=None):
    """A table whose row 3, after the prompt, is `first`; `later` are rows 0, 1, ..."""
    table = np.full((_VOCAB, _VOCAB), 1 / _VOCAB)
    if later is not None:
        table[:3] = 0
        table[:3, : len(later[0])] = later
    table[_START] = 0
    table[_START, : len(first)] = first
    return TabularParams(logits=jnp.asarray(log(table), jnp.float32))


@functools.cache
def enumerated(num_draft_tokens, verifier="token"):
    """A decoder for every row of at most four tokens, and its enumerator."""
    target = strata.targets.tabular(_VOCAB, max_length=_SIZE)
    decoder = strata.speculative_decoder(
        target,
        strata.drafters.model(target, num_draft_tokens=num_draft_tokens)
        if num_draft_tokens
        else None,
        strata.gates.all_of(
            strata.gates.picked(0.0), strata.gates.top(0.0, setting="peak")
        ),
        getattr(strata.verifiers, verifier)(),
        draft_rule="sample",
    )
    params = Params(target=padded_table([1.0]), drafter=padded_table([1.0]))
    state = decoder.init(params, [_START])
    return decoder, WindowEnumerator(decoder, params, state)


def laws(instances, num_tokens=1, num_draft_tokens=1, verifier="token"):
    """Enumerates the loop for instances (p table, q table, settings)."""
    decoder, enumerator = enumerated(num_draft_tokens, verifier)
    params = [Params(target=p, drafter=q) for p, q, _ in instances]
    states = [
        decoder.init(one, [_START], **settings)
        for one, (*_, settings) in zip(params, instances, strict=True)
    ]
    with quick_compilation():
        found = sequence_laws(
            decoder, stack(params), stack(states), num_tokens, enumerator=enumerator
        )
    tables = []
    for law in found:
        table = np.zeros((_VOCAB,) * num_tokens)
        for tokens, probability in law.items():
            table[tokens] += probability
        tables.append(table)
    return tables


def row_law(p, q, **settings):
    (table,) = laws([(padded_table(p), padded_table(q), settings)])
    assert not table[len(p) :].any()
    return table[: len(p)]


def accepted_mass(p, q, verifier="token", **settings):
    """Enumerates one window: the probability that its first draft is accepted."""
    decoder, enumerator = enumerated(1, verifier)
    params = Params(target=padded_table(p), drafter=padded_table(q))
    state = decoder.init(params, [_START], **settings)
    with quick_compilation():
        cells = enumerator.cells(
            stack([params]), host_states(stack([state])), np.zeros(1, int)
        )
    return float(cells.volume[cells.num_accepted > 0].sum())


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_bug_001_gate_null_mass(name):
    inputs, expected, naive = (part[name] for part in load("bug-001"))
    p, q, threshold = inputs["p"], inputs["q"], inputs["threshold"]
    decision = strata.gates.picked().decide(
        {"threshold": jnp.asarray(threshold)}, None, row(q)
    )
    measure, accept, residual, overall, law = row_numbers(p, q, decision.admit)
    check(measure, expected["mu"], q)  # q itself is what the fault divides by
    check(measures.null_mass(measure), expected["null_mass"], 0.0)
    check(accept, expected["accept_prob"], np.minimum(np.divide(p, q), 1))
    check(residual, expected["residual"], p)
    check(law, expected["emit"], *naive.values())
    check(row_law(p, q, threshold=threshold), expected["emit"], *naive.values())
    wanted = expected.get("overall_accept", 0.5)  # a: .875 * .571428
    check(overall, wanted)
    check(accepted_mass(p, q, threshold=threshold), wanted)


def test_bug_002_thresholds():
    inputs, expected, naive = load("bug-002")
    p, q = inputs["p"], inputs["q"]
    for threshold in inputs["thresholds"]:
        measure, *_, law = row_numbers(p, q, np.asarray(q) >= threshold)
        check(law, expected["emit_for_every_threshold"], *naive.values())
        if threshold == 0:
            check(measure, expected["threshold_0_is_plain_speculation_mu"])
        if threshold > 1:
            check(measure, expected["threshold_1_1_mu"], q)
            check(measures.null_mass(measure), expected["threshold_1_1_null_mass"], 0)
            with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\]"):
                strata.gates.picked(threshold)
            continue
        law = row_law(p, q, threshold=threshold)
        check(law, expected["emit_for_every_threshold"], *naive.values())
    # The predicate that builds mu is the one that offers: equality does both.
    check(accepted_mass(p, q, threshold=0.5), 0.6, 0.0)
    check(accepted_mass(p, q, threshold=0.6), 0.0, 0.6)


def test_bug_002_top_gate():
    _, expected, naive = load("bug-002")
    wrong = naive["failed_top_gate_treated_as_rejection_of_q"]
    case = expected["top_gate"]["passing"]
    _, accept, residual, _, law = row_numbers(case["p"], case["q"], np.ones(2))
    check(accept, case["accept"])
    check(residual, case["residual"], case["p"])
    law = row_law(case["p"], case["q"], peak=case["threshold"])
    check(law, case["emit"], [0.5625, 0.4375])
    case = expected["top_gate"]["failing"]
    check(row_law(case["p"], case["q"], peak=case["threshold"]), case["emit"], wrong)
    check(accepted_mass(case["p"], case["q"], peak=case["threshold"]), 0.0, 0.9)


def test_bug_004_exact_match():
    inputs, expected, naive = load("bug-004")
    p, q = inputs["p"], inputs["q"]
    ((*law, _),) = laws(
        [(padded_table(p), padded_table(q), {})], verifier="exact_match"
    )
    check(law, expected["emit"], *naive.values())
    found = accepted_mass(p, q, "exact_match")
    check(found, expected["accept_prob"], np.minimum(p, q).sum())


def test_bug_005_residual_is_not_softmaxed():
    inputs, expected, naive = load("bug-005")
    p, q = inputs["p"], inputs["q"]
    _, _, residual, _, law = row_numbers(p, q, np.ones(3))
    check(residual, expected["residual"], naive["softmax_residual"])
    assert np.asarray(residual)[[0, 2]].tolist() == [0.0, 0.0]
    check(law, expected["emit"], naive["emit"])
    check(row_law(p, q), expected["emit"], naive["emit"])


@pytest.mark.parametrize("index", range(4))
def test_bug_007_empty_residual(index):
    inputs, expected, _ = load("bug-007")
    p, mu = (row(inputs["cases"][index][name]) for name in ("p", "mu"))
    for function in (measures.residual, jax.jit(measures.residual)):
        wrong = np.full(p.shape, np.nan)
        check(function(p, mu), expected["residual"][index], wrong)
    wanted = expected["accept_on_support"][index]
    accept = np.asarray(measures.acceptance(p, mu))[np.asarray(mu) > 0]
    if wanted is not None:
        assert np.all(accept >= float(str(wanted).lstrip(">=")) - 1e-7)
    positive = np.maximum(np.asarray(p, np.float64) - np.asarray(mu, np.float64), 0)
    assert positive.sum() >= float(measures.null_mass(mu)) - 1e-7


def test_bug_008_strict_inequalities():
    inputs, expected, naive = load("bug-008")
    verify = jax.jit(strata.verifiers.token().verify)

    def is_accepted(case):
        verdict = verify(
            strata.verifiers.TokenDraws(
                accept=row([case["u"]]), residual=row([0, 0]), pick=jnp.zeros((2, 2))
            ),
            jnp.tile(row([[case["p_d"], 1 - case["p_d"]]]), (2, 1)),
            Proposal(
                tokens=jnp.zeros(1, jnp.int32),
                measure=row([[case["mu_d"], 0]]),
                kind=jnp.full(1, RowKind.OFFERED.value, jnp.int32),
            ),
        )
        has_bit = int(verdict.status) == Status.ZERO_MEASURE_OFFERED
        assert has_bit == (case["mu_d"] == 0)
        return int(verdict.num_accepted) == 1

    found = [is_accepted(case) for case in inputs["accept"]]
    check(found, expected["accept"], naive["inclusive"]["accept"], by=equal)
    found = [
        int(draw_token(row(case["p"]), row([0, case["u"]])))
        for case in inputs["inverse_cdf"]
    ]
    check(found, expected["token"], naive["inclusive"]["token"], by=equal)


def test_bug_010_draft_vocabularies():
    inputs, expected, _ = load("bug-010")
    p = inputs["target_p"]
    # A vocabulary of six over one of four is refused before anything is decoded.
    wide = strata.targets.tabular(6, max_length=_SIZE)
    with pytest.raises(ValueError, match="has 6 tokens, the target's 4"):
        strata.speculative_decoder(
            strata.targets.tabular(4, max_length=_SIZE),
            strata.drafters.model(wide, num_draft_tokens=1),
        )
    # Ids outside are mass that never reaches the verifier, like NULL.
    q = inputs["draft_q_over_6"][:4]
    measure, _, residual, _, law = row_numbers(p, q, np.ones(4))
    check(measure, expected["oov_mu_in_target_space"])
    check(measures.null_mass(measure), expected["oov_null_like_mass"], 0.0)
    check(residual, expected["oov_residual"], p)
    check(law, expected["oov_emit"])
    # The naive value: an id outside the row reads the last entry of it.
    clamped = jax.jit(lambda p, token: p[token])(row(p), inputs["draft_token"])
    check(0.0, expected["oov_draft_accept_prob"], min(1.0, float(clamped) / 0.5))
    q = [*inputs["smaller_draft_q_over_3"], 0.0]
    measure, accept, residual, _, law = row_numbers(p, q, np.ones(4))
    check(measure, expected["smaller_padded_mu"])
    check(accept, expected["smaller_accept"], [0.2, 2 / 3, 1.0, 1.0])
    check(residual, expected["smaller_residual"], p)
    check(law, expected["smaller_emit"])
    check(row_law(p, q), expected["smaller_emit"])


def test_bug_011_draft_vocabulary():
    inputs, expected, naive = load("bug-011")
    p, ids = inputs["p"], inputs["d2t_absolute"]
    params = unit_weights(moe_config(hidden_size=8))
    offsets = inputs["d2t_offsets"]
    with pytest.raises(ValueError, match=r"offsets d2t give i \+ d2t\[i\]"):
        models.with_draft_vocabulary(params, offsets)
    with pytest.raises(ValueError, match="repeats"):
        models.with_draft_vocabulary(params, [2, 0, 2])
    params = models.with_draft_vocabulary(params, np.arange(3) + offsets)
    assert params.mtp.draft_tokens.tolist() == ids
    np.testing.assert_array_equal(params.mtp.head, params.head[np.asarray(ids)])
    # A head that makes the case's logits of a state of ones.
    head = jnp.zeros((3, 8)).at[:, 0].set(row(log(inputs["draft_probs"])))
    mtp = models.with_shared_tables(params).replace(head=head)
    mu = jax.nn.softmax(models.draft_logits(mtp, jnp.ones(8)))
    in_draft_space = [*inputs["draft_probs"], 0.0]
    check(mu, expected["mu_target"], in_draft_space)
    _, accept, residual, _, law = row_numbers(p, mu, np.ones(4))
    wrong = row_numbers(p, in_draft_space, np.ones(4))
    check(accept, expected["accept"], wrong[1])
    check(residual, expected["residual"], wrong[2])
    check(law, expected["emit"], *naive.values())
    check(row_law(p, np.asarray(mu)), expected["emit"], *naive.values())


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2])
def test_bug_014_joint_law(num_draft_tokens):
    inputs, expected, naive = load("bug-014")
    assert num_draft_tokens in inputs["K"]
    instance = (
        padded_table(inputs["p1"], inputs["p2_given_1"]),
        padded_table(inputs["q1"], inputs["q2_given_1"]),
        {"threshold": inputs["threshold"]},
    )
    (joint,) = laws([instance], 2, num_draft_tokens)
    assert not joint[3].any() and not joint[:, 3].any()
    wrong = naive["failed_gate_samples_p_joint"]
    check(joint[:3, :3], expected["joint_first_two_tokens"], wrong)
    check(joint[:3, :3].sum(0), expected["marginal_token2"], np.sum(wrong, axis=0))


def test_bug_016_residual_noise_is_fresh():
    inputs, expected, naive = load("bug-016")
    decoder, _ = enumerated(1)
    params = Params(target=padded_table(inputs["p"]), drafter=padded_table(inputs["q"]))
    check(row_numbers(inputs["p"], inputs["q"], np.ones(3))[2], inputs["residual"])
    state = decoder.init(params, [_START])
    count = 40_000
    keys = jax.vmap(jax.random.key)(jnp.arange(count, dtype=jnp.uint32))

    @jax.jit
    @jax.vmap
    def first_token(key):
        _, window = decoder.step(params, state.replace(request_key=key))
        return window.verdict.tokens[0]

    found = np.bincount(np.asarray(first_token(keys)), minlength=4)[:3] / count
    five_sigma = 5 * 0.5 / np.sqrt(count)
    check(
        found,
        expected["emit"],
        naive["shared_noise_mc"],
        by=functools.partial(close, atol=five_sigma),
    )


def test_bug_017_position_keyed_draws():
    inputs, expected, naive = load("bug-017")
    p, uniforms = inputs["p_every_position"], inputs["u_by_position"]
    limit = inputs["max_new_tokens"]
    width = len(uniforms) - 1
    verify = jax.jit(strata.verifiers.exact_match().verify)

    def generate(drafts, start=()):
        tokens = list(start)
        while len(tokens) < limit:
            place = len(tokens)
            window = drafts[: len(uniforms) - place - 1]
            kind = np.zeros(width, np.int32)
            kind[: len(window)] = RowKind.OFFERED
            padded = np.full(width, -1, np.int32)
            padded[: len(window)] = window
            pick = np.zeros((width + 1, 2), np.float32)
            pick[: len(uniforms) - place, 1] = uniforms[place:]
            verdict = verify(
                strata.verifiers.ExactMatchDraws(pick=jnp.asarray(pick)),
                jnp.tile(row(p)[None], (width + 1, 1)),
                Proposal(
                    tokens=jnp.asarray(padded),
                    measure=jnp.full((width, len(p)), 1 / len(p)),
                    kind=jnp.asarray(kind),
                ),
            )
            tokens += verdict.tokens.tolist()[: int(verdict.num_emitted)]
        return tokens[:limit]

    wrong = naive["sequential_stream_with_drafts_0_0"]
    for drafts in inputs["drafts_tried"]:
        check(generate(drafts), expected["tokens"], wrong, by=equal)
        resumed = generate(drafts, expected["tokens"][:2])
        check(resumed, expected["tokens"], wrong, by=equal)


def test_bug_019_measure_is_what_was_drawn_from():
    inputs, expected, naive = load("bug-019")
    p, q = inputs["p"], inputs["drawn_from"]
    # The drafter's raw row goes through the request's filters, and so does p.
    _, accept, residual, _, law = row_numbers(p, q, np.ones(3))
    check(accept, expected["accept"], np.minimum(np.divide(p, inputs["recorded_q"]), 1))
    check(residual, expected["residual"], [0.0, 0.5, 0.6])
    wanted = expected["emit_when_recorded_equals_drawn"]
    check(law, wanted, naive["mismatched"])
    check(row_law(p, q), wanted, naive["mismatched"])
    # With a top_k the row that is drawn from is another than the raw one.
    decoder, _ = enumerated(1)
    raw = inputs["recorded_q"]
    params = Params(target=padded_table(p), drafter=padded_table(raw))
    state = decoder.init(params, [_START], top_k=2)
    _, window = jax.jit(decoder.step)(params, state)
    check(window.proposal.measure[0], [2 / 3, 1 / 3, 0, 0], [*raw, 0])
    law = row_law(p, raw, top_k=2)
    check(law, [0.5, 0.5, 0.0], p)


def test_bug_020_rows_are_cast_once():
    inputs, expected, naive = load("bug-020")
    logits = jnp.asarray(inputs["draft_logits"], jnp.bfloat16)
    settings = sampling_settings(4)
    counts = count_tokens(jnp.zeros(1, jnp.int32), jnp.int32(1), jnp.int32(1), 4)
    q, _ = chain_probs(settings, logits, counts)
    # The row in bfloat16 is another one.
    wrong = naive["drawn_bf16_row"]
    check(q, expected["q_if_bf16_logits_then_f32_softmax"], wrong)
    q, _ = chain_probs(settings, row(inputs["draft_logits"]), counts)
    check(q, expected["q_if_cast_to_f32_first"], wrong)
    check(row_law(inputs["p"], np.asarray(q)), expected["emit"], naive["emit"])


def test_bug_052_fallback_mixture():
    inputs, expected, naive = load("bug-052")
    p, q = inputs["p"], np.asarray(inputs["q"])
    mu = np.where(q >= inputs["threshold"], q, 0)
    # The token that stands in for a failed gate takes the whole NULL mass.
    combined = mu.copy()
    combined[inputs["suffix_token_used_when_gate_fails"]] += 1 - mu.sum()
    measure, accept, residual, _, law = row_numbers(p, combined, np.ones(3))
    check(measure, expected["mu_combined"], mu)
    check(accept, expected["accept"], row_numbers(p, mu, np.ones(3))[1])
    check(residual, expected["residual"], p)
    wrong = naive["one_hot_verify_after_failed_gate"]
    check(law, expected["emit"], wrong)
    check(row_law(p, combined), expected["emit"], wrong)


# The chain.


def chain(logits, *, prompt=(), output=(), temperature=1.0, **changes):
    logits = row([float(value) for value in logits])
    size = logits.shape[0]
    tokens = jnp.asarray([*prompt, *output, 0], jnp.int32)
    counts = count_tokens(
        tokens, jnp.int32(len(prompt)), jnp.int32(len(prompt) + len(output)), size
    )
    settings = sampling_settings(size, temperature=temperature, **changes)
    probs, status = _chain(settings, logits, counts)
    return np.asarray(probs), Status(int(status))


_chain = jax.jit(chain_probs)


@pytest.mark.parametrize("index", range(5))
def test_bug_022_top_p_boundary(index):
    inputs, expected, naive = load("bug-022")
    case = inputs["cases"][index]
    found, _ = chain(log(case["probs"]), top_p=case["top_p"])
    check(found, expected["final"][index], *naive["cum_le"][index : index + 1])


def test_bug_023_top_p_extremes():
    inputs, expected, _ = load("bug-023")
    for top_p, wanted in zip(
        inputs["top_p"],
        (expected["tiny"], expected["tiny"], expected["one"]),
        strict=True,
    ):
        found, status = chain(inputs["logits"], top_p=top_p)
        # Token 0, uniform noise, and NaN are what an empty mask gives.
        check(found, wanted, [1, 0, 0, 0], [0.25] * 4, [np.nan] * 4)
        assert status == Status.OK
    large = expected["large"]
    found, _ = chain(np.zeros(inputs["large"]["V"]), top_p=inputs["large"]["top_p"])
    kept = np.count_nonzero(found)
    assert large["kept_float32_at_least"] <= kept <= large["max_kept"]
    assert np.isfinite(found).all() == large["all_finite"]
    check(found.sum(dtype=np.float64), large["sum"], 0.0)


@pytest.mark.parametrize("index", range(3))
def test_bug_025_top_k_ties(index):
    inputs, expected, naive = load("bug-025")
    case = inputs["cases"][index]
    found, _ = chain(case["logits"], top_k=case["top_k"])
    check(found, expected["final"][index], naive["threshold_mask"][index])


@pytest.mark.parametrize("index", range(3))
def test_bug_026_temperature_is_last(index):
    inputs, expected, naive = load("bug-026")
    case = dict(inputs["cases"][index])
    logits, temperature = case.pop("logits"), case.pop("T")
    found, _ = chain(logits, temperature=temperature, **case)
    check(found, expected["final"][index], naive["temperature_first"][index])


@pytest.mark.parametrize("index", range(5))
def test_bug_028_min_p(index):
    inputs, expected, naive = load("bug-028")
    case = inputs["cases"][index]
    logits = case["logits"]
    if index == 2:
        # Its decimals stand a hair beside the cut; these are on it.
        logits = log([0.5, 0.25, 0.25])
    found, _ = chain(logits, min_p=case["min_p"])
    check(found, expected["final"][index], naive["logit_zero_fill"])


def test_bug_029_penalties():
    inputs, expected, naive = load("bug-029")
    text = {"prompt": inputs["prompt"], "output": inputs["output"]}
    repetition = {"repetition_penalty": inputs["repetition_penalty"]}
    others = {
        "presence_penalty": inputs["presence_penalty"],
        "frequency_penalty": inputs["frequency_penalty"],
    }

    def softmax(logits):
        return np.exp(logits) / np.exp(logits).sum()

    for settings, wanted, wrong in (
        (repetition, "repetition_only", ["divide_always"]),
        (others, "presence_frequency_only", ["prompt_counted"]),
        ({**repetition, **others}, "all_three_in_order_rep_then_freq_presence", []),
    ):
        found, _ = chain(inputs["logits"], **text, **settings)
        check(
            found, softmax(expected[wanted]), *(softmax(naive[name]) for name in wrong)
        )


def test_bug_031_bans_reach_every_row():
    inputs, expected, naive = load("bug-031")
    raw, mu = inputs["p_raw"], inputs["mu"]
    wrong = naive["ratio_from_unmasked_p"]
    bans = {token: -np.inf for token in inputs["ban"]}
    p, _ = chain(log(raw), logit_bias=bans)
    check(p, expected["p"], raw)
    _, accept, residual, _, law = row_numbers(p, mu, np.ones(3))
    draft = inputs["draft_token"]
    check(accept[draft], expected["accept_prob_draft0"], 1.0)
    check(residual, expected["residual"], raw)
    check(law, expected["emit"], wrong)
    # Through the loop, whose draft row knows the ban too; and in the rows after it.
    check(row_law(raw, mu, logit_bias=bans), expected["emit"], wrong)
    tables = padded_table(raw, [raw] * 3), padded_table(mu, [mu] * 3)
    (joint,) = laws([(*tables, {"logit_bias": bans})], 2)
    check(
        joint[:3, :3], np.outer(expected["emit"], expected["emit"]), np.outer(raw, raw)
    )
    # EOS until min_tokens: banned in the first row and not in the second.
    (joint,) = laws([(*tables, {"eos_ids": [0], "min_tokens": 1})], 2)
    check(joint[:3, :3], np.outer(expected["emit"], raw), np.outer(raw, raw))
    everything = {token: -np.inf for token in range(3)}
    found, status = chain(log(raw), logit_bias=everything)
    assert status == Status.EMPTY_SUPPORT
    check(found, [0, 0, 0], [1, 0, 0])


def test_bug_032_parameters_are_validated():
    inputs, expected, naive = load("bug-032")
    target = strata.targets.tabular(_VOCAB, max_length=_SIZE)
    decoder = strata.speculative_decoder(target, gate=strata.gates.picked())
    params = padded_table([1.0])

    def ask(settings):
        settings = dict(settings)
        if "num_draft_tokens" in settings:
            # No drafts is no drafter.
            count = settings.pop("num_draft_tokens")
            if count:
                strata.drafters.model(target, num_draft_tokens=count)
        if "gate_threshold" in settings:
            settings["threshold"] = settings.pop("gate_threshold")
        decoder.init(params, [0], **{"threshold": 0.5, **settings})

    assert expected["good"] == "accepted"
    for settings in inputs["good"]:
        ask(settings)
    for settings in inputs["bad"]:
        ((name, value),) = settings.items()
        value = float(value) if isinstance(value, str) else value
        shown = name.removeprefix("gate_")
        with pytest.raises(ValueError, match=f"{shown} .*got {value!r}"):
            ask({name: value})
    found, status = chain([0.5, 2.0, -1.0], temperature=1e-6)
    assert status == Status.OK
    check(found, [0, 1, 0], naive["T_minus_1"])


@pytest.mark.parametrize("index", range(6))
def test_bug_034_argmax_and_non_finite(index):
    inputs, expected, naive = load("bug-034")
    logits, wanted = inputs["cases"][index], expected["token"][index]
    found, status = chain(logits, temperature=0.0)
    if wanted == "error":
        assert status == (
            Status.EMPTY_SUPPORT if index == 4 else Status.NON_FINITE_LOGITS
        )
        check(found, [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1])
        return
    wrong = (naive["last_wins"], naive["argmax_of_f32_softmax"])[index]
    check(found, np.eye(3)[wanted], np.eye(3)[wrong])


# Arithmetic and caches.


def test_bug_037_rows_do_not_share_their_products():
    inputs, *_ = load("bug-037")
    assert "K=4096,N=64, M=1..8" in inputs["x"]
    size, width = 4096, 64
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=size,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=1,
        max_position=128,
    )
    index = np.arange(size)
    x = np.sin(0.37 * (np.arange(width)[:, None] * size + index) + 0.1)
    w = np.cos(0.11 * (index[:, None] * width + np.arange(width)) + 0.2)
    # A layer of zeros hands the embedding to the head; M rows of it are multiplied.
    params = LlamaParams(
        embedding=row(x),
        layers=(
            LlamaLayer(
                attention_norm=jnp.ones(size),
                query=jnp.zeros((size, 2)),
                key=jnp.zeros((size, 2)),
                value=jnp.zeros((size, 2)),
                output=jnp.zeros((2, size)),
                feed_forward_norm=jnp.ones(size),
                gate=jnp.zeros((size, 1)),
                up=jnp.zeros((size, 1)),
                down=jnp.zeros((1, size)),
            ),
        ),
        final_norm=jnp.ones(size),
        head=row(w.T),
    )
    zero = jnp.zeros((), jnp.int32)

    def rows(target, tokens):
        score = jax.jit(target.score)
        count = jnp.asarray(len(tokens), jnp.int32)
        tokens = jnp.asarray(tokens, jnp.int32)
        return np.asarray(
            score(params, target.init(params), tokens, zero, count)[0].logits
        )

    def windows(target):
        return [rows(target, range(count)) for count in (1, 2, 5, 8)]

    def one_value(windows):
        alone, *others = windows
        assert all(np.array_equal(other[0], alone[0]) for other in others)

    singleton = strata.targets.singleton(config, max_length=16)
    found = windows(singleton)
    wrong = windows(strata.targets.batched(config, max_length=16))
    check(found, None, wrong, by=lambda windows, _: one_value(windows))
    # Each row alone, too.
    for token in (3, 7):
        np.testing.assert_array_equal(rows(singleton, [token])[0], found[-1][token])
    normed = x[0] / np.sqrt(np.mean(x[0] ** 2) + 1e-5)
    close(found[0][0], normed @ w, atol=1e-2)


def test_bug_038_rounding_that_differs_between_paths():
    inputs, expected, naive = load("bug-038")
    logits = row(inputs["l"])

    @jax.jit
    def paths(logits):
        p = jax.nn.softmax(logits)
        mu = jnp.exp(logits - jax.nn.logsumexp(logits))
        return (
            p,
            mu,
            measures.acceptance(p, mu),
            measures.residual_weights(p, mu),
            measures.residual(p, mu),
        )

    p, mu, accept, weights, residual = (np.asarray(part) for part in paths(logits))
    assert accept.min() >= expected["accept_prob_lower_bound"]

    def is_not_negative(values, _):
        assert np.all(np.asarray(values) >= 0)

    wrong = naive["issue_expression_x0_1_s0"]["jit"]
    check(weights, None, wrong, by=is_not_negative)
    check(residual, None, wrong, by=is_not_negative)
    check(residual.sum(dtype=np.float64), expected["residual_sum_after_normalise"])
    accepted = mu.astype(np.float64) * accept
    law = accepted + (1 - accepted.sum()) * residual
    close(law, p, atol=expected["emit_error_bound"])


@quick_compilation()
def test_bug_044_cache_rows_are_never_shifted():
    inputs, *_ = load("bug-044")
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        max_position=128,
    )
    # 128 rows, exactly as many as the cache has; two are left for a window of four.
    target = strata.targets.singleton(config, max_length=128)
    params = random_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda leaf: row(rng.normal(size=leaf.shape)), target.init(params)
    )
    tokens = jnp.asarray([1, 2, 3, 4], jnp.int32)
    start, left = jnp.asarray(126, jnp.int32), jnp.asarray(2, jnp.int32)
    _, after = jax.jit(target.score)(params, cache, tokens, start, left)
    _, other = jax.jit(target.score)(params, cache, tokens + 1, start, left)
    for before, found, changed in zip(
        jax.tree.leaves(cache),
        jax.tree.leaves(after),
        jax.tree.leaves(other),
        strict=True,
    ):
        assert before.shape[1] == 128

        def committed_rows_stay(found, before):
            np.testing.assert_array_equal(found[:, :126], before[:, :126])

        # Four rows written at once would be moved to 124 .. 127.
        window = jnp.ones((before.shape[0], 4, before.shape[2]))
        shifted = jax.lax.dynamic_update_slice(before, window, (0, 126, 0))
        check(found, before, shifted, by=committed_rows_stay)
        assert np.all(np.any(found[:, 126:] != before[:, 126:], axis=2))
        assert np.all(np.any(found[:, 126:] != changed[:, 126:], axis=2))
    assert inputs["start"] + len(inputs["update"]) > inputs["cache_len"]


# Mixtures of experts, and their draft heads. Weights that are made by hand so that a
# layer computes something simple; all numbers are exact in float32.


def moe_config(**changes):
    sizes = {
        "vocab_size": 4,
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "num_experts": 4,
        "num_experts_per_token": 1,
        "expert_size": 1,
        # States of mean square 1 are their own norm.
        "norm_epsilon": 1e-30,
    }
    return models.MoeConfig(**{**sizes, **changes})


def unit_weights(config):
    """Random weights whose norms are 1."""

    def fill(path, leaf):
        is_norm = "norm" in jax.tree_util.keystr(path)
        return jnp.ones_like(leaf) if is_norm else leaf

    return jax.tree_util.tree_map_with_path(fill, moe_weights(config))


def without_attention(layer):
    return layer.replace(output=jnp.zeros_like(layer.output))


def passes_through(mtp):
    """A draft head whose layer gives back the projected state."""
    layer = without_attention(mtp.layer)
    experts = layer.experts
    experts = experts.replace(down=jnp.zeros_like(experts.down))
    return mtp.replace(layer=layer.replace(experts=experts))


@quick_compilation()
def test_bug_049_what_a_cell_joins():
    inputs, expected, naive = load("bug-049")
    config = moe_config(hidden_size=32)
    params = unit_weights(config)
    # The case's vectors, with ones and zeros so that their mean square is 1.
    vectors = np.zeros((2, 32), np.float32)
    vectors[0, : 2 + 27] = [*inputs["embed"], *np.ones(27)]
    vectors[1, : 2 + 7] = [*inputs["hidden"], *np.ones(7)]
    np.testing.assert_array_equal((vectors**2).mean(axis=1), 1.0)
    projection = np.zeros((64, 32), np.float32)
    for output, weights in enumerate(inputs["fc"]):
        projection[[0, 1, 32, 33], output] = weights
    mtp = passes_through(models.with_shared_tables(params)).replace(
        embedding=jnp.tile(vectors[:1], (4, 1)), projection=jnp.asarray(projection)
    )
    run = jax.jit(models.run_cell)

    def joined(mtp, hidden):
        cache = models.empty_mtp_cache(mtp, 4)
        state, *_ = run(mtp, cache, hidden, jnp.int32(1), jnp.int32(0))
        assert not state[2:].any()
        return state[:2]

    found = joined(mtp, vectors[1])
    check(found, expected["fc_out"], naive["swapped"])
    # The naive value is what the other order gives.
    swapped = mtp.replace(embedding=jnp.tile(vectors[1:], (4, 1)))
    check(joined(swapped, vectors[0]), naive["swapped"], expected["fc_out"])


@quick_compilation()
def test_bug_049_which_hidden_with_which_token():
    inputs, expected, naive = load("bug-049")
    window = inputs["window"]
    names = [*inputs["hiddens"], *window["hidden_rows"]]
    size, first_code = 96, 80
    # Cells show what they joined: the token at its place, the state's name after 80.
    # A cell's own state has its token's place as its name.
    config = moe_config(vocab_size=first_code, hidden_size=size, head_dim=size)
    mtp = unit_weights(config).mtp
    projection = np.zeros((2, size, size), np.float32)
    projection[0, :first_code, :first_code] = np.eye(first_code)
    projection[1, : size - first_code, first_code:] = np.eye(size - first_code)
    mtp = passes_through(mtp).replace(
        embedding=jnp.eye(first_code, size),
        head=jnp.eye(first_code, size),
        projection=jnp.asarray(projection.reshape(2 * size, size)),
    )
    mtp = mtp.replace(layer=mtp.layer.replace(value=jnp.eye(size)))
    features = np.eye(len(names), size, dtype=np.float32)

    def shown(state):
        token, name = np.argmax(state[:first_code]), np.argmax(state[first_code:])
        assert state[token] > 0 and state[first_code + name] > 0
        return [names[name] if name < len(names) else int(name), int(token)]

    def pairs(state, *cells):
        values = np.asarray(state.cache.values[0])
        return [shown(values[cell]) for cell in range(*cells)]

    drafter = strata.drafters.mtp(num_draft_tokens=window["K"])
    text = [*inputs["tokens"], inputs["next_sampled"]]
    # The prompt. Position 0 of the text is in no pair; cell 0 has its embedding.
    tokens = np.zeros(16, np.int32)
    tokens[:5] = text
    context = Context(tokens=jnp.asarray(tokens), length=jnp.int32(5))
    padded = np.zeros((16, size), np.float32)
    padded[:4] = features[:4]
    state = jax.jit(drafter.init)(mtp, context, padded)
    check(pairs(state, 4), expected["pairs"], naive["no_shift"], by=equal)
    assert expected["position_zero_embedding_kept"]
    # The drafts: each joins the head's own state of the cell before and the draft.
    drafts = [15, 12, 13]

    def offer(row_fn, carry):
        for index, previous in enumerate([text[-1], *drafts[:-1]]):
            step = DraftStep(
                row=jnp.int32(index),
                previous_token=jnp.int32(previous),
                to_row=lambda logits: DraftRow(logits, jnp.asarray(True)),
            )
            carry, _ = row_fn(carry, step)
        return None, carry

    propose = jax.jit(drafter.propose, static_argnums=3)
    _, state = propose(mtp, state, context, offer)
    assert pairs(state, 3, 6) == [["h3", 14], [14, 15], [15, 12]]
    # The window: its cells are overwritten, up to the last row that was kept.
    kept = window["accepted"] + 1
    tokens[5 : 5 + kept] = [*drafts[: window["accepted"]], window["correction"]]
    committed = Committed(
        context=Context(tokens=jnp.asarray(tokens), length=jnp.int32(5 + kept)),
        features=jnp.asarray(features[4:]),
        num_kept=jnp.int32(kept),
    )
    state = jax.jit(drafter.commit)(mtp, state, committed)
    assert pairs(state, 4, 6) == [["r0", 15], ["r1", 12]]
    wanted, stale = expected["next_draft_input"], naive["stale_hidden"]
    for found in (pairs(state, 6, 7)[0], shown(np.asarray(state.hidden))):
        check(found, wanted, stale, by=equal)


def test_bug_049_hidden_states_are_not_normed():
    config = moe_config()
    params = unit_weights(config)
    (layer,) = params.layers
    experts = layer.experts.replace(down=jnp.zeros_like(layer.experts.down))
    layer = without_attention(layer).replace(experts=experts)
    params = params.replace(layers=(layer,), final_norm=jnp.full(16, 3.0))
    rows = moe_rows(config, params, [1, 2, 3])
    embedded = np.asarray(params.embedding[1:])
    normed = 3 * embedded / np.sqrt((embedded**2).mean(axis=1, keepdims=True))
    check(rows.features, embedded, normed)
    check(rows.logits, normed @ np.asarray(params.head).T, embedded)


def test_bug_055_router_weights():
    inputs, expected, naive = load("bug-055")

    def routed(logits, per_token, normalize):
        config = moe_config(
            hidden_size=4, num_experts_per_token=per_token, normalize_router=normalize
        )
        function = jax.jit(lambda states: route(config, jnp.eye(4), states))
        experts, weights, _ = function(row(logits))
        return experts.tolist(), weights

    logits, per_token = inputs["router_logits"], inputs["top_k"]
    raw = naive["raw_logits"]
    experts, weights = routed(logits, per_token, False)
    wrong = naive["softmax_of_selected_when_norm_false"]
    check(weights, expected["norm_false"], wrong, raw)
    assert experts == expected["experts"]
    experts, weights = routed(logits, per_token, True)
    check(weights, expected["norm_true"], expected["norm_false"], raw)
    assert experts == expected["experts"]
    batch = inputs["batch_for_k1"]
    _, weights = routed(batch, 1, True)
    check(weights[:, 0], expected["k1_norm_true"], expected["k1_norm_false"])
    _, weights = routed(batch, 1, False)
    over_tokens = np.asarray(expected["k1_norm_false"])
    over_tokens = over_tokens / over_tokens.sum()
    check(weights[:, 0], expected["k1_norm_false"], [1.0, 1.0], over_tokens)


@functools.cache
def moe_target(config):
    target = strata.targets.singleton(config, max_length=8)
    return target, jax.jit(target.score)


def moe_rows(config, params, tokens):
    """The rows of a window at position 0."""
    target, score = moe_target(config)
    zero, count = jnp.int32(0), jnp.int32(len(tokens))
    tokens = jnp.asarray(tokens, jnp.int32)
    with quick_compilation():
        return score(params, target.init(params), tokens, zero, count)[0]


_OUTPUT = 15


def simple_experts(config, logits, outputs):
    """Token t is [t, 1, ...]; expert e adds scale * (t or 1) to the last entry."""
    embedding = np.zeros((4, 16), np.float32)
    embedding[:, 1] = 1
    for token in (1, 2, 3):
        embedding[token, 0] = token
        embedding[token, 2 : 2 + 15 - token**2] = 1
        assert (embedding[token] ** 2).mean() == 1
    params = unit_weights(config)
    (layer,) = params.layers
    gate, up, down = (
        np.zeros(array.shape, np.float32) for array in jax.tree.leaves(layer.experts)
    )
    # The gate's silu of 32 is 32.
    gate[:, 0, 1] = 32
    for expert, (source, scale) in enumerate(outputs):
        up[expert, 0, source] = 1
        down[expert, _OUTPUT, 0] = scale / 32
    router = np.zeros((4, 16), np.float32)
    router[:, 1] = logits
    experts = layer.experts.replace(
        gate=jnp.asarray(gate), up=jnp.asarray(up), down=jnp.asarray(down)
    )
    layer = without_attention(layer).replace(
        router=jnp.asarray(router), experts=experts
    )
    return params.replace(layers=(layer,), embedding=jnp.asarray(embedding))


def expert_outputs(config, params, tokens, rows=moe_rows):
    features = rows(config, params, tokens).features
    return np.asarray(features - params.embedding[jnp.asarray(tokens)])[:, _OUTPUT]


def forward_rows(config, params, tokens):
    forward = jax.jit(models.moe_forward, static_argnums=0)
    with quick_compilation():
        outputs = forward(config, params, jnp.asarray([tokens], jnp.int32))
    return strata.TargetRows(outputs.logits[0], outputs.hidden[0])


def test_bug_056_no_token_is_dropped():
    inputs, expected, naive = load("bug-056")
    config = moe_config(num_experts_per_token=inputs["top_k"])
    assert inputs["expert_fn"] == "e0(x)=10x, e1(x)=-x"
    # Two experts, and two that no token goes to.
    logits = [*inputs["router_logits"][0], -100.0, -100.0]
    outputs = [(0, 10.0), (0, -1.0), (0, 0.0), (0, 0.0)]
    params = simple_experts(config, logits, outputs)
    tokens = [int(token) for token in inputs["tokens"]]
    wanted, wrong = expected["outputs_norm_true"], naive["capacity_dropped"]
    assert expected["bitwise_equal_to_singleton"]
    check(expert_outputs(config, params, tokens), wanted, wrong)
    for token, value in zip(tokens, wanted, strict=True):
        assert expert_outputs(config, params, [token]) == [value]
    # Nor in training, whatever the neighbours.
    check(expert_outputs(config, params, tokens, forward_rows), wanted, wrong)


def test_bug_056_ties_and_order():
    inputs, expected, naive = load("bug-056")
    tie = inputs["tie_row"]
    config = moe_config(hidden_size=4, num_experts_per_token=tie["top_k"])
    experts, *_ = route(config, jnp.eye(4), row(tie["logits"]))
    check(experts.tolist(), expected["tie_experts"], [1, 2], by=equal)
    # A tie of all gives weights of 1 / 4, and the order of the ids.
    probe = inputs["sum_probe"]
    config = moe_config(num_experts_per_token=3, normalize_router=False)
    values = [
        4 * weight * output
        for weight, output in zip(
            probe["weights"], probe["expert_outputs"], strict=True
        )
    ]
    assert expected["sum_probe"].endswith(": 0.0")
    wrong = naive["other_order_sum"]

    def sums(logits, values):
        outputs = [(1, value) for value in values]
        params = simple_experts(config, logits, outputs)
        window = expert_outputs(config, params, [1, 2, 3])
        for token in (1, 2, 3):
            # The same bits alone.
            np.testing.assert_array_equal(
                expert_outputs(config, params, [token]), window[token - 1]
            )
        return window

    check(sums([0, 0, 0, 0], [*values, 0.0]), [0.0] * 3, [wrong] * 3)
    large, one, minus = values
    check(sums([0, 0, 0, 0], [large, minus, one, 0.0]), [wrong] * 3, [0.0] * 3)
    # The router's order, not that of the ids: experts 1 and 2 cancel first.
    big = 2.0**27
    weight = 1 / (1 + 2 * np.e)
    check(sums([0, 1, 1, -100], [1.0, big, -big, 0.0]), [weight] * 3, [0.0] * 3)


# Ends.


@functools.cache
def ten_tokens():
    """A decoder over ten tokens with up to four drafts; tables say what follows."""
    target = strata.targets.tabular(10, max_length=16)
    decoder = strata.speculative_decoder(
        target, strata.drafters.model(target, num_draft_tokens=4)
    )
    return decoder, jax.jit(decoder.step)


def chain_table(*tokens):
    """After tokens[i] comes tokens[i + 1], for sure; after the last, 0."""
    table = np.zeros((10, 10))
    table[:, 0] = 1
    for one, following in itertools.pairwise(tokens):
        table[one] = np.eye(10)[following]
    return TabularParams(logits=jnp.asarray(log(table), jnp.float32))


def run_windows(prompt, accepted, final, **settings):
    """The target goes on with accepted and final; the drafter errs at final."""
    decoder, step = ten_tokens()
    text = [prompt[-1], *accepted]
    params = Params(
        target=chain_table(*text, final), drafter=chain_table(*text, (final + 1) % 10)
    )
    state = decoder.init(params, prompt, **settings)
    emitted, windows = [], []
    while int(state.finish_reason) == FinishReason.RUNNING and len(windows) < 16:
        state, window = step(params, state)
        windows.append(window)
        count = int(window.verdict.num_emitted)
        emitted += window.verdict.tokens.tolist()[:count]
    assert emitted == strata.output_tokens(state).tolist()
    return emitted, state, windows, params


def test_bug_040_eos_inside_the_window():
    inputs, expected, naive = load("bug-040")
    prompt, settings = [9] * inputs["prompt_len"], {"eos_ids": [inputs["eos"]]}
    settings["max_new_tokens"] = inputs["max_new_tokens"]
    (window,) = inputs["windows"]
    emitted, state, windows, params = run_windows(
        prompt, window["accepted"], window["final"], **settings
    )
    check(emitted, expected["tokens"], naive["leak"], by=equal)
    assert expected["finish"] == "eos"
    assert int(state.finish_reason) == FinishReason.EOS
    assert int(state.context.length) == expected["kv_len"]
    verdict = windows[0].verdict
    # Padded, and only accepted drafts that were emitted are counted.
    assert verdict.tokens.tolist() == [*expected["tokens"], -1, -1, -1]
    assert int(verdict.num_accepted) == expected["accepted_counted_in_metrics"]
    _, step = ten_tokens()
    again, window = step(params, state)
    assert int(window.verdict.num_emitted) == 0
    for name in ("context", "counts", "window", "target_state", "drafter_state"):
        for one, other in zip(
            jax.tree.leaves(getattr(again, name)),
            jax.tree.leaves(getattr(state, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
    second = inputs["second"]
    emitted, *_ = run_windows(prompt, second["accepted"], second["final"], **settings)
    check(emitted, expected["second"], [5, 6, 2, 0], by=equal)
    # A prompt that ends with EOS goes on; one token is asked for here.
    third = inputs["third"]
    assert third["prompt_ends_with_eos"]
    emitted, *_ = run_windows(
        [9, 9, 9, inputs["eos"]],
        third["accepted"],
        third["final"],
        eos_ids=[inputs["eos"]],
        max_new_tokens=1,
    )
    check(emitted, expected["third"], [], by=equal)


@pytest.mark.parametrize("index", range(4))
def test_bug_041_the_budget_is_a_hard_cap(index):
    inputs, expected, naive = load("bug-041")
    case = inputs["cases"][index]
    emitted, state, windows, _ = run_windows(
        [9, 8], case["accepted"], case["final"], max_new_tokens=case["remaining"]
    )
    wrong = [] if index == 2 else [naive["overrun"]]
    check(emitted, expected["emitted"][index], *wrong, by=equal)
    assert len(emitted) == expected["usage"][index]
    assert expected["finish"][index] == "length"
    assert int(state.finish_reason) == FinishReason.LENGTH
    if index == 3:
        assert windows == []  # no model call


@pytest.mark.parametrize("index", range(7))
def test_bug_043_drafts_are_limited_before_they_are_drawn(index):
    inputs, expected, naive = load("bug-043")
    case, wanted = inputs["cases"][index], expected["drafts_allowed"][index]
    decoder, step = ten_tokens()
    assert (decoder.max_length, decoder.num_draft_tokens) == (16, inputs["num_draft"])
    params = Params(target=chain_table(0), drafter=chain_table(0))
    state = decoder.init(
        params, [0] * case["cur"], max_new_tokens=case["remaining_new"]
    )
    if case["cur"] == 16:
        assert int(state.finish_reason) == FinishReason.LENGTH
    state, window = step(params, state)
    kinds = window.proposal.kind.tolist()
    # Target and drafter agree, so all that is drawn is offered, and accepted.
    wrong = [] if wanted == 4 else [naive["unbounded"]]
    check(kinds.count(RowKind.OFFERED), wanted, *wrong, by=equal)
    assert kinds == [1] * wanted + [0] * (4 - wanted)  # ABSENT, not NULL
    emitted = int(window.verdict.num_emitted)
    assert emitted == (0 if case["cur"] == 16 else wanted + 1)
    assert int(state.context.length) == case["cur"] + emitted
