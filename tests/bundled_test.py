"""The contracts on the bundled model: bits in every format and place, and the law."""

import dataclasses
import hashlib
import re

import bundled_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import (
    checkpoints,
    diagnostics,
    drafters,
    experts,
    gates,
    models,
    targets,
    testing,
    verifiers,
)
from strata_jax.audit import negative_controls
from strata_jax.checkpoints._bundled import bundled_file

NUM_TOKENS = 128
SEED = 3


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(checks.FEW_LAYOUTS, id="few"),
        pytest.param(checks.LAYOUTS, id="all", marks=pytest.mark.slow),
    ],
)
def mixed(request):
    """Every kind of format, or every format, in some layer, folded and not."""
    _, params = checks.loaded()
    return checks.with_layouts(params, request.param)


@pytest.fixture(scope="module")
def plain(mixed):
    return checks.plain_run(mixed, NUM_TOKENS, SEED)


def test_the_file_is_the_one_on_its_card():
    path = checkpoints.bundled_path()
    content = path.read_bytes()
    card = (path.parent / "README.md").read_text("utf-8")
    assert len(content) <= 10_000_000
    assert hashlib.sha256(content).hexdigest() in card
    loss = re.search(r"these weights \| ([0-9.]+) nats", card)
    assert loss is not None and float(loss[1]) <= 1.70
    overlaps = re.findall(r"draft (\d), temperature 1 \| ([0-9.]+)", card)
    assert [name for name, _ in overlaps] == ["1", "2"]
    assert float(overlaps[0][1]) >= 0.60 and float(overlaps[1][1]) >= 0.40


def test_a_missing_file_of_weights_names_its_script():
    with pytest.raises(FileNotFoundError, match=r"train it with experiments/train_x"):
        bundled_file("nothing.safetensors", "train_x.py")


def test_load_bundled_gives_a_target_and_its_weights():
    target, params = strata.load_bundled(max_length=64)
    assert target.vocab_size == 256 and target.max_length == 64
    assert params.mtp is not None
    assert isinstance(params.layers[0].experts, experts.PackedExperts)
    with pytest.raises(ValueError, match="max_length"):
        strata.load_bundled(max_length=10**6)


@pytest.mark.slow  # the README's example, run by docs_test.py, writes as well
def test_it_writes_text_with_its_draft_head():
    target, params = strata.load_bundled(max_length=256)
    decoder = strata.speculative_decoder(
        target,
        drafters.mtp(num_draft_tokens=2),
        gates.picked(0.3),
        verifiers.token(),
    )
    generation = strata.generate(
        decoder,
        params,
        checkpoints.ByteTokenizer(),
        checks.PROMPT,
        max_new_tokens=96,
        seed=1,
    )
    # Letters, blanks and marks, in words: not noise.
    assert re.fullmatch(r"[\w\s.,:;!?'&\[\]()\"-]+", generation.text)
    assert len(generation.text.split()) > 8
    summary = diagnostics.summarize_acceptance(generation.verdicts)
    assert summary.tokens_per_window > 1.2


