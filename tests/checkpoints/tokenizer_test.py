"""Tokenizers: the ids of transformers, streams, chats, and files that lie."""

import gzip
import json
import pathlib
import random
import sys

import gguf
import numpy as np
import pytest
import tokenizers

from strata_jax import checkpoints

TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"
GOLDEN = json.loads(
    gzip.decompress((TESTDATA / "tokenizer_smollm2.json.gz").read_bytes())
)


@pytest.fixture(scope="module")
def smollm2() -> checkpoints.Tokenizer:
    return checkpoints.load_gguf_tokenizer(checkpoints.find_smollm2())


def test_ids_are_those_of_transformers(smollm2):
    assert len(GOLDEN["texts"]) == 1_000
    differing = [
        (text, smollm2.encode(text), ids)
        for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"], strict=True)
        if smollm2.encode(text) != ids
    ]
    assert differing == []


def test_decode_inverts_encode_up_to_bytes_without_a_token(smollm2):
    # The vocabulary has no token for these bytes, so they are lost.
    lost = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    exact = 0
    for text in GOLDEN["texts"]:
        raw = text.encode()
        kept = bytes(byte for byte in raw if byte not in lost)
        decoded = smollm2.decode(smollm2.encode(text))
        assert decoded == kept.decode("utf-8", "replace"), text
        exact += kept == raw
    assert exact > 900


def test_properties(smollm2):
    assert smollm2.vocab_size == 49_152
    assert smollm2.eos_ids == (2,)
    assert smollm2.token_to_id("<|im_end|>") == 2
    assert smollm2.token_to_id("Ġthe") == smollm2.encode(" the")[0]
    with pytest.raises(ValueError, match="encode"):
        smollm2.token_to_id("not a token")


def test_special_tokens_can_be_read_as_plain_text(smollm2):
    text = "a<|im_end|>b"
    assert 2 in smollm2.encode(text)
    plain = smollm2.encode(text, special=False)
    assert all(token_id > 16 for token_id in plain)
    assert smollm2.decode(plain) == text
    assert 2 in smollm2.encode(text)  # the switch is not left on


def test_special_tokens_can_be_left_out_of_the_text(smollm2):
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert smollm2.decode(ids) == "<|im_start|>user\nhi<|im_end|>"
    assert smollm2.decode(ids, special=False) == "user\nhi"


def test_decode_takes_integer_arrays(smollm2):
    ids = smollm2.encode("The capital")
    assert smollm2.decode(np.array(ids, np.int32)) == "The capital"
    assert smollm2.decode([]) == ""


@pytest.mark.parametrize("token_id", [-1, 49_152, 2**40])
def test_unknown_id_is_refused(smollm2, token_id):
    with pytest.raises(ValueError, match="not in the vocabulary of 49152"):
        smollm2.decode([504, token_id])
    stream = smollm2.decode_stream()
    with pytest.raises(ValueError, match="not in the vocabulary"):
        stream.step(token_id)
    assert stream.step(504) == "The"


def test_id_that_is_no_integer_is_refused(smollm2):
    with pytest.raises(TypeError):
        smollm2.decode([1.0])


@pytest.mark.parametrize("text", [b"bytes", None, 3, ["a"]])
def test_text_of_another_type_is_refused(smollm2, text):
    with pytest.raises(TypeError, match=r"text must be a str.*decode"):
        smollm2.encode(text)


@pytest.mark.parametrize("text", ["\ud800", "ok\udfff", "\udc80 "])
def test_lone_surrogate_is_refused_with_a_remedy(smollm2, text):
    with pytest.raises(ValueError, match=r"lone surrogate .* replace it with"):
        smollm2.encode(text)


def pieces_of(tokenizer, ids, **kwargs):
    stream = tokenizer.decode_stream(**kwargs)
    return [*(stream.step(token_id) for token_id in ids), stream.flush()]


def test_stream_joins_to_the_text_and_never_splits_a_character(smollm2):
    for text in GOLDEN["texts"][::4]:
        ids = smollm2.encode(text)
        whole = smollm2.decode(ids)
        pieces = pieces_of(smollm2, ids)
        assert "".join(pieces) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in pieces)


