"""Faults of a draft count only if the emission reaches them, and never hide a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import audit, drafters, gates, targets, testing, verifiers
from strata_jax.targets import TabularParams

VERIFIERS = {"token": verifiers.token, "exact_match": verifiers.exact_match}


def independent(probs):
    with np.errstate(divide="ignore"):
        return TabularParams(jnp.asarray(np.log(np.asarray(probs)), float))


def table_target(vocab_size=3):
    return targets.tabular(vocab_size, max_length=16, order=0)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_drafter_whose_tokens_are_all_banned_only_costs_speed(name):
    target = table_target()
    decoder = strata.speculative_decoder(
        target, drafters.model(target, num_draft_tokens=2), verifier=VERIFIERS[name]()
    )
    # EOS is banned for two tokens, and the drafter knows nothing else.
    params = strata.Params(
        target=independent([0.4, 0.3, 0.3]), drafter=independent([0, 0, 1])
    )
    settings = {"eos_ids": [2], "min_tokens": 2, "max_new_tokens": 8}
    for seed in range(5):
        state = decoder.init(params, [0], seed=seed, **settings)
        state, verdicts = strata.decode(decoder, params, state, 8)
        assert int(state.status) == strata.Status.OK
        tokens = strata.output_tokens(state)
        assert len(tokens) >= 3
        assert not (tokens[:2] == 2).any()
        assert verdicts.kind[0].tolist() == [strata.RowKind.ABSENT] * 2


def test_everything_banned_names_the_ban():
    target = table_target()
    decoder = strata.speculative_decoder(
        target, drafters.model(target, num_draft_tokens=2)
    )
    banned = independent([0, 0, 1])
    params = strata.Params(target=banned, drafter=banned)
    state = decoder.init(params, [0], logit_bias={2: -np.inf})
    with pytest.raises(strata.DecodingError, match="status EMPTY_SUPPORT:"):
        strata.decode(decoder, params, state, 1)


def rows_drafter(rows):
    def make_rows(context):
        del context
        script = jnp.asarray(rows)
        return lambda step: strata.DraftRow(script[step.row], jnp.asarray(True))

    return drafters.stateless(make_rows, num_draft_tokens=2, vocab_size=3)


@pytest.mark.parametrize("name", VERIFIERS)
def test_eos_is_not_overruled_by_a_bad_draft_behind_it(name):
    decoder = strata.speculative_decoder(
        table_target(),
        rows_drafter([[0.0, 0.0, 1.0], [0.5, 0.2, 0.2]]),
        verifier=VERIFIERS[name](),
        draft_rule="sample",
    )
    params = independent([0, 0, 1])
    state = decoder.init(params, [0], eos_ids=[2])
    state, _ = strata.decode(decoder, params, state, 1)
    assert int(state.finish_reason) == strata.FinishReason.EOS
    assert strata.output_tokens(state).tolist() == [2]
    # Without EOS the emission reaches the bad row: its own token is the target's.
    state = decoder.init(params, [0])
    with pytest.raises(strata.DecodingError, match="UNNORMALIZED_DRAFT") as error:
        strata.decode(decoder, params, state, 1)
    assert error.value.tokens.tolist() == [2, 2]


def test_a_rejection_before_a_bad_draft_leaves_the_request_running():
    decoder = strata.speculative_decoder(
        table_target(), rows_drafter([[0.0, 1.0, 0.0], [0.5, 0.2, 0.2]])
    )
    params = independent([1, 0, 0])
    state, _ = strata.decode(decoder, params, decoder.init(params, [0]), 1)
    assert int(state.status) == strata.Status.OK
    assert strata.output_tokens(state).tolist() == [0]


def test_rows_within_the_tolerance_keep_the_law():
    eps = np.finfo(np.float32).eps
    row = np.array([0.875, 0.125])
    target = table_target(2)
    for factor in (1 + 3 * eps, 1 - 3 * eps):
        script = np.tile(row * factor, (16, 1))
        decoder = strata.speculative_decoder(
            target,
            drafters.scripted(script, num_draft_tokens=1),
            gates.picked(0.5),
            verifiers.token(),
        )
        params = independent([0.5, 0.5])
        testing.check_law(decoder, params, [0], np.array([0.5, 0.5]), num_tokens=1)
    with pytest.raises(ValueError, match=r"probs\[0\] is no distribution"):
        drafters.scripted(np.tile(row * (1 + 30 * eps), (4, 1)), num_draft_tokens=1)


def test_a_text_that_has_ended_is_not_gone_on_with():
    decoder = strata.ancestral_decoder(table_target())
    params = independent([0.4, 0.3, 0.3])
    state = decoder.init(params, [0, 2], prompt_length=1, eos_ids=[2])
    assert int(state.finish_reason) == strata.FinishReason.EOS
    # An EOS of the prompt ends nothing.
    state = decoder.init(params, [0, 2], eos_ids=[2])
    assert int(state.finish_reason) == strata.FinishReason.RUNNING


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"gate": gates.picked}, r"gate must be a strata_jax\.Gate.*call the factory"),
        ({"verifier": verifiers.token}, r"verifier must be a strata_jax\.Verifier"),
        ({"drafter": gates.always()}, r"drafter must be a strata_jax\.Drafter"),
        (
            {
                "drafter": drafters.stateless(
                    lambda context: None, num_draft_tokens=2.5, vocab_size=3
                )
            },
            "num_draft_tokens must be an integer",
        ),
        ({"gate": gates.picked(0.5, setting="stop")}, "names of the request's own"),
    ],
)
def test_parts_that_are_none(part, match):
    with pytest.raises(ValueError, match=match):
        strata.speculative_decoder(table_target(), **part)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"min_tokens": 2**31}, "min_tokens"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": "0.5"}, "temperature must be a number"),
        ({"eos_ids": 2}, "eos_ids must be a sequence"),
        ({"eos_ids": None}, "eos_ids must be a sequence"),
        ({"logit_bias": [1.0, 2.0]}, "logit_bias must map"),
        ({"context": [[1], [1, 2]]}, "context must be a one-dimensional"),
    ],
)
def test_settings_that_are_none(setting, match):
    decoder = strata.ancestral_decoder(table_target())
    arguments = {"context": [0], **setting}
    with pytest.raises(ValueError, match=match):
        decoder.init(independent([0.4, 0.3, 0.3]), **arguments)


def test_enumeration_refuses_a_negative_length():
    decoder = strata.ancestral_decoder(table_target())
    params = independent([0.4, 0.3, 0.3])
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        audit.sequence_law(decoder, params, decoder.init(params, [0]), -1)


def test_check_target_refuses_a_text_that_does_not_fit():
    with pytest.raises(ValueError, match="max_length = 16"):
        testing.check_target(
            table_target(), independent([0.4, 0.3, 0.3]), np.zeros(40, int)
        )


def test_check_gate_names_a_missing_setting():
    with pytest.raises(ValueError, match="threshold has no default"):
        testing.check_gate(gates.picked())


def test_without_draft_rows_there_is_no_draft_status():
    decoder = strata.ancestral_decoder(table_target())
    params = independent([0.4, 0.3, 0.3])
    _, window = jax.jit(decoder.step)(params, decoder.init(params, [0]))
    assert int(window.verdict.status) == strata.Status.OK
