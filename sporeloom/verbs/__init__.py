# SPDX-License-Identifier: Apache-2.0
"""What a user can ask for: `sporeloom VERB`, each verb a module with a `main(argv)`. The table is the help."""

VERBS = {
    "train": "train a model, on one device or as a strategy says",
    "sft": "teach a checkpoint to answer: supervised fine-tuning, whole or by adapters (LoRA)",
    "reward": "train a reward model from preferences",
    "dpo": "align a checkpoint with preferences (DPO)",
    "grpo": "align a checkpoint with rewards for what it samples (GRPO)",
    "ppo": "align a checkpoint with rewards for what it samples, with a critic (PPO)",
    "generate": "continue texts with a trained model",
    "serve": "a server with OpenAI's API and a page, on one device or as a strategy says",
    "bench-serve": "how fast a server answers",
    "evaluate": "HumanEval-X: programs in six languages, run against their tests",
    "score": "logits and loss of token ids",
    "plan": "the best strategy for a model, a cluster and a batch; `plan list`: those that are shipped",
    "dry-run": "what ranks of a cluster would hold, send and compute; `dry-run explain NAME`: one layout",
    "certify": "one verdict before a cluster is booked",
    "preprocess": "from raw text to token files",
    "checkpoint-info": "what a training checkpoint holds, and whether it is sound",
    "reshard-checkpoint": "shard the files of a checkpoint for another mesh",
    "export-checkpoint": "the model of a training checkpoint, whole",
    "convert-checkpoint": "between the published namings and ours",
    "upcycle": "a model with experts of a dense one",
    "translate": "strategies and configurations of MindFormers and Megatron-LM, to ours and back",
    "config": "`config diff A B`: what two run files, or the config.json of two runs, have different",
    "kept-graphs": "compiled graphs that runs on this machine share",
    "doctor": "what this machine lacks to run all of this",
}
