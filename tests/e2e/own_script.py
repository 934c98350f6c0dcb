"""A Megatron entry script as a user has it, with a model and a dataset of their own;
three lines bring 2BW.

(`cpu.install()` is for a host without a GPU.)
"""

from megatron_2bw.mcore import cpu

cpu.install()
import torch  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402
from megatron.training.argument_utils import pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import (  # noqa: E402
    core_transformer_config_from_args,
    parse_and_validate_args,
)

from megatron_2bw.mcore import add_flags, check, install  # noqa: E402


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards from a random number."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(64, (1,), generator=generator)
        tokens = (start + torch.arange(get_args().seq_length + 1)) % 64
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def datasets(samples, vp_stage=None):
    return [Counting(max(count, 1)) for count in samples]


datasets.is_distributed = True


def model_provider(pre_process=True, post_process=True, **more):
    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(),
        args.padded_vocab_size,
        args.seq_length,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def loss(losses):
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}


def forward_step(iterator, model):
    fields = {"tokens": None, "labels": None}
    if mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage():
        fields = next(iterator)
    length = get_args().seq_length
    positions = torch.arange(length).expand(get_args().micro_batch_size, -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return model(fields["tokens"], positions, mask, labels=fields["labels"]), loss


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_flags)  # 1
    check(args)  # 2
    install(args)  # 3
    pretrain(
        pretrain_cfg_container_from_args(args, None),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