def test_stream_of_arbitrary_ids_joins_to_the_text(smollm2):
    source = random.Random(5)
    # Many bytes by themselves, so that characters are often broken.
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    single = [i for c in alphabet if (i := smollm2.backend.token_to_id(c)) is not None]
    for special in (True, False):
        for _ in range(200):
            ids = [
                source.choice(single)
                if source.random() < 0.7
                else source.randrange(smollm2.vocab_size)
                for _ in range(source.randint(0, 30))
            ]
            joined = "".join(pieces_of(smollm2, ids, special=special))
            assert joined == smollm2.decode(ids, special=special), ids


def test_stream_holds_back_an_emoji_until_it_is_whole(smollm2):
    ids = smollm2.encode("🫠")
    assert len(ids) > 1
    assert pieces_of(smollm2, ids) == [""] * (len(ids) - 1) + ["🫠", ""]
    assert pieces_of(smollm2, ids[:-1])[-1] == "\ufffd"


def test_flush_starts_a_new_text(smollm2):
    stream = smollm2.decode_stream()
    broken, whole = smollm2.encode("🫠")[:-1], smollm2.encode("ok")
    for token_id in broken:
        stream.step(token_id)
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert "".join(stream.step(token_id) for token_id in whole) == "ok"


@pytest.mark.parametrize("chat", GOLDEN["chats"])
def test_chats_are_those_of_transformers(smollm2, chat):
    text = smollm2.apply_chat_template(
        chat["messages"], add_generation_prompt=chat["add_generation_prompt"]
    )
    assert text == chat["text"]


def test_messages_are_checked(smollm2):
    message = {"role": "user", "content": "hi"}
    with pytest.raises(TypeError, match="put it in a list"):
        smollm2.apply_chat_template(message)
    with pytest.raises(TypeError, match=r"messages\[1\]"):
        smollm2.apply_chat_template([message, "hi"])
    with pytest.raises(ValueError, match=r"messages\[0\] must have a role"):
        smollm2.apply_chat_template([{"content": "hi"}])


def with_template(tokenizer, template):
    return checkpoints.Tokenizer(
        tokenizer.backend, (2,), template, {"bos_token": "<s>"}
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{% include 'other' %}",
        "{{ range(10 ** 9) | list }}",
        None,
    ],
)
def test_template_that_fails_is_a_value_error(smollm2, template):
    with pytest.raises(ValueError, match="template"):
        with_template(smollm2, template).apply_chat_template(
            [{"role": "user", "content": "hi"}]
        )


def test_template_reason_is_passed_on(smollm2):
    tokenizer = with_template(smollm2, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_template_whitespace_and_names_are_those_of_hugging_face(smollm2):
    template = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{{ bos_token }}{{ m | tojson }}\n"
        "{% endfor %}\n"
    )
    messages = [{"role": "é<"}] * 3
    text = with_template(smollm2, template).apply_chat_template(messages)
    assert text == '<s>{"role": "é<"}\n' * 2


ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<eos>", "<user>", *ALPHABET, "ab"]
TYPES = [3, 4, *[1] * 257]
BASE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 0,
}


