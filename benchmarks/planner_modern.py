# SPDX-License-Identifier: Apache-2.0
"""What the cost model says of PaLM 540B and Pangu Ultra 135B, whose runs it was not fitted to.

    python benchmarks/planner_modern.py

Pangu Ultra ran on Ascend 800T A2, whose peak its paper does not print; that of Pangu Pro MoE prints 256 TFLOP/s. PaLM ran
on TPU v4, a chip that no run of the fit used: its data sheet with the efficiencies of the A100.
"""

import dataclasses

from sporeloom.models.family import size_config
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import Dimensions, of_decoder
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.step_time import flops_per_device, step_time

TPU_V4 = {  # Google's documentation; 3072 chips of a pod on one torus
    "peak_tflops": 275,
    "memory_gb": 32,
    "memory_gb_per_s": 1200,
    "intra_node_gb_per_s": 268,  # the all-reduce bandwidth of a pod, 1.1 PB/s, by its 4096 chips
    "inter_node_gb_per_s": 50,
    "devices_per_node": 3072,
}
ULTRA_PEAK = 256e12


def dimensions(family: str, size: str) -> Dimensions:
    """As published: softmax in 16 bits."""
    return dataclasses.replace(of_decoder(size_config(family, size)), float32_softmax=False)


def show(name: str, predicted: float, published: float) -> None:
    print(f"{name:48} {predicted:7.1%} {published:7.1%} {predicted / published - 1:+7.1%}")


def ultra() -> None:
    dims, cluster = dimensions("pangu", "ultra_135b"), Cluster.of_chip("ascend910b")
    for virtual, mfu, bubble in ((1, 0.43, 0.3045), (6, 0.52, 0.068)):
        job = Parallelism(
            dp=128,
            tp=8,
            pp=8,
            virtual_stages=virtual,
            num_microbatches=16,
            zero=1,
            sequence_parallel=True,
            flash_attention=True,
        )
        time = step_time(dims, job, cluster)
        model, _ = flops_per_device(dims, job)
        show(f"Pangu Ultra 135B, {virtual} virtual stages: MFU", model / time.total / ULTRA_PEAK, mfu)
        exact = (job.pp - 1) / (job.num_microbatches * virtual + job.pp - 1)
        show(f"Pangu Ultra 135B, {virtual} virtual stages: bubble", exact, bubble)


def palm() -> None:
    dims, cluster = dimensions("palm", "540b"), dataclasses.replace(Cluster.of_chip("a100_80gb"), **TPU_V4)
    job = Parallelism(
        dp=512, tp=12, microbatch=4, zero=3, zero_shards=256, flash_attention=True, recompute="full", gathers="step"
    )
    time = step_time(dims, job, cluster)
    model, hardware = (flops / time.total / cluster.peak_tflops / 1e12 for flops in flops_per_device(dims, job))
    show("PaLM 540B: MFU", model, 0.462)
    show("PaLM 540B: HFU", hardware, 0.578)


if __name__ == "__main__":
    print(f"{'':48} predicted published error")
    ultra()
    palm()
