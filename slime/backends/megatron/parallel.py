"""Start and end of one rank's distributed life: the process group, Megatron's groups, the seeds.

Owns the mapping from our configuration to ``torch.distributed`` and ``megatron.core.parallel_state``
and a typed view of the result. Builds no model. Tests hold: ranks and sizes of the view agree with
Megatron's; an incomplete set of processes fails within the stated time-out.
"""

import datetime
import logging
import random
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.training.determinism import apply_determinism_to_args
from torch import distributed as dist

from slime.backends.megatron.args import namespace
from slime.config import Config
from slime.errors import ConfigError, WaitTimeoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelState:
    """Where this rank stands. A group has as many members as the size of the same name says.

    ``dp`` counts replicas of the whole model (context parallelism excluded); ``dp_cp_group`` spans
    data and context parallelism, over which gradients are reduced.
    """

    rank: int
    world_size: int
    device: torch.device
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    ep_rank: int
    ep_size: int
    vpp_size: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup

    @property
    def is_pp_first(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_pp_last(self) -> bool:
        """Whether this rank holds the output head."""
        return self.pp_rank == self.pp_size - 1


def initialize(config: Config, *, rank: int, world_size: int, master_addr: str, master_port: int) -> ParallelState:
    """Join the training processes and build Megatron's groups. Collective over all ranks.

    Args:
        config: The resolved configuration; the number of ranks is checked against it.
        rank: This process, from 0.
        world_size: Number of training processes.
        master_addr: Host of rank 0, which serves the store.
        master_port: Port of the store.

    Returns:
        This rank's place.

    Raises:
        WaitTimeoutError: Not all ranks arrived within ``--distributed-timeout-minutes``.
        ConfigError: The number of processes does not fit the parallel sizes.
    """
    args = namespace(config)
    _quieten_megatron()
    if world_size != args.world_size:
        raise ConfigError(
            f"{world_size} training processes were started, the configuration resolves to {args.world_size} "
            "(--actor-num-nodes x --actor-num-gpus-per-node)"
        )
    cuda = config.cluster.device == "cuda"
    timeout = datetime.timedelta(minutes=config.cluster.distributed_timeout_minutes)
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        store = dist.TCPStore(master_addr, master_port, world_size, is_master=rank == 0, timeout=timeout)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except dist.DistStoreError as error:
        raise WaitTimeoutError(
            f"training rank {rank} waited {timeout} for all {world_size} ranks at {master_addr}:{master_port}: {error}"
        ) from error
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.cluster.distributed_timeout_minutes,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        # On a CPU every group is gloo already; a second set would only cost start-up time.
        create_gloo_process_groups=cuda and args.use_gloo_process_groups,
    )
    seed_everything(args.seed)
    if args.deterministic_mode:
        apply_determinism_to_args(args)
    return current(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))


def _quieten_megatron() -> None:
    """Megatron's INFO lines (whole configurations, every parameter) are not for an operator."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    # Warns at each build that GPTModel is deprecated in favour of HybridModel; nothing can be done about it here.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    # Warns that it was not initialised; slime's own checks take its place.
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's tensor-parallel generators; stages get different seeds."""
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def current(device: torch.device) -> ParallelState:
    """The view of the groups that Megatron holds now."""
    return ParallelState(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        vpp_size=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        tp_group=mpu.get_tensor_model_parallel_group(),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        dp_group=mpu.get_data_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
        dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
    )


def destroy() -> None:
    """Leave all groups; nothing happens when there are none. Not collective."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
