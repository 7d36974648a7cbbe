"""Which names and texts hold a secret, such as a password, a key or a token: a report does not show it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

HIDDEN = "(not shown)"

# Names are compared in lower case without separators: secret with these words anywhere in them, ...
_ANYWHERE = re.compile(
    r"passw(or)?d|passphrase|passcode|secret(?!ar)|credential|authoriz|bearer|cookie|webhook|netrc|connectionstring|"
    r"(access|account|api|app|auth|client|consumer|deploy|encrypt(ion)?|host|licen[cs]e|master|personal|priv(ate)?|"
    r"rsa|service|session|shared|sign(ing)?|ssh|storage|subscription)key(?!(point|word|frame|board|value|pad))|"
    r"(access|api|auth|bearer|csrf|deploy|github|gitlab|hf|hub|jwt|oauth|personal|refresh|security|session|slack|"
    r"user)token(?!i[sz])"
)
# ... or with these as the last ones, by what stands before
_SYMBOLS = (  # and counts of a language model's tokens
    r"added|audio|blank|bos|class|cls|code|context|decoder|dist|distill(ation)?|draft|empty|encoder|end|eos|eot|extra|"
    r"first|fps|generated|image|input|last|latent|learn(ed|able)|length|mask|max|mean|min|n|new|next|null|num|of|output|"
    r"pad|padding|patch|per|prefix|prompt|query|reg|register|sep|separator|sequence|skip|special|start|stop|suffix|"
    r"target|task|text|time|to|train|unk|unknown|video|vision|visual|vocab(ulary)?|warmup|with|word"
)
_AT_END = re.compile(
    rf"(?!.*({_SYMBOLS})token$).*token|tokens|.*(jwts?|dsn|creds?|o?auth|pwds?)|"
    r".*(anthropic|aws|azure|comet|gcp|huggingface|neptune|openai|sentry|stripe|wandb)keys?|"
    r"(.*(admin|basic|database|db|email|ftp|https?|imap|ldap|login|mail|mongo|mysql|pg|postgres|proxy|redis|root|server|"
    r"smtp|sql|ssh|sudo|user))?pass"
)
_COUNTS = frozenset({"count", "dim", "dropout", "len", "length", "max", "min", "n", "num", "size", "weight"})
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_NAME = re.compile(r"(?<![\w.-])-{0,2}[A-Za-z][\w.-]*")
_QUOTED = r"""[bfruBFRU]{0,2}(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|[\[({]\s*["'][^\])}\n]*[\])}]?"""
_WORD = r"""[^\s"',;()\[\]{}]+"""
_ASSIGNED = re.compile(
    rf"""["']?(?:[ \t]*:[ \t]*[\w.\[\]|, ]+?)?"""
    rf"""(?:[ \t]*=(?!=)[ \t]*(?:{_QUOTED}|{_WORD}(?=[ \t]*(?:$|[\n\r,;&)}}\]"'])))|=(?!=){_WORD}(?=\s)|"""
    rf"""[ \t]*:=?[ \t]*(?:{_QUOTED}|{_WORD}(?![(\[])))"""
)
_GIVEN = re.compile(rf"[ \t]+(?!-)(?:{_QUOTED}|{_WORD})")
_PASSWORD_IN_URL = re.compile(r"(://)[^\s/@'\"]+@")
_HEADER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)


@lru_cache(maxsize=10_000)
def is_secret(name: str) -> bool:
    """Whether a name says that its value is a secret, in whatever case, with whatever separators, in the plural too.

    Examples:
        >>> [is_secret(name) for name in ("api_key", "APIKeys", "db-password", "tokenizer", "max_tokens", "key_dim")]
        [True, True, True, False, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or (len(words) > 1 and not _COUNTS.isdisjoint((words[0], words[-1]))):
        return False
    is_of_access = words[0] in ("auth", "oauth") and words[-1] in ("code", "data", "header", "info", "string", "value")
    joined = "".join(words)
    return is_of_access or bool(_ANYWHERE.search(joined) or _AT_END.fullmatch(joined))


def hidden(name: str, value: Any) -> Any:
    """Return a plain value without its secrets: nothing of it if its name is secret and there is something in it."""
    if is_secret(str(name)) and value is not None and not isinstance(value, bool) and value not in ("", [], {}):
        return HIDDEN
    if isinstance(value, dict):
        return {key: hidden(key, part) for key, part in value.items()}
    if isinstance(value, list):
        return list(_hidden_items(value))
    return hide_in_text(value) if isinstance(value, str) else value


def _hidden_items(items: list[Any]) -> Iterator[Any]:
    """Hide what follows an option of a command line that is given as a list."""
    before: Any = ""
    for item in items:
        is_given = isinstance(before, str) and bool(_NAME.fullmatch(before)) and before.startswith("-")
        yield hidden(before if is_given and not str(item).startswith("-") else "", item)
        before = item


def hide_in_text(text: str) -> str:
    """Return a text without the secrets in it: passwords in addresses, values of options and of assignments.

    Examples:
        >>> hide_in_text("train.py --api-key=abc --lr 0.1, from s3://me:hush@host/a, db_password = 'x'")
        'train.py --api-key (not shown) --lr 0.1, from s3://(not shown)@host/a, db_password (not shown)'
    """
    text = _HEADER.sub(rf"\1 {HIDDEN}", _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}@", text))
    shown, place = [], 0
    for found in _NAME.finditer(text):
        if found.start() < place or not is_secret(found[0]):
            continue
        value = _ASSIGNED.match(text, found.end())
        if value is None and found[0].startswith("-"):
            value = _GIVEN.match(text, found.end())
        if value is not None:
            shown += [text[place : found.end()], f" {HIDDEN}"]
            place = value.end()
    return "".join([*shown, text[place:]])
