"""bench/slow_links.py between real network namespaces, where they are to be had; what
it measures is not tested."""

import json
from pathlib import Path

import pytest

from bench.servers import Servers
from megatron_2bw.base.errors import UserError
from tests.e2e.launcher import end, output_of, program


@pytest.fixture(scope="module", autouse=True)
def servers_can_be_made():
    try:
        with Servers() as servers:
            servers.limit(100)
    except (UserError, OSError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


@pytest.mark.nightly
def test_a_run(tmp_path: Path):
    path = tmp_path / "slow_links.json"
    words = f"""--rates 10 --variants 2bw --iterations 2 --layers 2 --hidden 64 --heads 2
        --sequence 128 --microbatches 4 --json {path}"""
    process = program("bench/slow_links.py", *words.split())
    output_of(end(process, 200))
    result = json.loads(path.read_text())
    fast, slow = result["links"]
    assert (fast["rate"], slow["rate"]) == ("unlimited", "10")
    assert fast["message_ms"] < slow["message_ms"]
    theory = 4 * 128 * 64 * 4 / 1e6  # 131 kB, which take 105 ms at 10 Mbit/s
    assert len(result["rows"]) == 2
    for row in result["rows"]:
        assert row["theory_mb"] == round(theory, 3)
        assert theory < row["sent_mb"] < 1.2 * theory
        assert row["sent_by_2bw"] == 1 and row["simulated_ms"] > 0 and row["bubble"]
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert not list(Path("/run/netns").glob(f"2bw-{process.pid}-*"))
