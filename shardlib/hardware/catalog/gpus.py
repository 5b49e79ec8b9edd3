"""GPUs, each figure with its source, whose short names `shardlib.hardware.catalog` explains."""

from __future__ import annotations

from shardlib.hardware.products import Product, gpu, gpu_memory, infiniband, nvlink

#: What large copies from or to pinned host memory reach in one direction, bytes/s. PCIe 4.0 and 5.0
#: with 16 lanes carry 31.5 and 63 GB/s (16 and 32 GT/s a lane, 128b/130b; PCI-SIG base
#: specifications); NVIDIA/nvbandwidth host_to_device_memcpy_ce shows about 26 and 55 of them.
PCIE_4 = 26e9
PCIE_5 = 55e9
#: The widest head of cuDNN's attention from Hopper on; it is 128 before (NVIDIA cuDNN, "Scaled
#: Dot Product Attention"; jax.nn.dot_product_attention refuses wider ones).
HOPPER_HEAD = 256
A100 = Product(
    chip=gpu(
        "a100",
        gpu_memory(85100068864, 2039e9, PCIE_4),
        bf16=312e12,  # xla a100_sxm_80; nvidia A100: 312 bf16, 624 int8, 156 TF32
        tf32=156e12,
        int8=624e12,
        sources=("xla a100_sxm_80.txtpb", "nvidia A100 80GB SXM"),
    ),
    fast=nvlink(
        300e9,
        0.8,
        "book gpus.md: NVLink 3, 300 GB/s; all-reduce busbw of 8 GPUs 230 to 250 GB/s (alayanew)",
    ),
    slow=infiniband(25e9, "nvidia DGX A100: one 200 Gbit/s HDR port a GPU"),
    dims=1,
    most=8,
)
A100_40GB = Product(
    chip=gpu(
        "a100-40gb",
        gpu_memory(42331013120, 1555e9, PCIE_4),
        bf16=312e12,  # xla a100_sxm_40; nvidia A100 40GB SXM
        tf32=156e12,
        int8=624e12,
        sources=("xla a100_sxm_40.txtpb", "nvidia A100 40GB SXM"),
    ),
    fast=A100.fast,
    slow=A100.slow,
    dims=1,
    most=8,
)
H100 = Product(
    chip=gpu(
        "h100",
        gpu_memory(84942979072, 3352e9, PCIE_5),
        bf16=989e12,  # xla h100_sxm; nvidia H100 SXM: 989 bf16, 1979 fp8
        tf32=494.5e12,
        int8=1979e12,
        fp8=1979e12,
        attention_width=HOPPER_HEAD,
        sources=("xla h100_sxm.txtpb", "nvidia H100 SXM"),
    ),
    fast=nvlink(
        450e9, 0.82, "book gpus.md: NVLink 4, 450 GB/s, 'difficult in practice to exceed 370 GB/s'"
    ),
    slow=infiniband(50e9, "nvidia DGX H100 SuperPOD: one 400 Gbit/s NDR port a GPU"),
    dims=1,
    most=8,
)
H200 = Product(
    chip=gpu(
        "h200",
        gpu_memory(151397597184, 4800e9, PCIE_5),
        bf16=989e12,  # xla h200; nvidia H200 SXM: the compute of an H100
        tf32=494.5e12,
        int8=1979e12,
        fp8=1979e12,
        attention_width=HOPPER_HEAD,
        sources=("xla h200.txtpb", "nvidia H200 SXM"),
    ),
    fast=H100.fast,
    slow=H100.slow,
    dims=1,
    most=8,
)
B200 = Product(
    chip=gpu(
        "b200",
        gpu_memory(191514411008, 7672e9, PCIE_5),
        bf16=2250e12,  # xla b200; nvidia HGX B200: 2250 bf16, 4500 fp8
        tf32=1100e12,
        int8=4500e12,
        fp8=4500e12,
        attention_width=HOPPER_HEAD,
        sources=("xla b200.txtpb", "nvidia HGX B200"),
    ),
    fast=nvlink(
        900e9,
        0.7,
        "book gpus.md: NVLink 5, 900 GB/s; SimuMax b200_bf16_ceperm.json: 0.742 all-reduce, 0.673"
        " gather and scatter",
    ),
    slow=infiniband(50e9, "nvidia DGX B200 SuperPOD: one 400 Gbit/s port a GPU"),
    dims=1,
    most=8,
)
GB200 = Product(
    chip=gpu(
        "gb200",
        gpu_memory(
            197897748480, 7928e9, 225e9
        ),  # nvidia GB200: NVLink-C2C 900 GB/s both ways between one Grace and its two GPUs
        bf16=2500e12,  # xla gb200; nvidia GB200 NVL72: 2500 bf16, 5000 fp8
        tf32=1250e12,
        int8=5000e12,
        fp8=5000e12,
        attention_width=HOPPER_HEAD,
        sources=("xla gb200.txtpb", "nvidia GB200 NVL72"),
    ),
    fast=B200.fast,
    slow=infiniband(50e9, "book gpus.md: 3.6 TB/s egress of 72 GPUs, 400 Gbit/s each"),
    dims=1,
    most=72,
)  # nvidia GB200 NVL72: one NVLink domain of 72 GPUs
#: All GPUs, in the order in which they are listed.
GPUS: tuple[Product, ...] = (A100, A100_40GB, H100, H200, B200, GB200)
