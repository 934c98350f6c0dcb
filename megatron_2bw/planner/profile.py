"""Measured times for the planner: one real Megatron block, the output layer, the optimizer's step, and the links.

Invariant: every time here was taken with Megatron's own classes on the present machine; what was not measured is None.
Reading a profile is pure Python: torch and Megatron are imported only by the functions that measure.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_2bw.planner.cluster import Link
from megatron_2bw.planner.model import FLAGS, Model

KIND = "megatron-2bw profile"
WARM_UP = {"cpu": 2, "cuda": 10}  # rounds that do not count; a GPU's clocks take a while to rise
MESSAGES = (1 << 20, 8 << 20, 64 << 20)  # bytes, for the bandwidth
SHAPE = {"gated": "--swiglu", "head_size": "--kv-channels"} | FLAGS  # flags by entry, for `fits`
MEASURED, ESTIMATED = "MEASURED", "ESTIMATED: not measured, the cluster's figure holds"


class ProfileError(ValueError):
    """A profile that cannot be read, or cannot be measured as asked, said in one line."""


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one forward and one backward on `microbatch` samples, on one device without tensor parallelism."""

    microbatch: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Profile:
    """What was measured, and with what.

    device, precision   the device's name; fp32, bf16 or fp16
    hidden … dropout    the layer's shape, as in model.Model
    blocks              of one transformer layer, ascending
    output              of final norm, output layer of `vocab` tokens and loss, ascending; no embedding
    optimizer_seconds_per_parameter  of one step on a layer, gradient norm and casts to 16 bit included; `optimizer`
                        says whose. For layers under some 10⁵ parameters the calls count for more than the arithmetic
    inside, between     links inside a server and between servers, None where there was nothing to measure
    threads             torch's, on a CPU
    made_with           versions, and which of Megatron's layer implementations
    """

    device: str
    precision: str
    hidden: int
    heads: int
    ffn: int
    groups: int
    head_size: int
    sequence: int
    gated: bool
    dropout: bool
    vocab: int
    blocks: tuple[BlockTime, ...]
    output: tuple[BlockTime, ...]
    optimizer_seconds_per_parameter: float
    optimizer: str
    threads: int
    made_with: str
    inside: Link | None = None
    between: Link | None = None

    def layer(self, microbatch: float) -> tuple[float, float]:
        """(forward, backward) seconds of one transformer layer."""
        return _at(self.blocks, microbatch)

    def output_layer(self, microbatch: float) -> tuple[float, float]:
        """(forward, backward) seconds of final norm, output layer and loss."""
        return _at(self.output, microbatch)

    def fits(self, model: Model) -> str | None:
        """None if the profile was measured with layers of this shape, otherwise one line that names the flag."""
        for name in ("hidden", "heads", "ffn", "groups", "head_size", "sequence", "gated"):
            here, there = getattr(self, name), getattr(model, name)
            if here != there:
                if name == "gated":
                    here, there = ("on" if gated else "off" for gated in (here, there))
                return f"{SHAPE[name]}: the profile was measured with {here}, and {model.name} has {there}"
        return None

    @property
    def terms(self) -> dict[str, str]:
        """MEASURED or ESTIMATED, by entry."""
        always = dict.fromkeys(("blocks", "output", "optimizer_seconds_per_parameter"), MEASURED)
        links = {name: getattr(self, name) for name in ("inside", "between")}
        return always | {name: MEASURED if link and link.measured else ESTIMATED for name, link in links.items()}

    def save(self, path: Path) -> None:
        """Write the profile as JSON; until it is whole, an older file stays. Raises OSError."""
        path = Path(path)
        entries = {"kind": KIND, "terms": self.terms} | asdict(self)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w") as file:
                json.dump(entries, file, indent=1)
                file.write("\n")
            os.chmod(temporary, 0o644)  # mkstemp's is for its owner alone
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote. ProfileError names the entry that is wrong."""
        where = f"--profile {path}"
        try:
            entries = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ProfileError(f"{where}: not a readable JSON file ({' '.join(str(error).split())})") from None
        if not isinstance(entries, dict) or entries.pop("kind", None) != KIND:
            raise ProfileError(f"{where}: not a profile; `megatron-2bw-plan profile --json PATH` writes one")
        entries.pop("terms", None)  # follows from the rest
        profile = _build(cls, entries, where)
        links = {
            name: _build(Link, entries[name], f"{where}: {name}")
            for name in ("inside", "between") if entries[name] is not None
        }
        return replace(profile, **{name: _points(entries[name], f"{where}: {name}") for name in ("blocks", "output")},
                       **links)


def _build(cls: type, entries: Any, where: str) -> Any:
    """The dataclass that a JSON object describes, its plain entries checked."""
    wanted = {entry.name: entry.type for entry in fields(cls)}
    if not isinstance(entries, dict):
        raise ProfileError(f"{where}: expected the entries {', '.join(wanted)}")
    missing, unknown = [name for name in wanted if name not in entries], sorted(set(entries) - set(wanted))
    if missing or unknown:
        what = f"the entry {missing[0]} is missing" if missing else f"unknown entry {unknown[0]}"
        raise ProfileError(f"{where}: {what}")
    for name, value in entries.items():
        kinds = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}.get(wanted[name])
        if kinds is None:
            continue
        if type(value) not in kinds:
            raise ProfileError(f"{where}: {name} must be of type {wanted[name]}, not {json.dumps(value)}")
        if int in kinds and not 0 < value < math.inf:
            raise ProfileError(f"{where}: {name} must be positive, not {value}")
    return cls(**entries)


def _points(entries: Any, where: str) -> tuple[BlockTime, ...]:
    if not isinstance(entries, list) or not entries:
        raise ProfileError(f"{where}: expected a list of times by microbatch")
    points = tuple(_build(BlockTime, entry, where) for entry in entries)
    if any(after.microbatch <= before.microbatch for before, after in pairwise(points)):
        raise ProfileError(f"{where}: the microbatches must ascend")
    return points


def _at(points: tuple[BlockTime, ...], microbatch: float) -> tuple[float, float]:
    """(forward, backward) at a microbatch: on the line through its neighbours, outside through the two nearest.

    Above the last point never less than there. Below the first neither more than there nor less than in proportion,
    for a smaller microbatch is not computed better.
    """
    first, last, share = points[0], points[-1], microbatch / points[0].microbatch
    if len(points) == 1:
        return first.forward * share, first.backward * share
    before, after = next((pair for pair in pairwise(points) if microbatch <= pair[1].microbatch), points[-2:])
    weight = (microbatch - before.microbatch) / (after.microbatch - before.microbatch)

    def value(name: str) -> float:
        low, high = getattr(before, name), getattr(after, name)
        seconds = low + weight * (high - low)
        if microbatch > last.microbatch:
            return max(seconds, getattr(last, name))
        least = getattr(first, name)
        return seconds if share >= 1 else min(max(seconds, least * share), least)

    return value("forward"), value("backward")


# What follows measures.


def measure_block(model: Model, precision: str, microbatches: Iterable[int], device: str, repeats: int = 10) -> Profile:
    """The profile, without links, of `model`'s layer and output layer on this process's cpu or cuda device.

    The layer is a middle stage with one layer and the output layer a last stage without one: Megatron's GPTModel in
    its DistributedDataParallel, so that gradients are added up as in training. BERT's layers are Megatron's local ones
    with a padding mask, and its output layer is taken to be GPT's.
    Larger microbatches than the GPU's memory holds are left out; ProfileError if not even the first fits.
    """
    with _alone(device):
        import torch
        from megatron.core import __version__

        engine = device == "cuda" and model.kind != "bert" and importlib.util.find_spec("transformer_engine")
        implementation = "transformer_engine" if engine else "local"
        layer = _stage(model, precision, device, implementation, last=False)
        sizes = sorted(set(microbatches))
        blocks = _sweep("layer", layer, model, sizes, device, repeats)
        step, optimizer = _time_optimizer(layer, precision, device, repeats)
        del layer
        gc.collect()  # Megatron's hooks and buffers refer to each other
        output = _sweep("output layer", _stage(model, precision, device, implementation, last=True), model, sizes,
                        device, repeats)
        return Profile(
            torch.cuda.get_device_name() if device == "cuda" else "cpu", precision, model.hidden, model.heads,
            model.ffn, model.groups, model.head_size, model.sequence, model.gated, model.dropout, model.vocab,
            blocks, output, step, optimizer, torch.get_num_threads(),
            f"torch {torch.__version__}, megatron-core {__version__}, {implementation} layers",
        )


@contextlib.contextmanager
def _alone(device: str) -> Iterator[None]:
    """Megatron's parallel state for this process alone, and without it again. No process group may be there."""
    import torch.distributed as dist

    from megatron_2bw import cpu, patches

    with contextlib.ExitStack() as undo:
        if device == "cpu" and not cpu.installed():
            cpu.install()
            undo.callback(cpu.uninstall)
        if device == "cpu":
            undo.callback(patches.apply([patch for patch in patches.for_cpu() if patch.name == "_set_cuda_rng_state"]))
        from megatron.core import parallel_state, tensor_parallel

        undo.callback(dist.destroy_process_group)
        dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        undo.callback(parallel_state.destroy_model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        undo.callback(tensor_parallel.get_cuda_rng_tracker().reset)
        yield


def _stage(model: Model, precision: str, device: str, implementation: str, last: bool) -> Any:
    """A pipeline stage as Megatron trains it: a middle one with one layer, or the last one with none."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules

    config = _config(model, precision, device, implementation)
    if last:
        spec = TransformerBlockSubmodules(layer_specs=[], layer_norm=LayerNormImpl)
    elif model.kind == "bert":
        spec = bert_layer_local_spec
    elif implementation == "local":
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    else:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    stage = GPTModel(
        config, spec, model.padded_vocab(), model.sequence, pre_process=False, post_process=last,
        position_embedding_type="rope" if model.rotary else "learned_absolute", rotary_base=model.rotary_base,
    )
    stage = stage.to(device=device, dtype=config.params_dtype)
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=precision == "bf16"), stage,
    )


def _config(model: Model, precision: str, device: str, implementation: str) -> Any:
    """Megatron's configuration, with the fusions that its flags' defaults turn on and the machine has."""
    import torch
    from megatron.core.transformer import TransformerConfig

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    gpu, dropout = device == "cuda", 0.1 if model.dropout else 0.0

    def compiled(module: str) -> bool:  # of Apex
        return gpu and importlib.util.find_spec(module) is not None

    return TransformerConfig(
        num_layers=1, hidden_size=model.hidden, num_attention_heads=model.heads, num_query_groups=model.groups,
        kv_channels=model.head_size, ffn_hidden_size=model.ffn, gated_linear_unit=model.gated,
        activation_func=torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        normalization="RMSNorm" if model.rms_norm else "LayerNorm", add_bias_linear=model.bias,
        add_qkv_bias=model.bias or model.qkv_bias, hidden_dropout=dropout, attention_dropout=dropout,
        bf16=precision == "bf16", fp16=precision == "fp16", params_dtype=dtype, pipeline_dtype=dtype,
        use_cpu_initialization=not gpu, attention_softmax_in_fp32=False, transformer_impl=implementation,
        bias_activation_fusion=gpu and (model.gated or model.bias), bias_dropout_fusion=gpu,
        masked_softmax_fusion=compiled("scaled_masked_softmax_cuda"),
        gradient_accumulation_fusion=compiled("fused_weight_gradient_mlp_cuda"),
    )


def _sweep(name: str, stage: Any, model: Model, sizes: list[int], device: str, repeats: int) -> tuple[BlockTime, ...]:
    """The stage's times at each microbatch, up to the first that the GPU's memory does not hold."""
    import torch

    points: list[BlockTime] = []
    for size in sizes:
        try:
            forward, backward = _medians(_passes(stage, model, size, device), repeats, device)
        except torch.OutOfMemoryError:
            print(f"{name}, microbatch {size}: does not fit the GPU's memory", flush=True)
            break
        points.append(BlockTime(size, forward, backward))
        print(f"{name}, microbatch {size}: forward {1e3 * forward:.3f} ms, backward {1e3 * backward:.3f} ms {MEASURED}",
              flush=True)
    if not points:
        raise ProfileError(f"--microbatches {sizes[0]}: the {name} does not fit the GPU's memory")
    return tuple(points)


def _passes(stage: Any, model: Model, size: int, device: str) -> Callable[[Callable[[], None]], None]:
    """A forward and a backward on `size` samples, for `_medians`."""
    import torch

    with torch.device(device):
        entering = torch.randn(model.sequence, size, model.hidden, dtype=stage.config.params_dtype)
        gradient = torch.randn_like(entering)
        masked = torch.ones(1, 1, model.sequence, model.sequence, dtype=torch.bool).triu(1)
        labels = torch.randint(model.vocab, (size, model.sequence)) if stage.module.post_process else None
    if model.kind == "bert":
        masked = torch.zeros_like(masked)

    def passes(mark: Callable[[], None]) -> None:
        stage.module.set_input_tensor(entering.detach().requires_grad_())
        mark()
        output = stage(None, None, masked, labels=labels)
        mark()
        if labels is None:
            output.backward(gradient)
        else:
            output.sum().backward()
        mark()

    return passes


def _medians(work: Callable[[Callable[[], None]], None], repeats: int, device: str) -> list[float]:
    """Median seconds between the marks that `work` sets: by events on the GPU, else by the clock."""
    import torch

    rounds: list[list[float]] = []
    for _ in range(WARM_UP[device] + repeats):
        marks: list[Any] = []

        def mark() -> None:
            marks.append(torch.cuda.Event(enable_timing=True) if device == "cuda" else time.perf_counter())
            if device == "cuda":
                marks[-1].record()

        work(mark)
        if device == "cuda":
            torch.cuda.synchronize()
            rounds.append([1e-3 * before.elapsed_time(after) for before, after in pairwise(marks)])
        else:
            rounds.append([after - before for before, after in pairwise(marks)])
    return [statistics.median(part) for part in zip(*rounds[WARM_UP[device]:], strict=True)]


def _time_optimizer(stage: Any, precision: str, device: str, repeats: int) -> tuple[float, str]:
    """(seconds a parameter, name) of a step of Megatron's Adam with clipping on the stage's parameters."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-4, min_lr=0.0, weight_decay=0.01, clip_grad=1.0, bf16=precision == "bf16",
        fp16=precision == "fp16", params_dtype=stage.config.params_dtype,
    )
    optimizer = get_megatron_optimizer(config, [stage], use_gloo_process_groups=False)

    def step(mark: Callable[[], None]) -> None:
        for param in stage.parameters():
            param.main_grad.fill_(1e-3)  # finite, for fp16 leaves a step out otherwise
        mark()
        optimizer.step()
        mark()

    (seconds,) = _medians(step, repeats, device)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = type(parts[0].optimizer)
    name = f"Megatron's {type(parts[0]).__name__} with {inner.__module__.split('.')[0]}'s {inner.__name__}"
    seconds /= sum(param.numel() for param in stage.parameters())
    print(f"optimizer: {1e9 * seconds:.3f} ns a parameter, {name} {MEASURED}", flush=True)
    return seconds, name


