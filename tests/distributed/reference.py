"""The update rule of design section 2 in plain PyTorch: one process, no pipeline, no Megatron schedule or optimizer.

Every microbatch of batch j runs on W(max(j - delay, 0)), after `sync` batches without delay; W(j+1) = W(j) -
update(mean gradient of batch j). With a factor, a batch that is delayed runs on W(v) + factor (W(v) - W(v-1)) instead,
but for W(v) that a batch without delay runs on too; and with `gradient`, that many times the part of the update that
the last gradient contributed is added.
The model and the data are Megatron's; loops, accumulation, scaling, clipping and the step are written here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from tests.distributed.training import Run, canonical, train


@dataclass
class Rule:
    """What the reference is to compute.

    microbatches  m, or that of each batch
    optimizer     "adam", "sgd", "muon", "lion" or "soap"; the last three step matrices, and Adam (or Lion beside Muon)
                  the rest
    delay         of the gradients: 1 is 2BW, 0 is vanilla
    sync          batches at the start that are not delayed
    late          microbatches at the start of a batch that are delayed; None: all
    factor        of the extrapolation
    gradient      times of its gradient term
                  Of these three a tuple has a value for each batch; W'(j) has those of batch j.
    norm_order    the names by stage in the order in which the pipeline under test adds up the gradient norm
    poison        batch whose gradients are made inf, and whose step is skipped
    """

    microbatches: int | tuple[int, ...]
    optimizer: str = "adam"
    delay: int = 1
    sync: int = 0
    late: int | tuple[int, ...] | None = None
    factor: float | tuple[float, ...] = 0.0
    gradient: float | tuple[float, ...] = 0.0
    norm_order: list[list[str]] = field(default_factory=list)
    poison: int | None = None
    per_stage: bool = False  # PipeDream: norm per stage, version by stage


def of_batch(given, batch: int):
    """The value for a batch: `given`, or its entry for that batch (after the last batch, of the last)."""
    return given[min(batch, len(given) - 1)] if isinstance(given, tuple) else given


def reference(rank: int, argv: list[str], rule: Rule) -> Run:
    """Run the reference on the model, data and learning rates that `argv` describes. For run_world(1, ...)."""
    from megatron.training import training

    def loop(forward_step, model, optimizer, scheduler, data, *args, **kwargs):
        result.append(_Reference(model[0], optimizer, scheduler, data, forward_step, rule).train())
        raise _Done

    result: list[Run] = []
    training.train = loop
    try:
        train(rank, argv)
    except _Done:
        pass
    return result[0]


class _Done(BaseException):
    pass


class Optimizers:
    """Several torch optimizers, stepped in turn."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()


def split_muon(heads: int, fused: set[torch.Tensor]) -> type:
    """Muon that orthogonalises queries, keys and values apart, in the matrices `fused` that hold them head by head."""
    from emerging_optimizers.orthogonalized_optimizers import Muon

    class SplitMuon(Muon):
        def orthogonalize(self, p, grad, **kwargs):
            if p not in fused:
                return super().orthogonalize(p, grad, **kwargs)
            by_head = grad.view(heads, 3, -1, grad.shape[1])  # (heads, query | key | value, channels, hidden size)
            parts = [by_head[:, kind].flatten(0, 1) for kind in range(3)]
            parts = [super(SplitMuon, self).orthogonalize(p, part, **kwargs) for part in parts]
            return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).reshape(grad.shape)

    return SplitMuon


