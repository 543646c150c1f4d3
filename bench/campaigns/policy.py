"""A policy of short answers about digits, in NumPy, whose logits depend on the text of the prompt.

An answer is a form (bare, sentence, reasoned, list) and a digit. Forms start with a prior; a reasoned answer needs 20
words and is the most exact. The digit is a softmax, linear in the digits that stand in the prompt: their counts, the
first and the last. There is one weight matrix a question. So a prompt that hides the digits, or the question, cannot
be learned from. A policy that moved too far from its start answers gibberish.

Shapes: S samples, F features, A answers (ten digits and gibberish), Q questions.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
QUESTIONS = ("", "largest", "smallest", "first", "last")
FEATURES, ANSWERS = 31, 11
GIBBERISH = 10
FORMS = ("bare", "sentence", "reasoned", "list")
REASONED, LIST = 2, 3
EXACT = np.array([0.35, 0.45, 1.0, 0.0])
"""Factor of the digit's logits by form."""
HINTS = (("only", 0, 2.0), ("step by step", REASONED, 2.0), ("sentence", 1, 2.0))
DEPTH, REACH = 5.0, 1000.0
"""Gibberish: its first logit, and the squared distance from the first weights that makes up for it."""


def form_text(form: int, digit: int) -> str:
    if digit == GIBBERISH:
        return "## # ## #"
    return (
        f"{digit}",
        f"The answer is {digit}.",
        f"Let me look at each of the digits in turn, compare it with the others, and so I find it: it is {digit}",
        "0 1 2 3 4 5 6 7 8 9",
    )[form]


TEXTS = {(form, digit): form_text(form, digit).split(" ") for form in range(len(FORMS)) for digit in range(ANSWERS)}


@dataclass(frozen=True)
class Prompt:
    """The text that the policy sees, as numbers."""

    question: int
    features: Floats
    """(F,)."""
    hints: Floats
    """(forms,)."""

    @staticmethod
    @cache
    def read(text: str) -> Prompt:
        features = np.zeros(FEATURES)
        shown = [int(digit) for digit in re.findall(r"\d", text)]
        for digit in shown:
            features[digit] += 1.0
        if shown:
            features[10 + shown[0]] = features[20 + shown[-1]] = 1.0
        features[30] = 1.0
        low = text.lower()
        question = next((i for i, word in enumerate(QUESTIONS) if word and word in low), 0)
        hints = np.zeros(len(FORMS))
        for words, form, strength in HINTS:
            if words in low:
                hints[form] += strength
        return Prompt(question, features, hints)


@dataclass
class Sample:
    """One answer, with what its gradient needs."""

    prompt: Prompt
    temperature: float
    form: int
    digit: int
    """-1 if the form names none, or truncation cut it off."""
    tokens: int
    truncated: bool


