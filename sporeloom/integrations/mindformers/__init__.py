# SPDX-License-Identifier: Apache-2.0
"""PanGu, CodeGeeX and PaLM with MindFormers' interfaces: importing this registers them with its Auto classes.

    import sporeloom.integrations.mindformers
    from mindformers import AutoConfig, AutoModel, AutoTokenizer, pipeline
    from sporeloom.integrations.trainer import Trainer           # for its YAML files

    model = AutoModel.from_pretrained("out/latest/checkpoint")
    tokenizer = AutoTokenizer.from_pretrained("out/latest/checkpoint")
    pipeline("text_generation", model=model, tokenizer=tokenizer)("...", max_new_tokens=32)

Adapters only: networks, caches, sampling and tokenizers are this package's. Needs the extra `mindformers` (1.9).
"""

from __future__ import annotations

from sporeloom.integrations.mindformers.config import CodeGeeXConfig, PaLMConfig, PanGuConfig
from sporeloom.integrations.mindformers.library import logger, mindformers
from sporeloom.integrations.mindformers.model import CodeGeeXForCausalLM, PaLMForCausalLM, PanGuForCausalLM
from sporeloom.integrations.mindformers.tokenizer import CodeGeeXTokenizer, PaLMTokenizer, PanGuTokenizer

NOISE = (
    "openMind Hub",
    "config swap_config is empty",
    "config monitor_config is empty",
    "Some configs in yaml are useless",
    *("loading configuration file", "Model config ", "model config: ", "Could not locate the tokenizer configuration"),
    *("loading file ", "Initializing ms pipeline", "mindspore mode not set"),
)
"""Log messages of MindFormers about files nobody requested, and with the full configuration whenever one is read."""


def register() -> None:
    """Register the families with MindFormers' Auto classes, and filter misleading messages of its logger."""
    logger.addFilter(lambda record: not any(words in record.getMessage() for words in NOISE))
    for config, model, tokenizer in (
        (PanGuConfig, PanGuForCausalLM, PanGuTokenizer),
        (CodeGeeXConfig, CodeGeeXForCausalLM, CodeGeeXTokenizer),
        (PaLMConfig, PaLMForCausalLM, PaLMTokenizer),
    ):
        mindformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        mindformers.AutoModel.register(config, model, exist_ok=True)
        mindformers.AutoModelForCausalLM.register(config, model, exist_ok=True)
        mindformers.AutoTokenizer.register(config, slow_tokenizer_class=tokenizer, exist_ok=True)


register()
