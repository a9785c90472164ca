"""Documents as bytes, batches as functions of the step, and held-out windows."""

import numpy as np
import pytest

from strata_jax import training

CORPUS = training.join_documents([bytes(range(1, 251)), b"abcde"])


def test_join_documents():
    joined = training.join_documents([b"ab", b"", "é".encode()])
    assert joined.dtype == np.uint8
    assert joined.tolist() == [97, 98, 0, 0, 0xC3, 0xA9, 0]


def test_join_documents_refuses():
    with pytest.raises(ValueError, match="number 1 has a byte 0"):
        training.join_documents([b"a", b"b\0"])
    with pytest.raises(ValueError, match="documents must not be empty"):
        training.join_documents([])


class TestSampleBatches:
    def draw(self, step, **changes):
        settings = {"batch_size": 4, "length": 8, "seed": 1, **changes}
        return training.sample_batches(CORPUS, **settings)(step)

    def test_windows_of_the_corpus(self):
        text = CORPUS.tobytes()
        for step in range(20):
            tokens = self.draw(step)
            assert tokens.shape == (4, 8)
            assert tokens.dtype == np.int32
            assert all(row.astype(np.uint8).tobytes() in text for row in tokens)

    def test_depends_on_seed_and_step_alone(self):
        batch = training.sample_batches(CORPUS, batch_size=4, length=8, seed=1)
        first = [batch(step) for step in range(6)]
        assert all(np.array_equal(batch(step), first[step]) for step in (5, 0, 3))
        for step in range(5):
            assert not np.array_equal(first[step], first[step + 1])
            assert not np.array_equal(first[step], self.draw(step, seed=2))

    def test_same_on_every_machine(self):
        starts = [self.draw(step)[:, 0].tolist() for step in (0, 1, 10**6)]
        assert starts == [[138, 6, 239, 167], [51, 68, 39, 142], [9, 168, 107, 2]]

    def test_steps_share_no_draws(self):
        # With neighbouring counters, a step's rows would come again in the next.
        rows = {tuple(self.draw(step, batch_size=1)[0]) for step in range(200)}
        steps = [self.draw(step, batch_size=64)[:, 0] for step in range(2)]
        assert len(rows) > 100
        assert not np.array_equal(steps[0][4:], steps[1][:-4])

    def test_reaches_both_ends(self):
        tokens = self.draw(0, batch_size=4000)
        assert tokens[:, 0].min() == 1
        assert (tokens[:, -1] == 0).any()

    def test_whole_corpus_is_one_window(self):
        tokens = self.draw(3, length=len(CORPUS))
        assert (tokens == CORPUS).all()

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"batch_size": 0}, "batch_size must be at least 1"),
            ({"length": 1}, "length must be at least 2"),
            ({"length": 258}, "the corpus has only 257 bytes"),
            ({"seed": -1}, "seed must be at least 0"),
        ],
    )
    def test_refuses(self, changes, match):
        with pytest.raises(ValueError, match=match):
            self.draw(0, **changes)

    def test_refuses_tokens(self):
        with pytest.raises(ValueError, match=r"corpus must be \[N\] uint8, got \[3\]"):
            training.sample_batches(
                np.zeros(3, np.int32), batch_size=1, length=2, seed=0
            )


@pytest.mark.parametrize("length", [2, 3, 10, 256, 257])
def test_cut_windows_predicts_each_byte_once(length):
    windows = training.cut_windows(CORPUS, length)
    assert windows.dtype == np.int32
    predicted = windows[:, 1:].ravel()
    np.testing.assert_array_equal(predicted, CORPUS[1 : len(predicted) + 1])
    assert len(CORPUS) - 1 - len(predicted) < length - 1
    np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])


def test_cut_windows_refuses():
    with pytest.raises(ValueError, match="use shorter windows or more text"):
        training.cut_windows(CORPUS, 258)