def measure_links(server: int, device: str, messages: tuple[int, ...] = MESSAGES) -> tuple[Link | None, Link | None]:
    """The links (inside, between), as all ranks agree on them. All ranks of the default process group call it.

    inside   two neighbouring ranks of one server, the others idle: what one device sends
    between  all ranks of a server with those of another at once, their rates added up: what one server sends
    server: the number of this rank's server (torchrun's GROUP_RANK).
    """
    import torch.distributed as dist

    servers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(servers, server)
    ranks = {each: [rank for rank, its in enumerate(servers) if its == each] for each in sorted(set(servers))}
    neighbours = max(ranks.values(), key=len)[:2]
    inside = _link([tuple(neighbours)], device, messages) if len(neighbours) == 2 else None
    between = None
    if len(ranks) > 1:
        here, there, *_ = ranks.values()
        between = _link(list(zip(here, there)), device, messages)
    return inside, between


def _link(pairs: list[tuple[int, ...]], device: str, messages: tuple[int, ...]) -> Link:
    """What the pairs reach together; every rank calls it, those of no pair wait."""
    import torch.distributed as dist

    rank, mine = dist.get_rank(), None
    dist.barrier()
    for low, high in pairs:
        if rank in (low, high):
            peer = low + high - rank
            latency = _one_way(peer, rank == low, 8, 50, device)
            spent = [_one_way(peer, rank == low, size, 5, device) for size in messages]
            # By chance a short message may take no longer than the latency: count at least half of its time.
            rates = [size / max(each - latency, each / 2) for size, each in zip(messages, spent)]
            mine = (latency, statistics.median(rates)) if rank == low else None
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    latencies, rates = zip(*(each for each in found if each is not None))
    return Link(sum(rates) * 1e-9, statistics.median(latencies) * 1e6, measured=True)


