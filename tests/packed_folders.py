# SPDX-License-Identifier: Apache-2.0
"""Folders of GPTQ and AWQ, packed by the definition of the formats, not by what reads them."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

AUTOGPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "damp_percent": 0.1}
GPTQ = {**AUTOGPTQ, "meta": {"quantizer": ["gptqmodel:2.2.0"]}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def word_of(numbers, less=0):
    """Eight numbers in 32 bits, the first one lowest, minus a word that may borrow from beyond it; as int32."""
    total = (sum(int(number) << (4 * place) for place, number in enumerate(numbers)) - less) % (1 << 32)
    return total - (1 << 32) if total >= 1 << 31 else total


def pack_gptq(q, zero, scale, groups, is_first):
    """q (out, in), zero and scale (groups, out), groups (in,)."""
    out, columns = q.shape
    qweight = [[word_of(q[row, at : at + 8]) for row in range(out)] for at in range(0, columns, 8)]
    qzeros = [[word_of(of[at : at + 8], is_first * 0x11111111) for at in range(0, out, 8)] for of in zero]
    parts = {"qweight": qweight, "qzeros": qzeros, "g_idx": groups}
    return {**{name: np.asarray(value, np.int32) for name, value in parts.items()}, "scales": scale.astype(np.float16)}


def pack_awq(q, zero, scale):
    out, columns = q.shape
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight = [[word_of(q[at : at + 8, i][order]) for at in range(0, out, 8)] for i in range(columns)]
    qzeros = [[word_of(of[at : at + 8][order]) for at in range(0, out, 8)] for of in zero]
    parts = {"qweight": np.asarray(qweight, np.int32), "qzeros": np.asarray(qzeros, np.int32)}
    return {**parts, "scales": scale.astype(np.float16)}


def quantized(plain, target, settings, endings=("_proj.weight",)):
    """A folder with packed matrices; and the matrices that they stand for, by published name."""
    target.mkdir()
    tensors, draw, exact = load_file(plain / "model.safetensors"), np.random.default_rng(5), {}
    for name in [name for name in tensors if name.endswith(endings)]:
        if name.split(".")[-2] in settings.get("modules_to_not_convert", ()):
            continue
        out, columns = tensors.pop(name).shape
        size = settings["group_size"] if settings["group_size"] > 0 else columns
        groups = np.arange(columns) // size
        if settings.get("desc_act"):
            groups = draw.permutation(groups)
        lowest = int("meta" not in settings and settings["quant_method"] == "gptq")  # AutoGPTQ cannot pack a 0
        q, zero = draw.integers(0, 16, (out, columns)), draw.integers(lowest, 16, (-(-columns // size), out))
        scale = draw.normal(0, 0.03, zero.shape).astype(np.float16)
        is_first = settings.get("checkpoint_format", "gptq").lower() != "gptq_v2"
        is_gptq = settings["quant_method"] == "gptq"
        parts = pack_gptq(q, zero, scale, groups, is_first) if is_gptq else pack_awq(q, zero, scale)
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.{part}": np.ascontiguousarray(value) for part, value in parts.items()}
        exact[name] = ((q - zero[groups].T) * scale[groups].T.astype(np.float64)).astype(np.float32)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return exact