class Policy:
    """Weights, and the distribution for each prompt. `seed` varies the start."""

    def __init__(self, seed: int, forms: Sequence[float], skill: float) -> None:
        rng = np.random.default_rng([17, seed])
        weights = 0.05 * rng.normal(size=(len(QUESTIONS), FEATURES, ANSWERS))
        for digit in range(10):
            weights[:, digit, digit] += skill
        weights[:, :, GIBBERISH] = 0.0
        self.weights = weights
        self.forms = np.array(forms, np.float64)
        self.start_weights, self.start_forms = weights.copy(), self.forms.copy()
        self._tables: dict[tuple[str, float], tuple[list[float], list[list[float]]]] = {}
        self._strange = -DEPTH

    def prompt(self, text: str) -> Prompt:
        return Prompt.read(text)

    def moved(self) -> None:
        """Forgets the distributions after a step."""
        self._tables.clear()
        distance = float(((self.weights - self.start_weights) ** 2).sum())
        self._strange = DEPTH * (min(distance, 1e6) / REACH - 1)

    def digit_logits(self, prompts: Sequence[Prompt]) -> Floats:
        """(S, A), without the factor of the form."""
        features = np.stack([prompt.features for prompt in prompts])
        questions = np.array([prompt.question for prompt in prompts])
        return np.asarray(np.einsum("sf,sfa->sa", features, self.weights[questions]))

    def _table(self, text: str, temperature: float) -> tuple[list[float], list[list[float]]]:
        """Cumulative probabilities of the forms, and of the digits by form."""
        known = self._tables.get((text, temperature))
        if known is None:
            prompt = self.prompt(text)
            forms = cumulative(((self.forms + prompt.hints) / temperature).tolist())
            raw = (prompt.features @ self.weights[prompt.question] / temperature).tolist()[:GIBBERISH]
            strange = self._strange / temperature
            known = forms, [cumulative([*(factor * one for one in raw), strange]) for factor in EXACT.tolist()]
            self._tables[text, temperature] = known
        return known

    def scaled(self, logits: Floats) -> Floats:
        logits = np.array(logits)
        logits[..., GIBBERISH] = self._strange
        return logits

    def sample(self, text: str, temperature: float, max_tokens: int, draws: Sequence[float]) -> tuple[str, Sample]:
        forms, digits = self._table(text, temperature)
        form = min(bisect.bisect(forms, draws[0]), len(FORMS) - 1)
        digit = min(bisect.bisect(digits[form], draws[1]), ANSWERS - 1) if form != LIST else -1
        words = TEXTS[form, max(digit, 0)]
        truncated = len(words) > max_tokens
        if truncated:
            words = words[:max_tokens]
            digit = -1 if digit != GIBBERISH else digit
        return " ".join(words), Sample(self.prompt(text), temperature, form, digit, len(words), truncated)

    def gradient(
        self, samples: Sequence[Sample], pushes: Floats, kl_coef: float
    ) -> tuple[Floats, Floats, float, float]:
        """Gradients of weights and forms for `pushes` (S,) on the log-probabilities; mean entropy and KL."""
        prompts = [sample.prompt for sample in samples]
        temperature = np.array([sample.temperature for sample in samples])[:, None]
        form = np.array([sample.form for sample in samples])
        digit = np.array([sample.digit for sample in samples])
        hints = np.stack([prompt.hints for prompt in prompts])
        rows = np.arange(len(samples))
        p_form = softmax((self.forms + hints) / temperature)
        raw = self.digit_logits(prompts)
        factor = EXACT[form][:, None]
        p_digit = softmax(self.scaled(raw * factor) / temperature)
        push_form = -p_form * pushes[:, None]
        push_form[rows, form] += pushes
        named = digit >= 0
        push_digit = -p_digit * (pushes * named)[:, None]
        push_digit[rows[named], digit[named]] += pushes[named]
        log_form, log_digit = np.log(p_form + 1e-12), np.log(p_digit + 1e-12)
        first_form = softmax((self.start_forms + hints) / temperature)
        features = np.stack([prompt.features for prompt in prompts])
        questions = np.array([prompt.question for prompt in prompts])
        first_raw = np.einsum("sf,sfa->sa", features, self.start_weights[questions])
        first_raw[:, GIBBERISH] = -DEPTH
        first_scaled = first_raw * factor
        first_scaled[:, GIBBERISH] = -DEPTH
        first_digit = softmax(first_scaled / temperature)
        drift_form, drift_digit = log_form - np.log(first_form + 1e-12), log_digit - np.log(first_digit + 1e-12)
        kl = (p_form * drift_form).sum(-1) + (p_digit * drift_digit).sum(-1)
        if kl_coef:
            share = kl_coef / len(samples)
            push_form -= share * p_form * (drift_form - (p_form * drift_form).sum(-1, keepdims=True))
            push_digit -= share * p_digit * (drift_digit - (p_digit * drift_digit).sum(-1, keepdims=True))
        push_digit = push_digit * factor / temperature
        strange = push_digit[:, GIBBERISH].sum() * DEPTH * 2 / REACH
        push_digit[:, GIBBERISH] = 0.0
        weights = strange * (self.weights - self.start_weights)
        np.add.at(weights, questions, features[:, :, None] * push_digit[:, None, :])
        entropy = -(p_form * log_form).sum(-1) - (p_digit * log_digit).sum(-1)
        return weights, (push_form / temperature).sum(0), float(entropy.mean()), float(kl.mean())


def cumulative(logits: Sequence[float]) -> list[float]:
    """Cumulative probabilities. Faster than NumPy for so few."""
    highest = max(logits)
    shares = [math.exp(logit - highest) for logit in logits]
    total = sum(shares)
    return list(accumulate(share / total for share in shares))


def softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))