def _one_way(peer: int, leads: bool, size: int, rounds: int, device: str) -> float:
    """Median seconds of one message of `size` bytes: half of there and back."""
    import torch
    import torch.distributed as dist

    message, spent = torch.zeros(size, dtype=torch.uint8, device=device), []
    for _ in range(WARM_UP[device] + rounds):
        begun = time.perf_counter()
        for act in (dist.send, dist.recv) if leads else (dist.recv, dist.send):
            act(message, peer)
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append((time.perf_counter() - begun) / 2)
    return statistics.median(spent[WARM_UP[device]:])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `megatron-2bw-plan profile`, without those of the model."""
    parser.add_argument("--json", type=Path, required=True, metavar="PATH", help="the profile that is written")
    parser.add_argument("--microbatches", default="1,2,4,8", help="sizes to measure at (default: 1,2,4,8)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"),
                        help="default: fp32 on a CPU, bf16 on a GPU that has it, fp16 on others")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of which the median counts (default: 10)")


def run(options: argparse.Namespace, model: Model) -> int:
    """Measure and write the profile; the exit status. Under torchrun all ranks measure links, the first the rest."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        sizes = _check(options)
        if first:
            _check_path(options.json)
        device = _device(options.device)
        inside, between = _links_of_job(device)
        if first:
            profile = measure_block(model, options.precision or _precision(device), sizes, device, options.repeats)
            try:
                replace(profile, inside=inside, between=between).save(options.json)
            except OSError as error:
                raise ProfileError(f"--json {options.json}: {error.strerror}") from None
            print(f"wrote {options.json}", flush=True)
    except ProfileError as error:
        if first:
            print(f"megatron-2bw-plan profile: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _check(options: argparse.Namespace) -> list[int]:
    """The microbatches. ProfileError names the flag that is wrong."""
    try:
        sizes = [int(word) for word in options.microbatches.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ProfileError(f"--microbatches {options.microbatches}: expected positive whole numbers such as 1,2,4,8")
    if options.repeats < 1:
        raise ProfileError(f"--repeats must be positive, not {options.repeats}")
    return sizes


def _check_path(path: Path) -> None:
    """Before minutes of measuring: can the profile be written?"""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError(f"--json {path}: {error.strerror}") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ProfileError(f"--json {path}: no file can be written there")


def _device(asked: str) -> str:
    import torch

    from megatron_2bw import cpu

    if cpu.wanted(asked):
        return "cpu"
    if not torch.cuda.is_available():
        raise ProfileError("--device cuda: no GPU is visible to torch; use --device cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return "cuda"


def _precision(device: str) -> str:
    import torch

    if device == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _links_of_job(device: str) -> tuple[Link | None, Link | None]:
    """The links between the ranks of torchrun's job; none where a rank is alone."""
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if world < 2:
        return None, None
    import torch.distributed as dist

    from megatron_2bw import rendezvous

    limit = timedelta(minutes=5)
    store = rendezvous.store(limit)
    where = {} if store is None else {"store": store, "rank": rank, "world_size": world}
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=limit, **where)
    links = measure_links(int(os.environ.get("GROUP_RANK", "0")), device)
    if rank == 0:
        for name, link in zip(("inside a server", "between servers"), links):
            print(f"link {name}: {link.gb_s:.2f} GB/s, {link.latency_us:.0f} us {MEASURED}" if link else
                  f"link {name}: nothing to measure", flush=True)
    dist.destroy_process_group()
    return links
