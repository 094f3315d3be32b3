# SPDX-License-Identifier: Apache-2.0
"""The commands of `sporeloom`, each a module with a `main(argv)`. The tables below are the overview that --help prints."""

GROUPS = {
    "Train": {
        "train": "Pretrain a model, on one device or in parallel",
        "runs": "List local runs, compare their curves in the terminal or on a page",
        "launch-script": "Write the msrun command of each server, or a script for ssh, Slurm or ModelArts",
        "sft": "Fine-tune a checkpoint on instructions, fully or with LoRA adapters",
        "distill": "Train a student on a teacher's probabilities (knowledge distillation)",
    },
    "Align": {
        "reward": "Train a reward model on preference pairs",
        "dpo": "Direct preference optimization (DPO)",
        "simpo": "Simple preference optimization (SimPO), without a reference model",
        "orpo": "Odds ratio preference optimization (ORPO), without a reference model",
        "kto": "Kahneman-Tversky optimization (KTO) of texts that are labelled good or bad",
        "grpo": "Group relative policy optimization (GRPO): reinforcement learning without a critic",
        "ppo": "Proximal policy optimization (PPO): reinforcement learning with a critic",
    },
    "Generate and serve": {
        "generate": "Generate text from prompts",
        "serve": "Serve an OpenAI-compatible API and a chat page, on one device or in parallel",
        "batch": "Answer a file of requests in OpenAI's batch format, offline",
        "bench-serve": "Measure throughput and latency of a server",
    },
    "Evaluate": {
        "evaluate": "Run HumanEval-X (programs in six languages, run against their tests) or lm-evaluation-harness tasks",
        "score": "Compute logits and loss of token IDs",
    },
    "Plan and prove": {
        "plan": "Find the fastest strategy for a model, a cluster and a batch; `plan list`: built-in strategies",
        "tune": "Search strategies beyond the planner's, simulate the best, certify the Pareto front of time and memory",
        "dry-run": "Memory, communication and FLOPs of any rank of a cluster; `dry-run explain NAME`: one layout",
        "calibrate": "Measure this machine and write a cluster file for estimates of steps on it",
        "simulate": "Simulate a long job whose devices fail: goodput, its end, what checkpoints and spares buy",
        "certify": "Prove a strategy on this machine before a cluster is booked",
        "replay": "Run one recorded step of one rank again, alone, and compare it bit for bit",
        "audit": "Verify a run by its hash chain, and run random stretches of it again, bit for bit",
        "bisect": "Name the first operator, rank and tensor in which two recorded runs differ",
        "rules": "List the operators of a custom network that sharding rules can name",
    },
    "Data": {
        "preprocess": "Filter, deduplicate and tokenize raw text",
        "tokenizer": "`tokenizer train`: train a tokenizer; `tokenizer stats`: fertility and compression, compared",
    },
    "Checkpoints": {
        "checkpoint-info": "Show what a training checkpoint holds, and verify it",
        "reshard-checkpoint": "Reshard a training checkpoint for another mesh",
        "export-checkpoint": "Export the model of a training checkpoint, unsharded",
        "convert-checkpoint": "Convert checkpoints from and to Hugging Face, Megatron-LM and MindFormers",
        "upcycle": "Convert a dense model to mixture of experts (sparse upcycling)",
    },
    "Environment": {
        "doctor": "Check this machine for what training and serving need",
        "cache": "List or clear the compilation cache",
        "config": "`config diff A B`: compare two run files, or the config.json of two runs",
        "translate": "Translate strategies and configurations from and to MindFormers, Megatron-LM and DeepSpeed",
    },
}
EXAMPLES = {
    "Train": "sporeloom train --data corpus.txt --steps 100 --output-dir out",
    "Align": "sporeloom dpo --from-checkpoint out/checkpoint --data pairs.jsonl --output-dir aligned",
    "Generate and serve": "sporeloom serve out/checkpoint --port 8000",
    "Evaluate": "sporeloom evaluate lm-eval --tasks arc_easy --checkpoint out/checkpoint --output scores.json",
    "Plan and prove": "sporeloom plan --model pangu --size 13b --cluster h100 --devices 64 --global-batch-size 512",
    "Data": "sporeloom preprocess tokenize corpus.jsonl --tokenizer vocab.model --out tokens",
    "Checkpoints": "sporeloom checkpoint-info out/checkpoints/step-00000100",
    "Environment": "sporeloom doctor",
}
COMMANDS = {verb: text for verbs in GROUPS.values() for verb, text in verbs.items()}