@pytest.mark.parametrize("num_layers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_widths_rejections_prefill_and_batches(mixed, plain, tmp_path, num_layers):
    config, _ = checks.loaded()
    config = dataclasses.replace(config, num_layers=num_layers)
    # Half of the text: it is scored once for each width and each rejected draft.
    tokens = plain[0][: NUM_TOKENS // 2]
    tiers = ("host", "cold", "resident", "host")[:num_layers]
    some = dataclasses.replace(mixed, layers=mixed.layers[:num_layers])
    params = checks.placed(some, tiers, tmp_path)
    target = targets.singleton(
        config, max_length=checks.MAX_LENGTH, num_cached_experts=3
    )
    counts = testing.check_target(
        target, params, tokens, max_width=8, poison=testing.poison_cache
    )
    print("\nrows bitwise equal to the one-token program:", counts)
    assert counts["widths"] == 8 * len(tokens)


# Pairs of gate and tier, of gate and drafter, of format and tier (each layer holds a
# part of the layouts, and sees every tier): every pair is in some run.
COVERING = {
    "picked": ("picked", "suffix_root", ("resident", "host", "cold", "cold"), 3),
    "top": ("top", "mtp", ("cold", "resident", "host", "resident"), 0),
    "none": ("none", "suffix_root", ("host", "cold", "resident", "host"), 8),
}


@pytest.mark.parametrize(
    "name",
    # The first has both drafters' rows, all tiers, all formats; pairs need the others.
    [
        pytest.param(name, marks=[] if name == "picked" else [pytest.mark.slow])
        for name in COVERING
    ],
)
def test_rows_of_windows_are_those_of_plain_decoding(mixed, plain, tmp_path, name):
    gate, drafter, tiers, num_cached = COVERING[name]
    tokens, rows = plain
    params = checks.placed(mixed, tiers, tmp_path)
    decoder = checks.make_decoder(gate, drafter, num_cached_experts=num_cached)
    ours, our_rows, windows = checks.run(decoder, params, NUM_TOKENS, SEED)
    np.testing.assert_array_equal(ours, tokens)
    np.testing.assert_array_equal(our_rows, rows)
    verdict = windows.verdict
    widths = np.bincount((windows.proposal.kind == strata.RowKind.OFFERED).sum(axis=1))
    sources = np.bincount(verdict.source[verdict.num_emitted > 0], minlength=3)
    is_point = (windows.proposal.measure[:, 1:] == 1).any(axis=2).sum()
    print(
        f"\n{name}: {len(rows)} rows equal; windows by drafts offered {widths}, by end "
        f"(bonus, rejection, NULL) {sources}, suffix rows {is_point}"
    )
    assert sources[strata.Source.REJECTION] > 10
    if drafter == "suffix_root":
        assert is_point > 0


def test_the_batched_control_fails_the_same_check(mixed, plain):
    config, _ = checks.loaded()
    tokens, _ = plain
    target = targets.batched(config, max_length=checks.MAX_LENGTH)
    with pytest.raises(testing.ConformanceError, match=r"T1: .* logits differ"):
        testing.check_target(target, mixed, tokens[:16])


@pytest.mark.slow
def test_the_batched_control_differs(mixed, plain):
    config, _ = checks.loaded()
    tokens, rows = plain
    target = targets.batched(config, max_length=checks.MAX_LENGTH)
    decoder = strata.speculative_decoder(
        target, drafters.mtp(num_draft_tokens=3), bit_exact=False
    )
    ours, our_rows, _ = checks.run(decoder, mixed, 64, SEED)
    # Up to the first token that differs, the text is the same.
    num_same = int(np.argmin(np.append(ours == tokens[:64], False)))
    is_different = (our_rows[:num_same] != rows[:num_same]).any(axis=1)
    print(f"\nbatched: {is_different.sum()} of {num_same} rows differ")
    assert is_different.mean() > 0.5


# The law of the first token.
NUM_SEEDS = 200_000
FALSE_ALARM = 1e-4
THRESHOLD = 0.1
LAW_PROMPT = checkpoints.ByteTokenizer().encode("The King is ")
LAW_LENGTH = 128


def first_windows(num_steps):
    """Counts of first tokens of whole steps, `[V]`; p of that token, q of its draft."""
    config, params = checkpoints.load_bundled_config()
    params = models.unpack_model_experts(params)
    target = targets.singleton(config, max_length=LAW_LENGTH)
    decoder = strata.speculative_decoder(
        target, drafters.mtp(num_draft_tokens=1), gates.picked(), verifiers.token()
    )
    state = decoder.init(params, LAW_PROMPT, max_new_tokens=8, threshold=THRESHOLD)

    @jax.jit
    def windows(params, state, seeds, thresholds):
        def one(request):
            seed, threshold = request
            settings = state.settings.replace(gate={"threshold": threshold})
            key = strata._rng.request_key(seed)
            _, window = decoder.step(
                params, state.replace(settings=settings, request_key=key)
            )
            first = window.target_probs[0], window.proposal.measure[0]
            return window.verdict.tokens[0], *first

        return jax.lax.map(one, (seeds, thresholds))

    seeds = jnp.arange(num_steps + 1, dtype=jnp.uint32)
    # The last request is not counted: its gate admits all, so its measure is q.
    thresholds = jnp.full(num_steps + 1, THRESHOLD).at[-1].set(0.0)
    found, p, q = (np.asarray(x) for x in windows(params, state, seeds, thresholds))
    assert (found >= 0).all()
    np.testing.assert_array_equal(p, np.tile(p[:1], (len(p), 1)))
    return np.bincount(found[:-1], minlength=256), p[-1], q[-1]


def count_first_tokens(decoder, params, first_seed, num_seeds):
    """First tokens of requests that differ in their seed alone, `[V]` counts."""
    state = decoder.init(params, LAW_PROMPT, max_new_tokens=8)

    @jax.jit
    def tokens(params, state, seeds):
        def one(seed):
            key = strata._rng.request_key(seed)
            request = dataclasses.replace(state, request_key=key)
            return decoder.step(params, request)[1].verdict.tokens[0]

        return jax.lax.map(one, seeds)

    seeds = jnp.arange(first_seed, first_seed + num_seeds, dtype=jnp.uint32)
    found = np.asarray(tokens(params, state, seeds))
    assert (found >= 0).all()
    return np.bincount(found, minlength=256)


def row_decoder(p, q, wrap, gate):
    """Draw, gate and verify on the bundled model's first row, without the model."""
    length = len(LAW_PROMPT)
    script = np.zeros((length + 1, 256), np.float32)
    script[length] = q / q.sum(dtype=np.float64)
    target = targets.tabular(256, max_length=LAW_LENGTH, order=0)
    drafter = wrap(drafters.scripted(script, num_draft_tokens=1))
    decoder = strata.speculative_decoder(target, drafter, gate, verifiers.token())
    return decoder, targets.TabularParams(jnp.log(jnp.asarray(p)))


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [2_000, 20_000])
def test_first_token_law_and_its_control(num_steps):
    counts, p, q = first_windows(num_steps)
    bias = np.where(q < THRESHOLD, q, 0).sum()
    assert 0.05 < bias < 0.95  # the gate has something to do on this row
    through_step = diagnostics.chi_square(counts, p)
    decoder, tables = row_decoder(
        p, q, lambda drafter: drafter, gates.picked(THRESHOLD)
    )
    counts = counts + count_first_tokens(
        decoder, tables, num_steps, NUM_SEEDS - num_steps
    )
    ours = diagnostics.chi_square(counts, p)
    control, tables = row_decoder(
        *(p, q),
        lambda drafter: negative_controls.unaccounted_gate(drafter, THRESHOLD),
        gates.always(),
    )
    wrong = count_first_tokens(control, tables, 0, NUM_SEEDS)
    biased = diagnostics.chi_square(wrong, p)
    print(
        f"\nfirst token, false-alarm rate {FALSE_ALARM}: {num_steps} through step "
        f"p-value {through_step.p_value:.3g}; {counts.sum()} in all "
        f"{ours.p_value:.3g}; unaccounted gate {biased.p_value:.3g}, total variation "
        f"{diagnostics.total_variation(wrong / wrong.sum(), p):.4f}"
    )
    assert counts.sum() == wrong.sum() == NUM_SEEDS
    assert through_step.p_value > FALSE_ALARM
    assert ours.p_value > FALSE_ALARM
    assert biased.p_value < FALSE_ALARM
