"""pretrain_gpt_2bw.py with a fault in the late step of rank 1, in iteration 3 or soon
after."""

import os

if __name__ == "__main__":
    from megatron_2bw.run.start.launch import launch

    launch("faulty")  # which imports this file, now as a task
else:
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.training import get_args

    from megatron_2bw.run.tasks.gpt import datasets_provider, forward_step, model_config  # noqa: F401

    step = FP32Optimizer.step_with_ready_grads

    def faulty_step(self):  # in the thread of the late step
        if os.environ["RANK"] == "1" and get_args().curr_iteration >= 2:
            raise ValueError("a fault of this stage alone")
        return step(self)

    FP32Optimizer.step_with_ready_grads = faulty_step