def write_vocabulary(path, changes):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (BASE | changes).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_token_types_decide_what_is_special(tmp_path):
    path = write_vocabulary(
        tmp_path / "v.gguf", {"tokenizer.ggml.eot_token_id": len(TOKENS) - 1}
    )
    tokenizer = checkpoints.load_gguf_tokenizer(path)
    text = "ab<eos><user>ab"
    assert tokenizer.encode(text) == [258, 0, 1, 258]
    # A user-defined token is ordinary vocabulary, and found in any text.
    plain = tokenizer.encode(text, special=False)
    assert plain[0] == 258 and 0 not in plain and 1 in plain
    assert tokenizer.decode([0, 1, 258], special=False) == "<user>ab"
    assert tokenizer.eos_ids == (0, 258)
    assert tokenizer.special_tokens == {"eos_token": "<eos>"}
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_digits_are_never_merged(tmp_path):
    changes = {
        "tokenizer.ggml.tokens": [*TOKENS, "12"],
        "tokenizer.ggml.token_type": [*TYPES, 1],
        "tokenizer.ggml.merges": ["a b", "1 2"],
    }
    path = write_vocabulary(tmp_path / "v.gguf", changes)
    tokenizer = checkpoints.load_gguf_tokenizer(path)
    one, two = (tokenizer.token_to_id(digit) for digit in "12")
    assert tokenizer.encode("ab12ab") == [258, one, two, 258]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "llama"}, "'llama' is not supported; supported: gpt2"),
        ({"model": [1, 2]}, r"\[1, 2\].* is not supported; supported: gpt2"),
        ({"model": None}, "None is not supported; supported: gpt2"),
        ({"pre": "llama-bpe"}, "'llama-bpe' is not supported; supported: smollm"),
        ({"add_bos_token": True}, "add_bos_token"),
        ({"add_space_prefix": True}, "add_space_prefix"),
        ({"tokens": None}, "tokens must be a list of strings"),
        ({"tokens": ["a", *TOKENS[1:]]}, "lists a token twice"),
        ({"merges": None}, "merges must be a list of strings"),
        ({"merges": ["ab"]}, "two tokens that make a third"),
        ({"merges": ["a b c"]}, "two tokens that make a third"),
        ({"merges": ["a c"]}, "two tokens that make a third"),
        ({"token_type": None}, "one integer for each of the 259 tokens"),
        ({"token_type": TYPES[:-1]}, "one integer for each of the 259 tokens"),
        ({"token_type": [6, *TYPES[1:]]}, "type 6"),
        ({"eos_token_id": 259}, "not one of the 259 ids"),
    ],
)
def test_vocabulary_that_cannot_be_used_is_refused(tmp_path, changes, reason):
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = write_vocabulary(tmp_path / "v.gguf", changes)
    with pytest.raises(ValueError, match=rf"v\.gguf.*{reason}"):
        checkpoints.load_gguf_tokenizer(path)


def test_absent_package_says_how_to_install_it(tmp_path, monkeypatch):
    path = write_vocabulary(tmp_path / "v.gguf", {})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install strata-jax\[hf\]"):
        checkpoints.load_gguf_tokenizer(path)


@pytest.fixture
def json_path(tmp_path) -> pathlib.Path:
    """A tokenizer.json with BOS around each text, truncation and padding."""
    source = checkpoints.load_gguf_tokenizer(write_vocabulary(tmp_path / "v.gguf", {}))
    backend = source.backend
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


def test_tokenizer_json_affixes_and_no_truncation(json_path):
    tokenizer = checkpoints.load_tokenizer_json(json_path)
    assert tokenizer.encode("ab" * 9) == [0, *[258] * 9]
    assert tokenizer.encode("ab") == [0, 258]
    assert tokenizer.encode("<eos>ab", affixes=False) == [0, 258]
    assert 0 not in tokenizer.encode("<eos>ab", special=False)
    assert tokenizer.eos_ids == ()
    assert checkpoints.load_tokenizer_json(json_path.parent).vocab_size == 259


def test_tokenizer_json_takes_settings_from_the_files_beside_it(json_path):
    settings = {
        "eos_token": {"content": "<eos>"},
        "chat_template": [
            {"name": "tools", "template": "no"},
            {"name": "default", "template": "{{ eos_token }}!"},
        ],
    }
    config = json_path.with_name("tokenizer_config.json")
    config.write_text(json.dumps(settings))
    tokenizer = checkpoints.load_tokenizer_json(json_path)
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.apply_chat_template([]) == "<eos>!"
    json_path.with_name("config.json").write_text('{"eos_token_id": 7}')
    assert checkpoints.load_tokenizer_json(json_path).eos_ids == (7,)
    generation = json_path.with_name("generation_config.json")
    generation.write_text('{"eos_token_id": [5, 6]}')
    json_path.with_name("chat_template.jinja").write_text("own file")
    tokenizer = checkpoints.load_tokenizer_json(json_path)
    assert tokenizer.eos_ids == (5, 6)
    assert tokenizer.apply_chat_template([]) == "own file"
    generation.write_text('{"eos_token_id": "<eos>"}')
    with pytest.raises(ValueError, match=r"generation_config\.json.*'<eos>'"):
        checkpoints.load_tokenizer_json(json_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"model": 3}', b"\xff"])
def test_damaged_tokenizer_json_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        checkpoints.load_tokenizer_json(path)
