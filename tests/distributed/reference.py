"""PipeDream-2BW in one process of plain PyTorch: the rule that pipelines must follow.

    W(j+1) = W(j) - update(gradient of batch j)

The late microbatches of batch j run on W(j-1), the others on W(j). In the paper's 2BW
every microbatch is late. reference_modes.py adds Megatron's model and data, and the
other rules.
"""

import torch


class TwoBW:
    """The rule without a model. A subclass says what the loss of a microbatch is.

    params          the model's parameters by name
    make_optimizer  makes an optimizer of float32 weights by name
    norm_order      the names of each stage's parameters, in the order in which the
                    pipeline under test adds up the gradient norm
    clip_grad       the largest gradient norm; 0: any
    """

    microbatches: int  # of a batch
    late: int | None = None  # the first microbatches of a batch; None: all
    sum_dtype = torch.float32

    def __init__(self, params, make_optimizer, norm_order, clip_grad):
        self.params = params
        self.main = {}  # the float32 weights, which the optimizer steps
        for name, param in params.items():
            self.main[name] = param.detach().float().clone().requires_grad_()
        self.optimizer = make_optimizer(self.main)
        self.norm_order = norm_order or [list(params)]
        counted = sorted(sum(self.norm_order, []))
        assert counted == sorted(params), "the norm has each parameter once"
        self.clip_grad = clip_grad
        self.grad_norms = []
        self.versions = []  # W(0), W(1), ...
        self.versions.append(self.weights())

    def train(self, batches: int) -> None:
        for batch in range(batches):
            gradients = self.gradients(batch)
            self.update(batch, gradients)
            self.versions.append(self.weights())

    def weights(self) -> dict[str, torch.Tensor]:
        """The newest weights, in the model's precision."""
        weights = {}
        for name, param in self.params.items():
            weights[name] = self.main[name].detach().to(param.dtype, copy=True)
        return weights

    def version(self, batch: int, microbatch: int) -> int:
        """j of the W(j) that a microbatch runs on, forward and backward."""
        if self.late is None or microbatch < self.late:
            return max(batch - 1, 0)
        return batch

    def load(self, batch: int, microbatch: int) -> None:
        weights = self.versions[self.version(batch, microbatch)]
        for name, param in self.params.items():
            param.data = weights[name]

    def loss(self, batch: int) -> torch.Tensor:
        """The loss of the next microbatch, divided by the number of microbatches."""
        raise NotImplementedError

    def gradients(self, batch: int) -> dict[str, torch.Tensor]:
        sums = {}
        for name, param in self.params.items():
            sums[name] = torch.zeros_like(param, dtype=self.sum_dtype)
        for microbatch in range(self.microbatches):
            self.load(batch, microbatch)
            self.loss(batch).backward()
            for name, param in self.params.items():
                sums[name].add_(param.grad)
                param.grad = None
            self.after_backward(microbatch, sums)
        return sums

    def after_backward(self, microbatch: int, sums: dict[str, torch.Tensor]) -> None:
        """The gradients so far; for a subclass."""

    def update(self, batch: int, gradients: dict[str, torch.Tensor]) -> None:
        for name, main in self.main.items():
            main.grad = gradients[name].float()
        squares = [self.squared_norm(names) for names in self.norm_order if names]
        norm = float(torch.stack(squares).sum()) ** 0.5
        self.clip(self.main, norm)
        self.grad_norms.append(norm)
        self.optimizer.step()

    def squared_norm(self, names) -> torch.Tensor:
        norms = []
        for name in names:
            norms.append(float(torch.linalg.vector_norm(self.main[name].grad)))
        return torch.linalg.vector_norm(torch.tensor([norms])) ** 2

    def clip(self, names, norm: float) -> None:
        coefficient = self.clip_grad / (norm + 1e-6)
        if self.clip_grad > 0 and coefficient < 1:
            for name in names:
                self.main[name].grad.mul_(coefficient)
