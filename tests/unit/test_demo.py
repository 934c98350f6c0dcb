"""A demo that fails."""

from types import SimpleNamespace

from megatron_2bw.tools import demo


def test_results_of_an_earlier_run_go_before_a_run_that_may_fail(tmp_path, monkeypatch):
    (tmp_path / "demo.png").touch()
    corpus = SimpleNamespace(flags=list)
    monkeypatch.setattr(demo, "build_corpus", lambda: corpus)
    monkeypatch.setattr(demo, "run_ranks", lambda prog, command: 3)
    assert demo.main(["--out", str(tmp_path)]) == 3
    assert list(tmp_path.iterdir()) == []
