"""A session: a context that reads and writes text, and keeps its state in files.

    with Session("model.ggufc") as s:
        for piece in s.generate("Why is the sky blue?", n_predict=64):
            print(piece, end="", flush=True)

``generate_many`` continues many prompts at once; ``context`` has what needs no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .context import Context, exclusive
from .errors import RuntimeRefusal, require_text, token_list
from .sampling import SamplingOptions

if TYPE_CHECKING:
    from .generation import Generation
    from .parallel import ParallelGeneration
    from .state_io import BlobSource, Target
    from .tokenizer import Tokenizer


class Session(Context):
    """A ``Context``, whose options it takes, with the model's tokenizer, chat template and sampling, and state files."""

    # Text

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built on first use; RuntimeRefusal if the file has none."""
        from .tokenizer import load_tokenizer

        return load_tokenizer(self.artifact.metadata)

    def tokenize(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """Token ids of ``text``; ``special`` reads control tokens in it, ``bos`` None follows the model."""
        require_text("the text to tokenize", text)
        return self.tokenizer.encode(text, special, bos)

    def detokenize(self, tokens: Iterable[int], special: bool = True) -> str:
        return self.tokenizer.decode(token_list("tokens", tokens), special)

    def chat_prompt(
        self, messages: Sequence[dict[str, Any]], template: str | None = None, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The conversation as the model's chat template writes it; tokenize the result with ``bos`` off where it begins with the BOS
        text.
        """
        from . import chat

        texts = self.tokenizer.vocab.texts
        bos, eos = (texts[i] if i is not None else "" for i in (self.tokenizer.bos, self.tokenizer.eos))
        source = chat.template_of(self.artifact.metadata) if template is None else template
        return chat.render(source, messages, bos_token=bos, eos_token=eos, add_generation_prompt=add_generation_prompt, **extra)

    def chat_tokens(self, messages: Sequence[dict[str, Any]], template: str | None = None, **extra: Any) -> list[int]:
        """Token ids of ``chat_prompt``, with exactly one BOS where the model or the template wants one."""
        text = self.chat_prompt(messages, template, **extra)
        bos = self.tokenizer.bos
        written = bos is not None and text.startswith(self.tokenizer.vocab.texts[bos])
        return self.tokenize(text, bos=False if written else self.tokenizer.add_bos)

    def eval(self, text: str | Sequence[int], seq: int = 0) -> np.ndarray:
        """Continue ``seq`` with text or tokens; logits f32 [n_vocab] of the last one."""
        tokens = self._tokens_of(text, seq)
        return self.decode(tokens, None, seq)[0]

    def _tokens_of(self, text: str | Sequence[int] | np.ndarray, seq: int) -> list[int]:
        if isinstance(text, np.ndarray) or (isinstance(text, Sequence) and not isinstance(text, str)):
            return token_list("the prompt", text)
        if not isinstance(text, str):
            raise RuntimeRefusal(f"the prompt is {text!r}; give a text or token ids")
        tokens = self.tokenize(text, bos=None if self.cells.pos_max(seq) < 0 else False)
        if not tokens:
            raise RuntimeRefusal("the prompt is empty and the model adds no BOS token; give some text")
        return tokens

    # Generation

    def generate(
        self,
        prompt: str | Sequence[int],
        n_predict: int = 128,
        sampling: SamplingOptions | None = None,
        stop: str | Sequence[str] = (),
        on_token: Callable[[int, str], None] | None = None,
        *,
        seq: int = 0,
        reuse_prefix: bool = False,
        ignore_eos: bool = False,
        context_shift: bool = False,
        n_keep: int = 0,
    ) -> Generation:
        """Continue a prompt. The result yields pieces of text as they come; ``.text()`` (or ``str()``) runs to the end and returns all of
        it.

        ``n_predict`` -1: until the model stops or the context is full. ``stop``: a text that ends the generation and is not part of it, or
        several.
        ``reuse_prefix``: ``prompt`` is the whole conversation, evaluate only what differs from what the sequence holds.
        ``context_shift``: when the context is full, drop half of what follows the first ``n_keep`` tokens and go on.
        """
        from .generation import Generation

        return Generation(
            self,
            prompt,
            n_predict,
            SamplingOptions(seed=self.seed) if sampling is None else sampling,
            stop,
            on_token,
            seq,
            reuse_prefix,
            ignore_eos,
            context_shift,
            n_keep,
        )

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        n_predict: int = 128,
        sampling: SamplingOptions | Sequence[SamplingOptions] | None = None,
        stop: str | Sequence[str] = (),
        on_token: Callable[[int, int, str], None] | None = None,
        *,
        ignore_eos: bool = False,
        n_parallel: int | None = None,
    ) -> ParallelGeneration:
        """Continue many prompts, up to ``n_parallel`` at once (all empty sequences by default) by continuous batching.

        The result yields (index of the prompt, piece); ``.texts()`` runs to the end. Each text is the one ``generate`` gives for its
        prompt alone. ``sampling`` is one for all or one per prompt; ``on_token(index, token, piece)``.
        """
        from .parallel import ParallelGeneration

        options = SamplingOptions(seed=self.seed) if sampling is None else sampling
        return ParallelGeneration(self, prompts, n_predict, options, stop, ignore_eos, n_parallel, on_token)

    # State

    @exclusive
    def state_size(self, seq: int | None = None, partial: bool = False) -> int:
        """Bytes that ``state_save`` would write."""
        from . import session_state

        return session_state.size(self, seq, partial)

    @exclusive
    def state_save(self, target: Target, seq: int | None = None, partial: bool = False) -> int:
        """Save the whole context, or one sequence, to a path or a binary file; returns the bytes written (``state_size``).

        ``partial`` leaves out what dropping cells can undo: a checkpoint of a sequence that goes on in this session. A path appears whole
        or not at all.
        """
        from . import session_state

        return session_state.save(self, target, seq, partial)

    @exclusive
    def state_load(self, source: BlobSource, seq: int | None = None, partial: bool = False) -> int:
        """Restore what ``state_save`` wrote (path, bytes or binary file); returns the number of restored cells.

        A sequence's state fits any sequence; its cells need not be neighbours. The next logits have the bits of a run that was never
        saved. RuntimeRefusal, naming both sides, for a blob that does not fit: then the destination is empty and every other sequence as
        before; a refused partial state changes nothing. A partial state is for the sequence it was cut from: what came after is dropped,
        and where the model keeps one row of convolution inputs per sequence, must have been removed before (``seq_rm``).
        """
        from . import session_state

        return session_state.load(self, source, seq, partial)
