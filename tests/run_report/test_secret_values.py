"""Secrets: which names are, and that their values stand nowhere."""

from argparse import Namespace
from dataclasses import dataclass

import pytest

from lightning_tricks import RunReport
from lightning_tricks.cli import main
from lightning_tricks.run_report import read_record
from lightning_tricks.run_report.core.secret_values import HIDDEN, hide_in_text, is_secret
from tests.run_report.test_callback import Logs, train
from tests.run_report.test_git_state import make
from tests.small import cases

SECRET = """
    password passwd passphrase db_password dbPassword PASSWORDS user-password redis_pass pwd db_pwd smtp_pass pass
    secret client_secret SecretKey aws_secret_access_key secrets my.secret api_key apikey API_KEYS api-key apiKey
    openai_key OPENAI_API_KEY private_key privatekey access_key encryption_keys ssh_key account_key license_key
    token hf_token access_token accessTokens auth_token api_tokens github_token bot_token tokens refreshToken
    auth basic_auth authorization auth_header credentials credential gcp_creds session_cookie bearer webhook_url
    connection_string sentry_dsn jwt wandb_api_key HUGGING_FACE_HUB_TOKEN consumer_key
"""
HARMLESS = """
    tokenizer tokenizer_path max_tokens num_tokens n_tokens token_dim token_type_ids pad_token eos_token mask_token
    cls_token use_cls_token max_new_tokens special_tokens tokens_per_batch train_tokens image_token_id token_dropout
    key key_dim keys keypoints num_keypoints keyword key_padding_mask monitor_key image_key label_key private_keypoints
    author authors author_email pass_through low_pass num_passes bypass forward_pass passes compass
    secretary_problem session access accession keyboard hotkey monkey lr batch_size weight_decay passenger_count
    n_secrets password_length tokenization detokenize query_tokens register_tokens sort_key cache_key
"""


@pytest.mark.parametrize("name", SECRET.split())
def test_secret_name(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", HARMLESS.split())
def test_harmless_name(name):
    assert not is_secret(name)


@cases(
    "text",
    "train.py --api-key=hush",
    "train.py --api_key hush --lr 0.1",
    "train.py --model.token 'hush now' -v",
    "WANDB_API_KEY=hush python train.py",
    "postgresql://me:hush@host:5432/data",
    "clone https://hush@github.com/a/b.git",
    '+    "password": "hush",',
    "+db_password: str = 'hush'",
    "-  hf_token: hush",
    "+client = Client(host, api_key='hush', retries=3)",
    "curl -H 'Authorization: Bearer hush1234'",
    "-SECRET_KEY = b'hush'",
    "{'secret': 'hush', 'lr': 0.1}",
    "ValueError: no access with token=hush",
    "--password=hush --passphrase hush",
    "+API_KEYS = ['hush', 'hush']",
    "+login(user, password='hush')",
    "+token: str | None = 'hush'",
    "{secret: hush, lr: 0.1}",
    "https://host/a?token=hush&b=1",
    'export AWS_SECRET_ACCESS_KEY="hu\\"hush"',
)
def test_secret_in_a_text_is_hidden(text):
    shown = hide_in_text(text)
    assert "hush" not in shown
    assert HIDDEN in shown


@cases(
    "text",
    "train.py --max-tokens 100 --tokenizer=bpe --key-dim 3",
    "+    tokens = tokens + num_tokens",
    "+    if token == 3:",
    "+    password = get_password(user)",
    "+    key = max(tokens)",
    "https://github.com/a/b.git@v1",
    "me@example.org: author = 'me'",
    "lr: 0.1, keys: ['a']",
    "s3://bucket/a:b/c@d",
)
def test_harmless_text_stays_as_it_is(text):
    assert hide_in_text(text) == text


PIN = 471_147_114_711_471  # longer than any figure of a record


@dataclass
class Account:
    user: str = "me"
    password: int = PIN


SETTINGS = {
    "api_keys": ["hush", "hush"],
    "auth": ("me", "hush"),
    "credentials": {"user": "me", "more": {"deep": "hush"}},
    "db": Account(),
    "cli": Namespace(hf_token="hush", lr=0.5),
    "password": PIN,
    "nested": [{"name": "a", "secret": "hush"}],
    "command": "train.py --api-key=hush --lr 3",
    "arguments": ["--token", "hush", "--lr", "3"],
    "url": "postgresql://me:hush@host/a",
    "env": {"AWS_SECRET_ACCESS_KEY": "hush", "PATH": "/bin"},
    "max_tokens": 100,
    "no_token": None,
}


def test_no_secret_is_in_the_files_of_a_report_nor_in_a_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(make(tmp_path / "code", train_py="API_KEY = 'x'\n"))
    (tmp_path / "code" / "train.py").write_text("API_KEY = 'hush'\n" + "a" * 63_900 + "\n" + "password = 'hush'\n")
    for name, lr in (("a", 0.1), ("b", 0.2)):
        module = Logs(fails_at=3)
        module.save_hyperparameters({**SETTINGS, "lr": lr})
        module.failure = ZeroDivisionError("no access with token=hush")
        with pytest.raises(ZeroDivisionError):
            train([RunReport(tmp_path / name)], module, max_epochs=1)
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "both.html")]) == 0
    for path in [tmp_path / "both.html", *(tmp_path / "a").iterdir()]:
        text = path.read_text(encoding="utf-8")
        assert "hush" not in text, path
        assert str(PIN) not in text, path
    shown = dict(read_record(tmp_path / "a").arguments)
    hidden = {name for name, text in shown.items() if text == HIDDEN}
    assert hidden == {
        *("api_key", "api_keys", "auth", "cli.hf_token", "credentials", "db.password", "password"),
        "env.AWS_SECRET_ACCESS_KEY",
    }
    assert shown["nested"] == f"[{{'name': 'a', 'secret': {HIDDEN!r}}}]"
    assert shown["command"] == f"train.py --api-key {HIDDEN} --lr 3"
    assert (shown["cli.lr"], shown["db.user"], shown["max_tokens"], shown["no_token"]) == ("0.5", "me", "100", "None")
    assert read_record(tmp_path / "a").message.endswith(f"no access with token {HIDDEN}")
