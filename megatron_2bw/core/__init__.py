"""The 2BW engine on plain torch: a schedule's actions, weight versions, messages,
updates. See examples/plain_torch.py.

Nothing here imports Megatron, reads flags or prints.
"""

from megatron_2bw.core.groups import StepGroup
from megatron_2bw.core.p2p import Neighbours, connect
from megatron_2bw.core.pipeline import Pipeline, Stage, Update
from megatron_2bw.core.recorder import Record, Recorder
from megatron_2bw.core.updates import InPlaceUpdate, LateUpdate, StashedUpdate
from megatron_2bw.core.weights import WeightStores
from megatron_2bw.core.worker import Worker
