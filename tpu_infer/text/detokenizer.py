"""Token ids to text as they come, and stop strings in the text as it comes."""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from tpu_infer.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one sequence, piece by piece: all pushes and the finish together are `decode` of all ids.

    A push costs as much as its own tokens. It gives whole characters only; the bytes of an unfinished one wait.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, at_start: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip_space = at_start and tokenizer.strips_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        data = self._tokenizer.join(ids, skip_special=self._skip_special)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD for the bytes of a character that never came whole, if there are any."""
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Finds stop strings in a text that comes in chunks, however it is cut.

    The match that is complete first wins; of several that end on the same character, the longest. What may yet
    become a stop string is held back. The text ends before the stop string, or behind it if `include`.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._automaton = _Automaton(stops) if stops else None
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now sure to be wanted. Nothing is taken after a match."""
        if self._automaton is None or self.matched is not None:
            return text if self.matched is None else ""
        for i, char in enumerate(text):
            self._state = self._automaton.step(self._state, char)
            self.matched = self._automaton.matches[self._state]
            if self.matched is not None:
                return self._cut(self._held + text[: i + 1], self.matched)
        whole = self._held + text
        sure = len(whole) - self._automaton.depths[self._state]
        self._held = whole[sure:]
        return whole[:sure]

    def finish(self) -> str:
        """What was held back, since no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, stop: str) -> str:
        self._held = ""
        return text if self._include else text.removesuffix(stop)


class _Automaton:
    """Aho and Corasick's: state s stands for the longest end of the text that begins a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.matches: list[str | None] = [None]  # the longest stop string that ends here
        self._fallback = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character; amortised constant time."""
        while state and char not in self.children[state]:
            state = self._fallback[state]
        return self.children[state].get(char, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self.children[state]:
                self.children[state][char] = len(self.children)
                self.children.append({})
                self.depths.append(depth)
                self.matches.append(None)
                self._fallback.append(0)
            state = self.children[state][char]
        self.matches[state] = stop

    def _link(self) -> None:
        """Set each state's fallback, the next shorter end of it that begins a stop string, breadth first."""
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.children[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                self.matches[child] = self.matches[child] or self.matches[self._fallback[child]]
                queue.append(child)
