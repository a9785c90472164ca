"""A request's settings: what is off, what is refused, and in which dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.sampling import MAX_EOS_IDS, sampling_settings

_LARGEST = float(np.finfo(np.float32).max)


def test_defaults_are_off():
    settings = sampling_settings(5)
    assert float(settings.temperature) == 1.0
    assert int(settings.top_k) == 5
    assert float(settings.top_p) == 1.0
    assert float(settings.min_p) == 0.0
    assert float(settings.repetition_penalty) == 1.0
    assert float(settings.presence_penalty) == 0.0
    assert float(settings.frequency_penalty) == 0.0
    assert settings.logit_bias.tolist() == [0.0] * 5
    assert settings.eos_ids.tolist() == [-1] * MAX_EOS_IDS
    assert int(settings.min_tokens) == 0


def test_shapes_and_dtypes_do_not_depend_on_the_values():
    plain = sampling_settings(5)
    full = sampling_settings(
        5,
        temperature=0,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={1: -np.inf, 2: 3},
        eos_ids=(4, 0),
        min_tokens=7,
    )
    for name in plain.__dataclass_fields__:
        one, other = getattr(plain, name), getattr(full, name)
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        # A weakly typed value would be traced again.
        assert one.weak_type == other.weak_type
    assert full.logit_bias.tolist() == [0.0, -np.inf, 3.0, 0.0, 0.0]
    assert full.eos_ids.tolist()[:3] == [4, 0, -1]


@pytest.mark.parametrize(
    ("top_k", "expected"), [(0, 5), (-1, 5), (5, 5), (6, 5), (10**6, 5), (1, 1), (4, 4)]
)
def test_top_k_is_off_from_the_vocabulary_on(top_k, expected):
    assert int(sampling_settings(5, top_k=top_k).top_k) == expected


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": float(np.finfo(np.float32).tiny)},
        {"temperature": 1e30},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-30},
        {"presence_penalty": -2.0},
        {"frequency_penalty": _LARGEST},
        {"logit_bias": {0: -np.inf}},
        {"logit_bias": {}},
        {"eos_ids": range(MAX_EOS_IDS)},
        {"eos_ids": [np.int32(3)]},
    ],
)
def test_good_values(good):
    sampling_settings(9, **good)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"temperature": -1.0}, "temperature.*-1"),
        ({"temperature": float("inf")}, "temperature.*inf"),
        # A subnormal would be flushed to zero: another distribution.
        ({"temperature": 1e-39}, "temperature.*1e-39"),
        ({"temperature": None}, "temperature"),
        ({"top_k": -2}, "top_k.*-2"),
        ({"top_k": 1.5}, "top_k.*1.5"),
        ({"top_k": True}, "top_k.*True"),
        ({"top_p": float("nan")}, "top_p.*nan"),
        ({"top_p": -0.1}, "top_p.*-0.1"),
        ({"top_p": 1.5}, "top_p.*1.5"),
        ({"min_p": float("nan")}, "min_p.*nan"),
        ({"min_p": 1.1}, "min_p.*1.1"),
        ({"min_p": -0.1}, "min_p.*-0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty.*0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty.*nan"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty.*inf"),
        ({"presence_penalty": float("nan")}, "presence_penalty.*nan"),
        ({"presence_penalty": float("inf")}, "presence_penalty.*inf"),
        ({"frequency_penalty": -float("inf")}, "frequency_penalty.*-inf"),
        ({"logit_bias": {5: 1.0}}, "logit_bias token id.*5"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias token id.*-1"),
        ({"logit_bias": {2: float("nan")}}, r"logit_bias\[2\].*nan"),
        ({"logit_bias": {2: float("inf")}}, r"logit_bias\[2\].*inf"),
        ({"logit_bias": {2.5: 1.0}}, "logit_bias token id.*2.5"),
        ({"eos_ids": [5]}, "eos_ids.*5"),
        ({"eos_ids": [-1]}, "eos_ids.*-1"),
        ({"eos_ids": [0] * (MAX_EOS_IDS + 1)}, "eos_ids holds 9"),
        ({"min_tokens": -1}, "min_tokens.*-1"),
        ({"min_tokens": 1.0}, "min_tokens.*1.0"),
    ],
)
def test_bad_values(bad, match):
    with pytest.raises(ValueError, match=match):
        sampling_settings(5, **bad)


@pytest.mark.parametrize("top_k", [0, -1, 4, 5, 100])
def test_max_candidates_wants_a_top_k_within_it(top_k):
    with pytest.raises(ValueError, match=r"top_k must be in \[1, 3\]"):
        sampling_settings(5, top_k=top_k, max_candidates=3)


def test_max_candidates_that_hold_the_top_k():
    assert int(sampling_settings(5, top_k=3, max_candidates=3).top_k) == 3
    assert int(sampling_settings(5, top_k=1, max_candidates=3).top_k) == 1
    # As many candidates as tokens: nothing is cut off.
    assert int(sampling_settings(5, max_candidates=5).top_k) == 5


def test_numbers_are_in_the_default_dtype():
    settings = sampling_settings(5, temperature=0.7)
    assert settings.temperature.dtype == jnp.float32
    assert settings.top_k.dtype == jnp.int32
