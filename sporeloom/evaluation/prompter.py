# SPDX-License-Identifier: Apache-2.0
"""Prompts for the functions of HumanEval-X: text to continue, or a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sporeloom.core.errors import ConfigError
from sporeloom.data.tokenizer import ChatMessage, Prompt, Tokenizer, chat_prompt, text_prompt
from sporeloom.evaluation.chat import question, translation_question
from sporeloom.evaluation.checks import Problem
from sporeloom.evaluation.programs import generation_prompt, translation_prompt
from sporeloom.inference.config import GenerateJob, find_language, language_tags
from sporeloom.inference.stopping import StopCondition, at_closed_brace, at_dedent

PromptForm = Literal["tagged", "plain", "chat"]
"""tagged: under the line that names the language, as CodeGeeX was measured. plain: the prompt without blanks at its ends, as
CodeGeeX2 was measured (THUDM/CodeGeeX2 evaluation/utils.py). chat: a question."""


@dataclass(frozen=True)
class Prompter:
    """One way of prompting one model."""

    form: PromptForm
    family: str
    tokenizer: Tokenizer
    system_prompt: str | None = None

    def prompt(self, problem: Problem, language: str) -> Prompt:
        """The prompt for a problem."""
        if self.form == "chat":
            return self._said(question(problem, language))
        text = generation_prompt(problem, language)
        text = text.strip() if self.form == "plain" else find_language(language, self.family).tagged(text)
        return text_prompt(self.tokenizer, text)

    def translation(self, source: Problem, source_language: str, problem: Problem, language: str) -> Prompt:
        """The prompt for a translation of `source`."""
        if self.form == "chat":
            return self._said(translation_question(source, source_language, problem, language))
        return text_prompt(self.tokenizer, translation_prompt(source, source_language, problem, language))

    def ending(self, language: str) -> StopCondition | None:
        """Function that finds where the function ends that a prompt began; an answer ends by itself."""
        if self.form == "chat":
            return None
        return at_dedent() if language == "python" else at_closed_brace()

    def _said(self, text: str) -> Prompt:
        told = [ChatMessage("system", self.system_prompt)] if self.system_prompt else []
        return chat_prompt(self.tokenizer, [*told, ChatMessage("user", text)])


def prompter_of(job: GenerateJob, form: PromptForm | None, system_prompt: str | None) -> Prompter:
    """The prompt form of a job's model; without --prompt-form, the one it was trained with.

    Raises:
        ConfigError: it knows no languages or is a base model.
    """
    default: PromptForm = "tagged" if language_tags(job.family) else "plain"
    chosen: PromptForm = form or job.tokenizer.benchmark_form or default
    if chosen == "tagged":
        find_language("python", job.family)
    if chosen != "chat" and system_prompt is not None:
        raise ConfigError(f"--system-prompt is for --prompt-form chat, not {chosen}")
    prompter = Prompter(chosen, job.family, job.tokenizer, system_prompt)
    if chosen == "chat":  # which a base model refuses
        prompter.prompt({"prompt": "", "declaration": ""}, "python")
    return prompter
