"""The tokenizer of a Hugging Face tokenizer.json and the files beside it."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from strata_jax.checkpoints._json import read_json_object
from strata_jax.checkpoints._optional import import_hf

if TYPE_CHECKING:
    import tokenizers
from strata_jax.checkpoints._tokenizer import ID_LIMIT, NAMED_TOKENS, Tokenizer


def load_tokenizer_json(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads a Hugging Face `tokenizer.json`.

    From the files beside it, where they exist: `eos_ids` (`generation_config.json`,
    else `config.json`, else the `eos_token` of `tokenizer_config.json`), the chat
    template (`chat_template.jinja`, else `tokenizer_config.json`) and the special
    tokens. Truncation and padding that the file asks for are switched off: an id
    must not depend on how long the text is.

    Args:
      path: a `tokenizer.json`, or the folder that holds one.

    Returns:
      The tokenizer.

    Raises:
      ImportError: if the `tokenizers` package is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: naming the file and the fault, if one of the files is damaged.

    Exactness: neither; the ids are those of `transformers`.
    """
    tokenizers = import_hf("tokenizers")
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    text = path.read_bytes()
    read_json_object(path, text)
    try:
        backend = tokenizers.Tokenizer.from_buffer(text)
    # The package raises bare exceptions.
    except Exception as error:
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    settings_path = path.with_name("tokenizer_config.json")
    settings = _read_if_present(settings_path)
    special_tokens = {}
    for name in NAMED_TOKENS:
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special_tokens[f"{name}_token"] = token
    template_path = path.with_name("chat_template.jinja")
    if template_path.exists():
        template = template_path.read_text(encoding="utf-8")
    else:
        template = _default_template(settings_path, settings.get("chat_template"))
    return Tokenizer(
        backend=backend,
        eos_ids=_eos_ids(path, backend, special_tokens.get("eos_token")),
        chat_template=template,
        special_tokens=special_tokens,
    )


def _read_if_present(path: pathlib.Path) -> dict[str, Any]:
    return read_json_object(path, path.read_bytes()) if path.exists() else {}


def _default_template(path: pathlib.Path, stated: Any) -> str | None:
    if stated is None or isinstance(stated, str):
        return stated
    # Several templates: a list of names and texts.
    for entry in stated if isinstance(stated, list) else ():
        if isinstance(entry, dict) and entry.get("name") == "default":
            return _default_template(path, entry.get("template"))
    raise ValueError(
        f"{path}: chat_template must be text or have a default, got neither"
    )


def _eos_ids(
    path: pathlib.Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        source = path.with_name(name)
        stated = _read_if_present(source).get("eos_token_id")
        if stated is None:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < ID_LIMIT:
                raise ValueError(f"{source}: eos_token_id {token_id!r} is not an id")
        return tuple(ids)
    if eos_token is None:
        return ()
    token_id = backend.token_to_id(eos_token)
    if token_id is None:
        raise ValueError(f"{path}: eos_token {eos_token!r} is not in the vocabulary")
    return (token_id,)
