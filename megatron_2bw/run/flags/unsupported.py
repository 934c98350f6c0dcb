"""Megatron's flags that a run cannot honour: what the entry scripts lack, and what a
schedule cannot do exactly (unsupported.yaml).

All others start as with Megatron's own scripts, whose errors report what they cannot
do. Invariant: a flag without which the run would compute something else is refused by
name; one that changes nothing is named in a line of the log.
"""

import re
from collections.abc import Callable
from functools import partial

from megatron_2bw.base.command_line import table_of
from megatron_2bw.run.flags.rule import Args, Rule, have, value

# Megatron's notations of the layers of each stage
LAYOUTS = (
    "--pipeline-model-parallel-layout",
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
)


def layout_stages(text: str) -> list[str]:
    """The layers of each stage in Megatron's notation, such as ["Ett", "tt", "tL"] of
    "Ett|t*2|tL"."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, _repeated, text)
    return text.split("|")


def _repeated(match: re.Match) -> str:
    return match[1] * int(match[2])


def _joined(flag: str, args: Args) -> str | None:
    """A layout with one chunk of layers for each stage: neighbouring chunks are joined,
    and the layers keep their order. One without several chunks for each stage stays as
    it is."""
    layout = value(args, flag)
    stages = args.pipeline_model_parallel_size
    chunks = layout_stages(layout or "")
    size = len(chunks) // stages
    if size < 2 or len(chunks) % stages:
        return layout
    joined = []
    for first in range(0, len(chunks), size):
        joined.append("".join(chunks[first : first + size]))
    return "|".join(joined)


def _has_chunks(flag: str, args: Args) -> bool:
    return _joined(flag, args) != value(args, flag)


def _splits_weights(args: Args) -> bool:
    # Megatron sets it to the tensor-parallel size
    shards = args.tensor_parallel_num_weight_shards or 0
    return shards > args.tensor_model_parallel_size


def _whole_matrices(args: Args) -> bool:
    emerging = args.optimizer not in ("adam", "sgd")
    return (
        args.optimizer == "dist_muon"
        or getattr(args, "use_layer_wise_distributed_optimizer", False)
        or (args.use_distributed_optimizer and emerging)
    )


def _other_layers(args: Args) -> bool:
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    return bool({*pattern} - {*"*-E|"}) or (bool(pattern) and args.task == "bert")


def _balances_quantiles(args: Args) -> bool:
    return "quantile_balancing" in args.moe_router_load_balancing_type


_TABLES = table_of(__file__)

# What asks for a feature, where it is not any true value of the flag, or one of the
# values of the rule.
_ASKS: dict[str, Callable[[Args], object]] = {
    "--tensor-parallel-num-weight-shards": _splits_weights,
    "--optimizer": _whole_matrices,
    "--hybrid-layer-pattern": _other_layers,
    "--hybrid-override-pattern": _other_layers,
    "--moe-router-load-balancing-type": _balances_quantiles,
}
for _flag, _settings in _TABLES["when"].items():
    _ASKS[_flag] = partial(have, _settings)


def _refused() -> list[Rule]:
    rules = []
    for scope, rows in _TABLES["refused"].items():
        for flags, why in rows.items():
            for flag in re.split(" (?=--)", flags):
                rules.append(Rule(flag, why, scope, _ASKS.get(flag)))
    return rules


def _without() -> list[tuple[Rule, dict[str, object]]]:
    rules = []
    for row in _TABLES["without"]:
        flag = row["flag"]
        asks = partial(_has_chunks, flag) if flag in LAYOUTS else _ASKS.get(flag)
        rule = Rule(flag, row["why"], row["scope"], asks)
        rules.append((rule, row.get("arguments", {})))
    return rules


UNSUPPORTED = _refused()
# rules, and the arguments of a run without what they name
WITHOUT = _without()
# under no schedule
NEVER = {
    rule.flag for rule in UNSUPPORTED if rule.scope == "script" and rule.when is None
}


def refusal(args: Args) -> str | None:
    """The line of the first rule that the arguments break, or None."""
    return next(filter(None, (rule.line(args) for rule in UNSUPPORTED)), None)


def leave_out(args: Args) -> str | None:
    """Set the arguments that the schedule does without; the one line of the log that
    lists them, or None."""
    names = []
    for rule, arguments in WITHOUT:
        if not rule.holds(args):
            continue
        vars(args).update(arguments)
        if rule.flag in LAYOUTS:
            name = rule.flag.removeprefix("--").replace("-", "_")
            setattr(args, name, _joined(rule.flag, args))
        names.append(f"{rule.flag.split()[0]} ({rule.why})")
    if not names:
        return None
    schedule = args.pipeline_schedule
    return f"> {schedule}: without effect, or with less: {', '.join(names)}"
