"""Pretrain BERT with Megatron's training loop and any of the pipeline schedules: see
README.md.

torchrun --nproc-per-node 2 pretrain_bert_2bw.py --pipeline-schedule 2bw
--pipeline-model-parallel-size 2 ...
"""

from megatron_2bw.run.start.launch import launch

if __name__ == "__main__":
    launch("megatron_2bw.run.tasks.bert")
