"""The time of one step under other systems on one GPU (or CPU), roughly.

Arithmetic and links at the sustained rates of `Speeds`, everything that a system can overlap
overlapped, nothing else lost. For 8 B parameters on an RTX 4090, 1,024 tokens a sequence, runs that
DeepSpeed published of its ZeRO-3 offload make 914, 1373 and 1791 tokens/s at batch 8, 16 and 32;
this says 690, 880 and 1030 with a desktop's RAM and half of the GPU's peak: within a factor of two.
Over several GPUs it depends on a network and a topology that no profile knows well enough: no
figure. What is not overlapped:

    ZeRO-Offload    the CPU's update follows the backward, then the weights come back
                    (2101.06840, section 4; its one-step delay is stale and not counted)
    ZeRO-Infinity   the same; states on nvme are read and written in that phase
    CPU update      48 bytes a parameter: DeepSpeed raises the gradient to fp32, unscales it, steps
                    and lowers the weight in passes of their own; 28 in PyTorch's one pass
"""

from __future__ import annotations

from offload.planning.activations.facts import ActivationFacts
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.workload import Workload
from offload.planning.step.work_time import pass_s
from offload.tools.memest.systems.memory import Numbers, System
from offload.tools.memest.systems.subject import Subject

_ON_DEVICE = (System.DDP, System.ZERO1, System.ZERO2, System.ZERO3, System.FSDP)
_DEEPSPEED_UPDATE_NBYTES = 48
_FUSED_UPDATE_NBYTES = 28


def rough_step_s(
    system: System, subject: Subject, facts: ActivationFacts, workload: Workload, precision: str,
    numbers: Numbers, speeds: Speeds,
) -> float | None:  # fmt: skip
    """Return the seconds of a step; None for a system whose time is not known here."""
    forward_s = pass_s(facts.forward, precision, speeds)
    backward_s = pass_s(facts.backward, precision, speeds)
    passes_s = workload.passes * (forward_s + backward_s)
    trained = subject.numel_trainable
    if system in _ON_DEVICE:
        nbytes = (_FUSED_UPDATE_NBYTES + 2 * numbers.full) * trained
        return passes_s + nbytes / speeds.compute_bytes_per_s
    if not speeds.gpu:
        return None
    weights = numbers.parameter * subject.numel
    down_s = numbers.parameter * trained * workload.passes / speeds.device_to_host_bytes_per_s
    leaving_s = max(0.0, down_s - workload.passes * backward_s)
    update_s = _DEEPSPEED_UPDATE_NBYTES * trained / speeds.host_bytes_per_s
    if system is System.ZERO_OFFLOAD:
        return passes_s + leaving_s + update_s + weights / speeds.host_to_device_bytes_per_s
    gathers = 2 * workload.passes  # for forward and for backward
    if system is System.FSDP_CPU:
        fused_s = _FUSED_UPDATE_NBYTES * trained / speeds.host_bytes_per_s
        arriving_s = gathers * 4 * subject.numel / speeds.host_to_device_bytes_per_s
        return max(passes_s, arriving_s) + 2 * leaving_s + fused_s
    arriving_s = gathers * weights / speeds.host_to_device_bytes_per_s
    if system is System.INFINITY_CPU:
        return max(passes_s, arriving_s) + leaving_s + update_s
    if system is System.INFINITY_NVME and speeds.nvme_read_bytes_per_s:
        reading_s = gathers * weights / speeds.nvme_read_bytes_per_s
        states = (numbers.states + 2 * numbers.full) * trained  # with the fp32 gradient
        swap_s = states / speeds.nvme_read_bytes_per_s
        swap_s += (states + weights) / speeds.nvme_write_bytes_per_s
        return max(passes_s, arriving_s, reading_s) + leaving_s + max(swap_s, update_s)
    return None
