"""megatron-2bw sample: text from a checkpoint of a GPT, on one GPU or on the CPU.

The model computes in fp32 and without a cache of keys and values: each token costs a
forward of the whole text. To serve a model, `megatron-2bw convert export` writes it for
transformers and the servers that read its format.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_2bw.base.command_line import parser_of
from megatron_2bw.base.errors import UserError, file_errors, usage_error


def main(argv: Sequence[str], prog: str) -> int:
    """Print the prompt and what the model continues it with."""
    options = parser_of(prog, __file__).parse_args(argv)
    if not options.source.is_dir():
        usage_error(prog, f"{options.source}: there is no such folder")
    import torch

    from megatron_2bw.mcore import cpu
    from megatron_2bw.tools.convert import megatron, parameters

    folder = megatron.find(options.source, options.ckpt_step)
    on_cpu = cpu.wanted(options.device)
    if on_cpu:
        megatron.use_cpu()
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = megatron.saved_arguments(folder, options.trust_remote_code)
    if args.task != "gpt":
        raise UserError(f"{folder}: it is a BERT, which continues no text")
    with megatron.whole_model(args, "cpu" if on_cpu else "cuda") as (model, entries):
        checkpoint = parameters.Checkpoint(folder, args)
        parameters.read_into(model.eval(), entries, checkpoint)
        with file_errors(args.tokenizer_model):
            tokenizer = build_tokenizer(args)
        # the rows after it are padding
        size = min(tokenizer.vocab_size, args.padded_vocab_size)

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(tokens.shape[1]).to(tokens)[None]
            return model(tokens, positions, None)[..., :size]

        text = _tokens(tokenizer, options.prompt, size)
        limit = min(args.seq_length, args.max_position_embeddings)
        text += generate(logits, text, limit, tokenizer.eod, options)
    print(printable(tokenizer.detokenize(text)))
    return 0


def generate(
    logits: Callable, prompt: list[int], limit: int, end: int | None, options: Any
) -> Iterator[int]:
    """Up to `options.tokens` tokens that follow the prompt; none after `end`.

    logits: of the next token at each place, [1, sequence, vocabulary], for tokens [1,
    sequence]. limit: the longest sequence of the model, in tokens; of a longer text it
    sees the end. options: tokens, temperature, top_k and seed of the command line.
    """
    import torch

    from megatron_2bw.mcore import cpu

    device = "cpu" if cpu.installed() else "cuda"
    generator = torch.Generator(device).manual_seed(options.seed)
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(options.tokens):
            tokens = torch.tensor([text[-limit:]], device=device)
            last = logits(tokens)[0, -1].float()
            if options.temperature == 0:
                token = int(last.argmax())
            else:
                if options.top_k is not None:
                    likeliest = last.topk(min(options.top_k, len(last))).values
                    last[last < likeliest[-1]] = -torch.inf
                chances = (last / options.temperature).softmax(0)
                token = int(torch.multinomial(chances, 1, generator=generator))
            if token == end:
                return
            yield token
            text.append(token)


def printable(text: str) -> str:
    """`text` with escapes for what would control a terminal: all control characters but
    tabs and ends of lines."""
    control = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]"
    return re.sub(control, lambda match: ascii(match[0])[1:-1], text)


def _tokens(tokenizer, prompt: str, vocabulary: int) -> list[int]:
    try:
        tokens = [int(token) for token in tokenizer.tokenize(prompt)]
    except ValueError:
        raise UserError(
            f"--prompt {prompt!r}: the checkpoint's tokenizer takes numbers of tokens"
        ) from None
    if not tokens or not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise UserError(
            f"--prompt {prompt!r}: give at least one token, each below {vocabulary}"
        )
    return tokens
