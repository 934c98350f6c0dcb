"""megatron-2bw simulate."""

import pytest

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.timelines.simulate_command import main


def simulated(capsys, *words: str) -> list[str]:
    """The lines that the command prints."""
    given = "--schedule 2bw --stages 4 --microbatches 4".split()
    assert main([*given, *words], "megatron-2bw simulate") == 0
    return capsys.readouterr().out.splitlines()


def test_a_schedule_is_drawn(capsys, tmp_path):
    lines = simulated(capsys, "--out", str(tmp_path / "timeline.png"))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert lines[0] == "2bw, 4 stages, 4 microbatches a batch"
    assert "stages busy 100.0% in the steady state" in lines


@pytest.mark.parametrize(
    "words",
    [
        "--extra-warmup 1,1",
        "--schedule mine",
        "--microbatches 3 --schedule megatron-interleaved",
    ],
)
def test_what_a_schedule_cannot_have_is_refused(words, capsys):
    with pytest.raises(UserError, match=words.split()[0]):
        simulated(capsys, *words.split())


@pytest.mark.parametrize(
    "words, seconds",
    [
        ("", "12"),  # 4 microbatches of 1 + 2, without a bubble
        ("--schedule gpipe --gpipe-round 2", "30"),  # two rounds of 2 + 3 microbatches
        # half of the bubble of 9
        ("--schedule megatron-interleaved --virtual 2", "16.5"),
        ("--forward 2 --backward 2", "16"),
        # of (2 3 + 2 0.5) / 2
        ("--microbatches 8 --transfer 0.5 --extra-warmup 0,1,0", "28"),
    ],
)
def test_the_time_of_an_iteration(words, seconds, capsys):
    assert simulated(capsys, *words.split())[-1] == f"an iteration takes {seconds}"
