"""GPT and BERT on a real Slurm of two nodes: saved before the time limit, queued again,
resumed with equal losses."""

import contextlib
import csv
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from megatron_2bw.base import run_log
from megatron_2bw.base.processes import free_port
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.cluster import preset
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.tell.jobs import sbatch_script
from megatron_2bw.tools.slurm.status import saved_iteration
from tests.slurm.cluster import Cluster, missing

ROOT = Path(__file__).parents[2]
ITERATIONS = 40
SHAPE = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --vocab-size 127 --num-workers 0
""".split()
TINY = f"""
    --micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS} --lr 1e-3
    --eval-iters 0 --log-interval 1
""".split()
# made tiny by the caller's flags, which win
MODELS = {"gpt": "gpt-355m", "bert": "bert-24"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if missing():
        pytest.fail(missing(), pytrace=False)
    # not pytest's: the path of a socket must be short
    folder = Path(tempfile.mkdtemp(prefix="slurm_"))
    try:
        with Cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Job:
    """A submitted job with a folder of its own."""

    cluster: Cluster
    folder: Path
    number: str

    def status(self) -> dict:
        path = self.folder / "logs" / "status.json"
        if not path.exists():
            return {"status": "", "history": []}
        return json.loads(path.read_text())

    def words(self) -> list[str]:
        return [entry["status"] for entry in self.status()["history"]]

    def log(self, start: int = 0, node: int | str = "*") -> str:
        paths = self.folder.glob(f"logs/start-{start}-node-{node}-*.log")
        return "".join(path.read_text() for path in paths)

    def losses(self, start: int = 0) -> dict[int, list[str]]:
        """Iteration -> the losses of its line, as printed: `lm loss`, and BERT's `sop
        loss`."""
        losses = {}
        for line in run_log.training(self.log(start)):
            names = [name for name in line.fields if name.endswith(" loss")]
            losses[line.iteration] = [line.fields[name] for name in names]
        return losses

    def saved(self) -> int:
        return saved_iteration(self.folder / "checkpoints")

    def wait(self, what: str, ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + 150
        while not ready():
            assert time.monotonic() < deadline, (
                f"job {self.number}: not {what} after 150 s\n{self.told()}"
            )
            time.sleep(0.05)

    def end_in(self, seconds: float) -> None:
        """Move the time limit: how soon Slurm's signal comes does not depend on how
        fast the machine is."""
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        job = f"JobId={self.number}"
        self.cluster.call("scontrol", "update", job, f"EndTime={end}")

    def show(self) -> str:
        """What Slurm says of the job."""
        return self.cluster.call("scontrol", "show", "job", self.number)

    def told(self) -> str:
        logs = [path.read_text()[-3000:] for path in self.folder.rglob("*.log")]
        queue = self.cluster.call("squeue")
        status = json.dumps(self.status(), indent=1)
        return "\n".join([status, *logs, queue, self.cluster.logs()])

    def ranks(self) -> list[psutil.Process]:
        """The job's training processes."""
        configuration = self.cluster.environment["SLURM_CONF"]
        ranks = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                variables = process.environ()
                own = variables.get("SLURM_JOB_ID") == self.number
                same = variables.get("SLURM_CONF") == configuration
                if own and same and "RANK" in variables:
                    ranks.append(process)
        return ranks


def submit(
    cluster: Cluster,
    folder: Path,
    kind: str,
    *options: str,
    number="TERM",
    **environment: str,
) -> Job:
    """sbatch of the script for `kind` on both nodes, a rank each: a pipeline of two
    stages."""
    folder.mkdir()
    variables = {
        "MODEL": MODELS[kind],
        "PROCESSES_PER_NODE": "1",
        "CHECKPOINTS": str(folder / "checkpoints"),
        "LOGS": str(folder / "logs"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    words = ("--parsable", "--nodes=2", f"--output={folder}/batch.log", *options)
    script = f"scripts/slurm/pretrain_{kind}_2bw.sbatch"
    flags = [*SHAPE, *TINY, f"--exit-signal=SIG{number}"]
    number = cluster.call(
        "sbatch", *words, script, *flags, cwd=ROOT, **variables | environment
    )
    return Job(cluster, folder, number)


def hold(job: Job) -> list[psutil.Process]:
    """Let the job train for some iterations and stop it there, as if it were slow: its
    ranks."""
    job.wait("training", lambda: len(job.losses()) >= 3)
    ranks = job.ranks()
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    assert len(ranks) == 2 and len(job.losses()) < ITERATIONS, job.told()
    return ranks


def assert_same(
    found: dict[int, list[str]], expected: dict[int, list[str]], resumed: bool
) -> None:
    """The printed losses are equal to the last digit. Megatron's second line after a
    start is the mean of two."""
    for place, (iteration, printed) in enumerate(found.items()):
        if resumed and place == 1:
            pairs = zip(expected[iteration - 1], expected[iteration])
            means = [(float(first) + float(second)) / 2 for first, second in pairs]
            assert [float(loss) for loss in printed] == pytest.approx(means, rel=4e-6)
        else:
            assert printed == expected[iteration], f"iteration {iteration}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind, number",
    [("bert", "USR1"), pytest.param("gpt", "TERM", marks=pytest.mark.nightly)],
)
def test_a_time_limit_saves_queues_again_and_resumes_with_the_same_losses(
    slurm, tmp_path, kind, number
):
    # The signal comes 40 to 70 s before the end: Slurm looks every 30 s.
    limit = ("--time=60", f"--signal=B:{number}@40")
    job = submit(slurm, tmp_path / "job", kind, *limit, number=number)
    held = hold(job)
    undisturbed = submit(slurm, tmp_path / "undisturbed", kind)
    undisturbed.wait("completed", lambda: undisturbed.status()["status"] == "completed")
    assert undisturbed.words() == ["running", "completed"]
    assert undisturbed.saved() == ITERATIONS
    expected = undisturbed.losses()
    assert sorted(expected) == list(range(1, ITERATIONS + 1))
    assert {*map(len, expected.values())} == {2 if kind == "bert" else 1}
    assert job.status()["status"] == "running"
    job.end_in(seconds=65)
    batch = job.folder / "batch.log"
    job.wait("asked to end", lambda: "Slurm asks the job to end" in batch.read_text())
    job.end_in(seconds=3600)
    for rank in held:
        rank.send_signal(signal.SIGCONT)
    job.wait("queued again", lambda: "pending" in job.words())
    job.wait("completed", lambda: job.status()["status"] == "completed")
    restarts = job.status()["start"]
    assert restarts >= 1
    assert job.words() == ["running", "pending"] * restarts + ["running", "completed"]
    assert f"Restarts={restarts}" in job.show()
    # no iteration is lost, none is trained twice, and both nodes have their logs
    before = 0
    for start in range(restarts + 1):
        found = job.losses(start)
        assert list(found) == list(range(before + 1, before + len(found) + 1))
        assert len(found) >= 3
        assert_same(found, expected, resumed=start > 0)
        assert job.log(start, node=0) and job.log(start, node=1)
        before += len(found)
        reason = job.status()["history"][2 * start + 1]["reason"]
        assert start == restarts or reason.startswith(f"saved: iteration {before};")
    assert before == job.saved() == ITERATIONS


def test_the_planners_job_trains_and_scancel_does_not_queue_it_again(slurm, tmp_path):
    host = preset("p3.16xlarge", 2)
    host = replace(host, gpus_per_server=1, device=replace(host.device, name="cpu"))
    cost = Cost(Model("tiny", 4, 32, 4, vocab=127, sequence=16), host, "fp32")
    estimate = cost.estimate(Plan(1, 2, 1, 2, 4, corrected=True))
    script = tmp_path / "job.sbatch"
    script.write_text(sbatch_script(cost, estimate, "tiny"))
    preamble = tmp_path / "preamble.sh"
    preamble.write_text("export FROM_PREAMBLE=$unset.yes\n")
    variables = dict(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        PREAMBLE=str(preamble),
        LOGS=str(tmp_path / "logs"),
        CHECKPOINTS=str(tmp_path / "checkpoints"),
        SBATCH_PARTITION="named",
        SRUN_ARGS="--label env 'IN_CONTAINER=so to speak'",
    )
    options = ("--parsable", f"--output={tmp_path}/batch.log")
    words = (*options, script, *"--log-interval 1 --eval-iters 0".split())
    number = slurm.call("sbatch", *words, cwd=ROOT, **variables)
    job = Job(slurm, tmp_path, number)
    job.wait("training", lambda: len(job.losses()) >= 3)
    assert job.status()["status"] == "running"
    numbers = set()
    for rank in job.ranks():
        variables = rank.environ()
        assert variables["FROM_PREAMBLE"] == ".yes"
        assert variables["IN_CONTAINER"] == "so to speak"
        numbers.add(variables["RANK"])
    assert numbers == {"0", "1"} and "\n0: " in job.log()
    assert "Partition=named" in job.show()
    assert "microbatches late" in job.log()
    slurm.call("scancel", number)
    cancelled = "cancelled; saved: iteration "
    job.wait("cancelled", lambda: job.status()["reason"].startswith(cancelled))
    # at the signal, and when it had ended
    assert job.words() == ["running", "failed", "failed"]
    job.wait("gone", lambda: "JobState=CANCELLED" in job.show())
    assert "Restarts=0" in job.show()
    assert job.saved() == max(job.losses())  # it was saved all the same


def test_a_sweep_measures_and_tells_what_does_not_fit(slurm, tmp_path):
    out = tmp_path / "out"

    def sweep(command: str, *words: object) -> str:
        # Each job has a port of its own, by its number.
        program = (sys.executable, "scripts/slurm/sweep.py", command, "--out", out)
        return slurm.call(*program, *words, cwd=ROOT, MASTER_ADDR="127.0.0.1")

    text = f"""--model {MODELS["gpt"]} --cpu --nodes 2 --gpus-per-node 1 --model-parallel-size 2 --batch-sizes 8
        --micro-batch-size 2 --precision fp32 --train-iters 8"""
    own = text.split()
    sweep("submit", *own, "--systems", "GPipe,PipeDream-2BW", "--", *SHAPE)
    # More than a process can address: no machine tries to find that memory.
    large = (*SHAPE, "--ffn-hidden-size", 4 * 10**12)
    sweep("submit", *own, "--systems", "PipeDream-Flush", "--", *large)
    deadline = time.monotonic() + 150
    while not (said := sweep("status")).endswith("2 completed, 1 out of memory"):
        assert "failed" not in said and time.monotonic() < deadline, said + slurm.logs()
        time.sleep(3)
    systems = "GPipe,PipeDream-2BW,PipeDream-Flush"
    assert "submitted 0 runs" in sweep("submit", *own, "--systems", systems)
    assert "(3 runs)" in sweep("collect", "--warm-up", 4)
    with open(out / "sweep.csv", newline="") as file:
        rows = {row["system"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {*systems.split(",")}
    failed = rows.pop("PipeDream-Flush")
    assert failed["samples_per_second"] == "" and "memory" in failed["reason"]
    for row in rows.values():
        assert float(row["samples_per_second"]) > 0 and row["iterations"] == "4"