class _Reference:
    def __init__(self, model, optimizer, scheduler, data, forward_step, rule: Rule):
        from megatron.training import get_args

        self.args, self.rule, self.data, self.forward_step = get_args(), rule, data, forward_step
        self.module = model.module  # without Megatron's data-parallel wrapper
        self.params = {name: param for name, param in canonical(model) if param.requires_grad}
        model.param_to_bucket_group.clear()  # and without its gradient hooks: autograd fills param.grad
        self.scheduler = scheduler
        self.main = {name: param.detach().float().clone().requires_grad_() for name, param in self.params.items()}
        self.optimizer = self._make_optimizer(optimizer)
        self.groups = {id(mine): theirs for mine, theirs in zip(self.optimizer.param_groups, optimizer.param_groups)}
        self.before = self._masters()
        self.versions, self.working = [self._snapshot()], [self._snapshot()]
        self.routers = [module for module in self.module.modules() if getattr(module, "expert_bias", None) is not None]
        self.biases = [[router.expert_bias.float().clone() for router in self.routers]]  # by weight version
        self.scale = (self.args.loss_scale or self.args.initial_loss_scale) if self.args.fp16 else 1.0
        self.scales = [self.scale]  # by weight version: a batch is scaled as the step left it that made its weights
        self.good = 0
        self.hysteresis = self.args.hysteresis
        self.run = Run()

    def _make_optimizer(self, megatron_optimizer) -> Optimizers:
        """Optimizers on our own main parameters, grouped by weight decay as Megatron groups them."""
        names = {id(getattr(param, "main_param", param)): name for name, param in self.params.items()}
        optimizers = []
        for part in megatron_optimizer.chained_optimizers:
            groups = [
                {"params": [self.main[names[id(p)]] for p in group["params"]], "weight_decay": group["weight_decay"]}
                for group in part.param_groups
            ]
            kinds = {self._kind(names[id(p)]) for group in part.param_groups for p in group["params"]}
            assert len(kinds) == 1, f"Megatron's groups mix {kinds}"
            optimizers.append(self._make_part(kinds.pop(), groups))
        return Optimizers(optimizers)

    def _kind(self, name: str) -> str:
        """The optimizer that steps the parameter `name`. To Megatron learned positions are a matrix like others."""
        kind, words = self.rule.optimizer, ("embedding.word_embeddings.weight", "output_layer.weight")
        if kind in ("adam", "sgd") or (self.main[name].dim() == 2 and name not in words):
            return kind
        return self.args.muon_scalar_optimizer + " of muon" if kind == "muon" else "adam"

    def _make_part(self, kind: str, groups: list[dict]) -> torch.optim.Optimizer:
        """The class of torch or of the package emerging_optimizers."""
        args, lr = self.args, self.args.lr
        betas = (args.adam_beta1, args.adam_beta2)
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=args.sgd_momentum)
        if kind.startswith("adam"):
            fused = dict(fused=True) if args.two_bw_optimizer == "host" else {}
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=args.adam_eps, **fused)
        if kind == "muon":
            fused = {main for name, main in self.main.items() if name.endswith("linear_qkv.weight")}
            return split_muon(args.num_attention_heads, fused)(
                groups, lr=lr, momentum=args.muon_momentum, nesterov=args.muon_nesterov
            )
        from emerging_optimizers.scalar_optimizers import Lion
        from emerging_optimizers.soap import SOAP

        if kind == "soap":
            return SOAP(groups, lr=lr, betas=betas, use_kl_shampoo=True)
        return Lion(groups, lr=lr, betas=betas if kind == "lion" else (args.lion_beta1, args.lion_beta2))

    def _snapshot(self) -> dict[str, torch.Tensor]:
        return {name: self.main[name].detach().to(param.dtype, copy=True) for name, param in self.params.items()}

    def _masters(self) -> dict[str, torch.Tensor]:
        return {name: main.detach().clone() for name, main in self.main.items()}

    def _ahead(self) -> dict[str, torch.Tensor]:
        """The working copy of the newest weights, in model precision."""
        version = len(self.versions)
        factor = of_batch(self.rule.factor, version)
        gradient = of_batch(self.rule.gradient, version)
        if not factor or version < max(self.rule.sync, 1):
            return self._snapshot()
        now = self._masters()
        ahead = {name: torch.lerp(old, now[name], 1 + factor) for name, old in self.before.items()}  # one rounding
        if gradient and not self.run.skipped[-1]:
            self._add_gradients(ahead, gradient)
        return {name: tensor.to(self.params[name].dtype) for name, tensor in ahead.items()}

    def _add_gradients(self, ahead: dict[str, torch.Tensor], gradient: float) -> None:
        """Adam's update is a running mean of gradients, over the root of that of their squares; SGD's a sum of them."""
        names = {main: name for name, main in self.main.items()}
        for part in self.optimizer.parts:
            for group in part.param_groups:
                for main in group["params"]:
                    state, times, below = part.state[main], gradient * group["lr"], None
                    if isinstance(part, torch.optim.AdamW):
                        beta1, beta2 = group["betas"]
                        times *= 1 - beta1
                        correction = math.sqrt(1 - beta2 ** float(group["step"] if "step" in group else state["step"]))
                        below = state["exp_avg_sq"].sqrt() / correction + group["eps"]
                    elif not isinstance(part, torch.optim.SGD):
                        continue
                    if below is None:
                        ahead[names[main]].sub_(main.grad, alpha=times)
                    else:
                        ahead[names[main]].addcdiv_(main.grad, below, value=-times)

    def train(self) -> Run:
        for batch in range(self.args.train_iters):
            for mine in self.optimizer.param_groups:  # the learning rate of this iteration
                mine.update({key: self.groups[id(mine)][key] for key in ("lr", "weight_decay")})
            gradients, losses = self._gradients(batch)
            self.run.losses += losses
            self._update(batch, gradients)
        fixed = {name: tensor.detach() for name, tensor in canonical(self.module, True) if name not in self.params}
        names = [name for name in fixed if name.endswith("expert_bias")]
        self.run.weights = fixed | self.versions[-1] | dict(zip(names, self.biases[-1], strict=True))
        return self.run

    def _gradients(self, batch: int):
        """Sum of the microbatches' gradients (each already divided by m), and the reported losses of the batch."""
        sums = {name: torch.zeros_like(param, dtype=self._sum_dtype()) for name, param in self.params.items()}
        reports = []
        count = self._count(batch)
        for index in range(count):
            self._load(batch, batch * count + index)
            output, loss_function = self.forward_step(self.data, self.module)
            share = 1 if self.args.calculate_per_token_loss else count
            for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
                scaler.set_loss_scale(torch.tensor(self._scale(batch) / share))
            total, tokens, parts = loss_function(output)
            if self.args.calculate_per_token_loss:
                loss = total
            else:
                loss = total / torch.clamp(tokens, min=1) / count
            (loss * self._scale(batch)).backward()
            for name, param in self.params.items():
                sums[name].add_(param.grad)
                param.grad = None
            reports.append(parts)
        summed = {key: torch.vstack([parts[key] for parts in reports]).sum(dim=0) for key in reports[0]}
        if self.args.calculate_per_token_loss:
            for gradient in sums.values():
                gradient.mul_(1.0 / summed["lm loss"][1])
        return sums, [value[0] / value[1] for value in summed.values()]

    def _sum_dtype(self) -> torch.dtype:
        return torch.float16 if self.args.fp16 and not self.args.accumulate_allreduce_grads_in_fp32 else torch.float32

    def _load(self, batch: int, microbatch: int) -> None:
        """Put the weights that `microbatch` runs on into the model."""
        for name, param in self.params.items():
            param.data = self.working[self._version(name, batch, microbatch)][name]
        for index, router in enumerate(self.routers):
            router.expert_bias.data = self.biases[self._version("", batch, microbatch)][index]

    def _count(self, batch: int) -> int:
        """Microbatches of the batch."""
        return of_batch(self.rule.microbatches, batch)

    def _version(self, name: str, batch: int, microbatch: int) -> int:
        if not self.rule.per_stage:
            index = microbatch - batch * self._count(batch)
            late = of_batch(self.rule.late, batch)
            if late is not None and index >= late:
                return batch
            return batch if batch < self.rule.sync else max(batch - self.rule.delay, 0)
        stages = len(self.rule.norm_order)
        stage = next(s for s, names in enumerate(self.rule.norm_order) if name in names)
        return max((microbatch - (stages - 1 - stage)) // self.rule.microbatches, 0)

    def _scale(self, batch: int) -> float:
        return self.scales[batch if batch < self.rule.sync else max(batch - self.rule.delay, 0)]

    def _update_biases(self) -> None:
        counts = [router.local_tokens_per_expert.clone() for router in self.routers]
        rate = self.args.moe_router_bias_update_rate
        steps = [torch.sign(count.mean() - count) * rate for count in counts]
        self.biases.append([bias + step for bias, step in zip(self.biases[-1], steps)])
        for router in self.routers:
            router.local_tokens_per_expert.zero_()

    def _update(self, batch: int, gradients: dict[str, torch.Tensor]) -> None:
        self.before = self._masters()
        self._update_biases()  # in a skipped step too
        if batch == self.rule.poison:
            next(iter(gradients.values())).view(-1)[0] = float("inf")
        for name, main in self.main.items():
            main.grad = gradients[name].float()
            if self.args.fp16:
                main.grad.mul_(1.0 / self._scale(batch))
        whole = [list(self.main)]
        finite = [self._is_finite(names) for names in (self.rule.norm_order if self.rule.per_stage else whole)]
        if self.args.fp16 and not self.args.loss_scale:
            self._update_scale(all(finite))
        if self.rule.per_stage:  # a stage with an inf skips its own step, the others do not
            for names, fine in zip(self.rule.norm_order, finite):
                self._forget([] if fine else names)
        if all(finite) or self.rule.per_stage:
            self._clip()
            self.optimizer.step()
        if all(finite):  # Megatron moves the learning rate on when all ranks have stepped
            self.scheduler.step(increment=self._count(batch) * self.args.micro_batch_size)
        self.run.skipped.append(int(not all(finite)))
        self.scales.append(self.scale)
        self.run.scales.append(self.scale)
        self.working.append(self._ahead())
        self.versions.append(self._snapshot())

    def _is_finite(self, names: list[str]) -> bool:
        return all(bool(torch.isfinite(self.main[name].grad).all()) for name in names)

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self.main[name].grad = None

    def _update_scale(self, finite: bool) -> None:
        """Dynamic loss scaling: halve after `hysteresis` infs, double after a window without any."""
        if not finite:
            self.good, self.hysteresis = 0, self.hysteresis - 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, self.args.min_loss_scale)
            return
        self.good += 1
        if self.good == self.args.loss_scale_window:
            self.good, self.hysteresis, self.scale = 0, self.args.hysteresis, self.scale * 2

    def _clip(self) -> None:
        """Clip by the global norm; with PipeDream, each stage by its own."""
        order = self.rule.norm_order or [list(self.main)]
        stages = [names for names in order if names and self.main[names[0]].grad is not None]
        squares = [self._squared_norm(names) for names in stages]
        if self.rule.per_stage:
            for names, square in zip(stages, squares):
                self._scale_down(names, math.sqrt(square))
            self.run.grad_norms.append(max(math.sqrt(square) for square in squares))
        else:
            norm = float(torch.stack(squares).sum()) ** 0.5
            self._scale_down(list(self.main), norm)
            self.run.grad_norms.append(norm)

    def _squared_norm(self, names: list[str]) -> torch.Tensor:
        norms = torch.tensor([[float(torch.linalg.vector_norm(self.main[name].grad)) for name in names]])
        return torch.linalg.vector_norm(norms) ** 2

    def _scale_down(self, names: list[str], norm: float) -> None:
        coefficient = self.args.clip_grad / (norm + 1e-6)
        if self.args.clip_grad > 0 and coefficient < 1:
            for name in names:
                self.main[name].grad.mul_(coefficient)
