"""The reference on Megatron's model and data, with all that a run may add to 2BW:
mixed precision, a synchronous start, corrections, experts, PipeDream's rule.

Loops, accumulation, scaling, clipping and the step are not Megatron's.
"""

import copy
import functools
import math
from dataclasses import dataclass, field

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from tests.distributed.reference import TwoBW
from tests.distributed.reference_optimizers import make_optimizers
from tests.distributed.training import Run, canonical, train


@dataclass
class Rule:
    """What the reference is to compute. A tuple has a value for each batch.

    microbatches  of a batch
    sync          batches at the start without late microbatches
    late          microbatches at the start of a batch that are late; None: all
    factor        late microbatches run on W(v) + factor (W(v) - W(v-1))
    gradient      that many times the last gradient's part of the update is added, too.
                  W'(j), the working copy of W(j), has factor and gradient of batch j
    ahead         late microbatches run on the predicted next weights, and on so many
                  updates more
    known         by stage, the microbatches whose gradients its prediction knows
    summed        the parameters whose gradients are summed over ranks of a pipeline
    norm_order    of TwoBW
    poison        batch with an infinite gradient, whose step is skipped
    """

    microbatches: int | tuple[int, ...]
    sync: int = 0
    late: int | tuple[int, ...] | None = None
    factor: float | tuple[float, ...] = 0.0
    gradient: float | tuple[float, ...] = 0.0
    ahead: float | None = None
    known: tuple[int, ...] = ()
    summed: tuple[str, ...] = ()
    norm_order: list[list[str]] = field(default_factory=list)
    poison: int | None = None


def of_batch(value, batch: int):
    """The value for a batch; after the last one of a tuple, the last."""
    if isinstance(value, tuple):
        return value[min(batch, len(value) - 1)]
    return value


def reference(rank: int, argv: list[str], rule: Rule) -> Run:
    """Run the reference on the model, data and learning rates that `argv` describes.
    For run_world(1, ...)."""
    from megatron.training import get_args, training

    class Done(BaseException):
        pass

    result = []

    def loop(forward_step, model, optimizer, scheduler, data, *args, **kwargs):
        pipedream = get_args().pipeline_schedule == "pipedream"
        mode = PipeDream if pipedream else MegatronReference
        trained = mode(model[0], optimizer, scheduler, data, forward_step, rule)
        result.append(trained.result())
        raise Done

    training.train = loop
    try:
        train(rank, argv)
    except Done:
        pass
    return result[0]


