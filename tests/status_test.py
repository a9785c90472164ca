"""Status bits and the error that they become."""

import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import _status
from strata_jax._status import DecodingError, Status, raise_if_failed

_BITS = [bit for bit in Status if bit]


def test_no_bit_raises_nothing():
    raise_if_failed(0)
    raise_if_failed(jnp.zeros((), jnp.int32))
    raise_if_failed(jnp.zeros((3, 2), jnp.int32))
    raise_if_failed(np.zeros(0, np.int32))


@pytest.mark.parametrize("bit", _BITS)
def test_every_bit_is_one_bit_with_a_name_and_a_remedy(bit):
    assert bin(bit.value).count("1") == 1
    with pytest.raises(DecodingError) as raised:
        raise_if_failed(jnp.asarray(bit.value, jnp.int32))
    assert raised.value.status == bit
    assert raised.value.tokens is None
    message = str(raised.value)
    assert bit.name in message
    assert _status._REMEDIES[bit] in message
    others = [other for other in _BITS if other is not bit]
    assert not any(other.name in message for other in others)
    assert not any(_status._REMEDIES[other] in message for other in others)


def test_bits_of_an_array_are_joined():
    status = np.array([[0, 1], [8, 8]], np.int32)
    tokens = np.array([4, 5], np.int32)
    with pytest.raises(DecodingError, match=r"NON_FINITE_LOGITS\|UNNORM") as raised:
        raise_if_failed(status, tokens)
    assert raised.value.status == Status.NON_FINITE_LOGITS | Status.UNNORMALIZED_DRAFT
    np.testing.assert_array_equal(raised.value.tokens, tokens)


def test_the_error_is_a_runtime_error_of_the_public_api():
    assert issubclass(strata.DecodingError, RuntimeError)
    assert strata.DecodingError is DecodingError
    assert strata.Status is Status
