"""One command that is requeued again and again ends as the undisturbed run; `make requeues` does so twenty times."""

from tests.auto_resume.requeues import TROUBLES, Chain


def test_requeued_elsewhere_and_through_troubles_is_as_undisturbed(tmp_path):
    chain = Chain(tmp_path, requeues=8, seed=2)
    assert chain.run() == []
    assert {one.what for one in chain.starts} >= {*TROUBLES}
    assert sum(one.resumed_at != "" for one in chain.starts) >= 6
