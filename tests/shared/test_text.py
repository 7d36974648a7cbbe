"""Errors are described by their message or, if they have none, by where they were raised; tables become text."""

import pytest

from lightning_tricks._shared.text import describe_error, render_text

pytestmark = pytest.mark.oldest


def test_an_error_with_a_message():
    assert describe_error(ValueError("too long")) == "ValueError: too long"


@pytest.mark.parametrize("message", ["", " \n"])
def test_an_error_without_one_tells_where_it_was_raised(message):
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError(message)
    described = describe_error(caught.value)
    assert described.startswith("RuntimeError: no message; raised in test_an_error_without_one_tells")
    assert described.endswith("raise RuntimeError(message)")


def test_an_error_that_was_never_raised():
    assert describe_error(KeyError()) == "KeyError: no message"


def test_text_of_a_table_displays_nothing_in_a_notebook(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert render_text("a line") == "a line"
    assert capsys.readouterr().out == ""