def all_finite(tensors) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class MegatronReference(TwoBW):
    def __init__(self, model, optimizer, scheduler, data, forward_step, rule: Rule):
        from megatron.training import get_args

        self.args = args = get_args()
        self.rule = rule
        self.data = data
        self.forward_step = forward_step
        self.module = model.module  # without Megatron's data-parallel wrapper
        model.param_to_bucket_group.clear()  # nor its hooks: autograd fills param.grad
        trainable = [pair for pair in canonical(model) if pair[1].requires_grad]
        params = dict(trainable)
        make = functools.partial(
            make_optimizers,
            params=params,
            megatron_optimizer=optimizer,
            args=args,
        )
        super().__init__(params, make, rule.norm_order, args.clip_grad)
        self.megatron_groups = optimizer.param_groups
        self.scheduler = scheduler
        if args.fp16 and not args.accumulate_allreduce_grads_in_fp32:
            self.sum_dtype = torch.float16
        self.routers = []
        for module in self.module.modules():
            if getattr(module, "expert_bias", None) is not None:
                self.routers.append(module)
        biases = [router.expert_bias.float().clone() for router in self.routers]
        self.biases = [biases]
        # Loss scales and experts' biases by weight version.
        scale = args.loss_scale or args.initial_loss_scale
        self.scales = [scale if args.fp16 else 1.0]
        self.finite_steps = 0
        self.hysteresis = args.hysteresis
        self.run = Run()
        self.so_far = {}  # gradients that a prediction knows
        self.gradient_scale = None  # of the last step: clipping, token count

    def result(self) -> Run:
        self.train(self.args.train_iters)
        run = self.run
        run.grad_norms = self.grad_norms
        run.scales = self.scales[1:]
        for name, tensor in canonical(self.module, True):
            if name not in self.params:  # frozen, or a bias of experts
                run.weights[name] = tensor.detach()
        names = [name for name in run.weights if name.endswith("expert_bias")]
        run.weights |= super().weights()
        run.weights |= zip(names, self.biases[-1], strict=True)
        return run

    # Which weights a microbatch runs on

    def version(self, batch: int, microbatch: int) -> int:
        if batch < self.rule.sync:
            return batch
        return super().version(batch, microbatch)

    def load(self, batch: int, microbatch: int) -> None:
        super().load(batch, microbatch)
        biases = self.biases[self.version(batch, microbatch)]
        for router, bias in zip(self.routers, biases):
            router.expert_bias.data = bias

    def weights(self) -> dict[str, torch.Tensor]:
        """The working copy of the newest weights: with a correction not W(j)."""
        version = len(self.versions)
        factor = of_batch(self.rule.factor, version)
        if not factor or version < max(self.rule.sync, 1):
            return super().weights()
        ahead = {}
        for name, main in self.main.items():  # one rounding
            ahead[name] = torch.lerp(self.before[name], main.detach(), 1 + factor)
        gradient = of_batch(self.rule.gradient, version)
        if gradient and not self.run.skipped[-1]:
            self._add_gradients(ahead, gradient)
        for name, param in self.params.items():
            ahead[name] = ahead[name].to(param.dtype)
        return ahead

    def _add_gradients(self, ahead: dict[str, torch.Tensor], gradient: float) -> None:
        """The last gradient's part of the update.

        Adam's update is a running mean of gradients, over the root of that of their
        squares; SGD's is a sum of gradients.
        """
        names = {main: name for name, main in self.main.items()}
        for part in self.optimizer.parts:
            for group in part.param_groups:
                times = gradient * group["lr"]
                for main in group["params"]:
                    weight = ahead[names[main]]
                    if isinstance(part, torch.optim.SGD):
                        weight.sub_(main.grad, alpha=times)
                    elif isinstance(part, torch.optim.AdamW):
                        beta1 = group["betas"][0]
                        root = adam_root(group, part.state[main])
                        weight.addcdiv_(main.grad, root, value=-(times * (1 - beta1)))

    # Predicted weights

    def after_backward(self, microbatch: int, sums: dict[str, torch.Tensor]) -> None:
        for names, known in zip(self.norm_order, self.rule.known):
            if microbatch + 1 == known:
                for name in names:
                    share = known / self.microbatches
                    self.so_far[name] = (sums[name].float().clone(), share)

    def predict(self, batch: int) -> None:
        """W'(batch), near W(batch + 1), by a step that is undone."""
        names = {main: name for name, main in self.main.items()}
        before = {name: main.detach().clone() for name, main in self.main.items()}
        for part in self.optimizer.parts:
            states = {main: copy.deepcopy(part.state[main]) for main in part.state}
            for group in part.param_groups:
                for main in group["params"]:
                    main.grad = self.estimate(batch, names[main], group, part, main)
            part.step()
            part.state.clear()
            part.state.update(states)
        for name, main in self.main.items():
            weight = torch.lerp(before[name], main.detach(), 1 + self.rule.ahead)
            self.versions[batch][name] = weight.to(self.params[name].dtype)
            main.data.copy_(before[name])

    def estimate(self, batch, name, group, part, main) -> torch.Tensor:
        if name in self.rule.summed:
            return part.state[main]["exp_avg"].clone()
        so_far, share = self.so_far[name]
        gradient = so_far * (self.gradient_scale / share / self.loss_scale(batch))
        if self.args.fp16:
            gradient[~gradient.isfinite()] = 0
        return gradient

    # The gradients of a batch

    def gradients(self, batch: int) -> dict[str, torch.Tensor]:
        self.microbatches = of_batch(self.rule.microbatches, batch)
        self.late = of_batch(self.rule.late, batch)
        self.reports = []
        sums = super().gradients(batch)
        totals = {}
        for key in self.reports[0]:
            reports = torch.vstack([report[key] for report in self.reports])
            totals[key] = reports.sum(dim=0)
        for loss, count in totals.values():
            self.run.losses.append(loss / count)
        if self.args.calculate_per_token_loss:
            self.tokens = int(totals["lm loss"][1])
            for gradient in sums.values():
                gradient.mul_(1.0 / totals["lm loss"][1])
        return sums

    def loss(self, batch: int) -> torch.Tensor:
        output, loss_function = self.forward_step(self.data, self.module)
        scale = self.loss_scale(batch)
        per_token = self.args.calculate_per_token_loss
        share = 1 if per_token else self.microbatches
        for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
            scaler.set_loss_scale(torch.tensor(scale / share))
        loss, tokens, report = loss_function(output)
        self.reports.append(report)
        if not per_token:
            loss = loss / torch.clamp(tokens, min=1) / self.microbatches
        return loss * scale

    def loss_scale(self, batch: int) -> float:
        """The scale that the step left that made the late microbatches' weights."""
        if batch >= self.rule.sync:
            batch = max(batch - 1, 0)
        return self.scales[batch]

    # The step

    def update(self, batch: int, gradients: dict[str, torch.Tensor]) -> None:
        self.before = {name: main.detach().clone() for name, main in self.main.items()}
        self._update_biases()  # in a skipped step too
        if batch == self.rule.poison:
            next(iter(gradients.values())).view(-1)[0] = float("inf")
        if self.args.fp16:
            for name, gradient in gradients.items():
                gradients[name] = gradient.float() * (1.0 / self.loss_scale(batch))
        for group, megatron in zip(self.optimizer.param_groups, self.megatron_groups):
            group["lr"] = megatron["lr"]
            group["weight_decay"] = megatron["weight_decay"]
        known = self.rule.ahead is not None and self.gradient_scale is not None
        if known and batch >= max(self.rule.sync, 1):
            self.predict(batch)
        finite = self.step(batch, gradients)
        if finite:  # the learning rate moves on when all ranks have stepped
            samples = self.microbatches * self.args.micro_batch_size
            self.scheduler.step(increment=samples)
        self.run.skipped.append(int(not finite))
        self.scales.append(self._next_scale(finite))

    def step(self, batch: int, gradients: dict[str, torch.Tensor]) -> bool:
        finite = all_finite(gradients.values())
        if finite:
            super().update(batch, gradients)
            norm = self.grad_norms[-1]
            self.gradient_scale = 1.0
            if self.clip_grad:
                self.gradient_scale = min(self.clip_grad / (norm + 1e-6), 1.0)
            if self.args.calculate_per_token_loss:
                self.gradient_scale /= self.tokens
        return finite

    def _update_biases(self) -> None:
        biases = []
        for router, bias in zip(self.routers, self.biases[-1]):
            tokens = router.local_tokens_per_expert
            sign = torch.sign(tokens.mean() - tokens)
            biases.append(bias + sign * self.args.moe_router_bias_update_rate)
            tokens.zero_()
        self.biases.append(biases)

    def _next_scale(self, finite: bool) -> float:
        """Dynamic loss scaling: halve after `hysteresis` infs, double after a window
        without any."""
        scale = self.scales[-1]
        if not self.args.fp16 or self.args.loss_scale:
            return scale
        if not finite:
            self.finite_steps = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                scale = max(scale / 2, self.args.min_loss_scale)
            return scale
        self.finite_steps += 1
        if self.finite_steps < self.args.loss_scale_window:
            return scale
        self.finite_steps = 0
        self.hysteresis = self.args.hysteresis
        return scale * 2


def adam_root(group: dict, state: dict) -> torch.Tensor:
    """What Adam divides by."""
    step = float(group["step"] if "step" in group else state["step"])
    correction = math.sqrt(1 - group["betas"][1] ** step)
    return state["exp_avg_sq"].sqrt() / correction + group["eps"]


class PipeDream(MegatronReference):
    """A stage's newest weights at a forward; each stage clips and steps alone."""

    def load(self, batch: int, microbatch: int) -> None:
        number = batch * self.microbatches + microbatch
        for stage, names in enumerate(reversed(self.norm_order)):
            version = max((number - stage) // self.microbatches, 0)
            for name in names:
                self.params[name].data = self.versions[version][name]

    def step(self, batch: int, gradients: dict[str, torch.Tensor]) -> bool:
        finite = True
        norms = []
        for names in self.norm_order:
            stage_is_finite = all_finite(gradients[name] for name in names)
            finite = finite and stage_is_finite
            for name in names:
                gradient = gradients[name].float() if stage_is_finite else None
                self.main[name].grad = gradient
            if stage_is_finite:
                norms.append(math.sqrt(self.squared_norm(names)))
                self.clip(names, norms[-1])
        self.grad_norms.append(max(norms))
        self.optimizer.step()
        return finite
