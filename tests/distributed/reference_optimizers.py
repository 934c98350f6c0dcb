"""The optimizers of the reference: classes of torch and of emerging_optimizers."""

import torch

SCALAR_MATRICES = ("embedding.word_embeddings.weight", "output_layer.weight")


class Optimizers:
    """Several torch optimizers, stepped in turn."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        self.param_groups = []
        for part in parts:
            self.param_groups += part.param_groups

    def step(self) -> None:
        for part in self.parts:
            part.step()


def make_optimizers(main, *, params, megatron_optimizer, args) -> Optimizers:
    """Optimizers of the weights `main`, in groups by weight decay as Megatron's."""
    names = {}
    for name, param in params.items():
        names[id(getattr(param, "main_param", param))] = name
    parts = []
    for megatron_part in megatron_optimizer.chained_optimizers:
        groups = []
        classes = set()
        for group in megatron_part.param_groups:
            members = [names[id(param)] for param in group["params"]]
            for name in members:
                classes.add(class_of(name, main[name], args))
            weights = [main[name] for name in members]
            groups.append({"params": weights, "weight_decay": group["weight_decay"]})
        (one,) = classes  # Megatron's parts do not mix them
        parts.append(make_part(one, groups, main, args))
    return Optimizers(parts)


def class_of(name: str, weight: torch.Tensor, args) -> str:
    """What steps a parameter.

    Muon, Lion and SOAP step matrices, also learned positions; Adam the rest, or Lion
    beside Muon.
    """
    kind = args.optimizer
    if kind in ("adam", "sgd"):
        return kind
    if weight.dim() == 2 and name not in SCALAR_MATRICES:
        return kind
    if kind == "muon":
        return args.muon_scalar_optimizer + " of muon"
    return "adam"


def make_part(kind: str, groups: list[dict], main, args) -> torch.optim.Optimizer:
    lr = args.lr
    betas = (args.adam_beta1, args.adam_beta2)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=args.sgd_momentum)
    if kind.startswith("adam"):
        fused = dict(fused=True) if args.two_bw_memory == "host" else {}
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=args.adam_eps, **fused)
    if kind == "muon":
        return make_muon(groups, main, args)
    from emerging_optimizers.scalar_optimizers import Lion
    from emerging_optimizers.soap import SOAP

    if kind == "soap":
        return SOAP(groups, lr=lr, betas=betas, use_kl_shampoo=True)
    if kind == "lion of muon":
        betas = (args.lion_beta1, args.lion_beta2)
    return Lion(groups, lr=lr, betas=betas)


def make_muon(groups: list[dict], main, args) -> torch.optim.Optimizer:
    """Muon that orthogonalises queries, keys and values apart.

    linear_qkv holds them head by head.
    """
    from emerging_optimizers.orthogonalized_optimizers import Muon

    heads = args.num_attention_heads
    fused = set()
    for name, weight in main.items():
        if name.endswith("linear_qkv.weight"):
            fused.add(weight)

    class SplitMuon(Muon):
        def orthogonalize(self, p, grad, **kwargs):
            if p not in fused:
                return super().orthogonalize(p, grad, **kwargs)
            # (heads, query | key | value, channels, hidden size)
            by_head = grad.view(heads, 3, -1, grad.shape[1])
            parts = []
            for kind in range(3):
                part = by_head[:, kind].flatten(0, 1)
                part = super().orthogonalize(p, part, **kwargs)
                parts.append(part.unflatten(0, (heads, -1)))
            return torch.stack(parts, dim=1).reshape(grad.shape)

    return SplitMuon(
        groups, lr=args.lr, momentum=args.muon_momentum, nesterov=args.muon_nesterov
    )
