"""A word game for two models: the describer sees a secret word and hints at it, the guesser sees the hint and names a
word. Each model has its own reward.
"""

from __future__ import annotations

from difflib import SequenceMatcher

import openai

from agentjet.client import Episode
from agentjet.types import Reward, Task

DESCRIBER, GUESSER = "describer", "guesser"
WORDS = (
    "apple", "bread", "chair", "clock", "cloud", "dog", "door", "ear", "fire", "fish", "flower", "garden", "hammer",
    "horse", "house", "letter", "lion", "moon", "mother", "mountain", "rain", "river", "road", "rose", "sea", "star",
    "stone", "sun", "table", "train", "tree", "water", "wheel", "window", "winter", "writer",
)  # fmt: skip

# A new client costs 17 ms, a copy of one for another episode nothing. The server is on this machine: no proxy is asked.
OPENAI = openai.OpenAI(
    base_url="http://127.0.0.1",
    api_key="each episode has its own",
    max_retries=6,
    http_client=openai.DefaultHttpxClient(trust_env=False),
)


def play(task: Task, episode: Episode) -> Reward:
    """The agent: one round. Half of each reward is the closeness of the guess, half is for keeping the rules: a hint
    must not contain the word, a guess is letters only."""
    word = str(task.payload)
    hint = ask(episode, DESCRIBER, f"Describe a {word} in a few words, without saying the word itself.")
    guess = ask(episode, GUESSER, f"Which word is meant? Answer with that word only. It is {hint}")
    near = closeness(guess, word)
    return Reward(
        near,
        by_role={DESCRIBER: (near + fairness(hint, word)) / 2, GUESSER: (near + letters(guess)) / 2},
        metrics={"right": float(near == 1.0), "closeness": near},
    )


def ask(episode: Episode, model: str, text: str) -> str:
    """The answer of one of the two models."""
    llm = OPENAI.with_options(base_url=episode.base_url, api_key=episode.api_key)
    completion = llm.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
    return completion.choices[0].message.content or ""


def closeness(guess: str, word: str) -> float:
    """1 for the word, less the fewer letters it shares with the guess in the same order (`difflib`'s ratio)."""
    return SequenceMatcher(None, guess.strip(" .!\n\"'").lower(), word, autojunk=False).ratio()


def fairness(hint: str, word: str) -> float:
    """0 for a hint that contains the word, otherwise the share of letters in its words."""
    return 0.0 if word in hint.lower() else letters(hint.replace(" ", ""))


def letters(text: str) -> float:
    """The share of letters, of the alphabet that the words are written in."""
    return sum(sign.isascii() and sign.isalpha() for sign in text) / max(1, len(text))


def rounds() -> list[Task]:
    """One task a word."""
    return [Task(word, task_set="word_game", payload=word) for word in WORDS]
