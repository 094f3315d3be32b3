# SPDX-License-Identifier: Apache-2.0
"""What a user of MindFormers writes; prints a JSON line of each model. mindformers_worker.py CHECKPOINT IDS.npy PROMPT ..."""

import json
import sys

import numpy as np

import sporeloom.integrations.mindformers  # noqa: F401 (registers)

from mindformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline  # isort: skip


def work(folder, ids_file, prompt):
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder)
    np.save(ids_file + ".logits.npy", model(np.load(ids_file)).asnumpy())
    ids = tokenizer(prompt)["input_ids"]
    generated = model.generate([ids, ids[:2]], max_new_tokens=6)
    writer = pipeline("text_generation", model=AutoModelForCausalLM.from_pretrained(folder), tokenizer=tokenizer)
    by_folder = pipeline("text_generation", model=folder)
    batch = tokenizer([prompt, prompt[:2]], padding=True, return_tensors="np")
    return {
        "config": [type(config).__name__, config.num_layers, config.seq_length],
        "round_trip": tokenizer.decode(ids),
        "prompt": ids,
        "generated": generated,
        "batch": {name: array.tolist() for name, array in batch.items()},
        "by_folder": by_folder(prompt, max_new_tokens=6)[0]["text_generation_text"],
        "pipeline": writer(prompt, max_new_tokens=6)[0]["text_generation_text"],
    }


for place in range(1, len(sys.argv), 3):
    print(json.dumps(work(*sys.argv[place : place + 3])))
