"""Chat templates: the file's Jinja template, rendered in a sandbox with bounds.

A template is data from a stranger. It runs in jinja2's ``ImmutableSandboxedEnvironment``; beyond that, everything that can multiply text
(``*``, ``~``, ``+``, ``replace``, ``join``, padding, blocks) is bounded, all loops of a rendering share a budget, and only harmless
filters exist. Context of the templates (``trim_blocks``, ``raise_exception``, ``strftime_now``, ``tojson``) follows Hugging Face
transformers.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any

from .errors import RuntimeRefusal

TEMPLATE_KEY = "tokenizer.chat_template"
MAX_TEMPLATE = 1 << 18
MAX_TEXT = 1 << 23
MAX_ITERATIONS = 500_000

GEMMA_TEMPLATE = """{{ bos_token }}{% set first = '' %}{% if messages[0]['role'] == 'system' %}\
{% set first = messages[0]['content'] | trim + '\n\n' %}\
{% set messages = messages[1:] %}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('user and assistant must take turns, starting with user') }}{% endif %}\
<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ (first if loop.first else '') + message['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
"""Gemma's turn format (model card of the instruction-tuned Gemma models), for files that carry no template."""

BUILT_IN = {"gemma": GEMMA_TEMPLATE, "gemma2": GEMMA_TEMPLATE, "gemma3": GEMMA_TEMPLATE}
"""Templates by architecture for files without one."""

_FILTER_WORDS = (
    "abs attr batch capitalize count d default dictsort e escape first float groupby indent int items join last length list lower map "
    "max min reject rejectattr replace reverse round safe select selectattr slice sort string sum title tojson trim truncate unique upper "
    "urlencode wordcount"
)
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{3}|\*)")
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format", "format_map"})


def template_of(metadata: Mapping[str, Any], name: str = "") -> str:
    """The file's template (``tokenizer.chat_template``, or ``.NAME``), or the built-in one of its architecture.

    RuntimeRefusal where there is neither, naming the option that gives one.
    """
    text = metadata.get(f"{TEMPLATE_KEY}.{name}" if name else TEMPLATE_KEY)
    if isinstance(text, str) and text:
        return text
    if name:
        raise RuntimeRefusal(f"the file has no chat template named {name!r}; leave the name out or give one with --chat-template")
    arch = str(metadata.get("general.architecture", ""))
    if arch in BUILT_IN:
        return BUILT_IN[arch]
    raise RuntimeRefusal(
        f"the file has no chat template and there is none built in for {arch or 'its architecture'}; give one with --chat-template FILE"
    )


def is_built_in(metadata: Mapping[str, Any]) -> bool:
    """Whether ``template_of`` falls back to a built-in template: worth telling the user."""
    return not metadata.get(TEMPLATE_KEY) and str(metadata.get("general.architecture", "")) in BUILT_IN


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    **extra: Any,
) -> str:
    """Text of a conversation. ``messages``: dicts with ``role`` and ``content``; ``extra`` are further template variables (``tools``, ...).

    Raises RuntimeRefusal if the template is malformed, unsafe, unbounded, or refuses the conversation itself.
    """
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RuntimeRefusal(f"chat message {i} needs a role and content")
    import jinja2

    budget = _Budget()
    try:
        compiled = _compile(template)
        variables = {
            "messages": [dict(message) for message in messages],
            "bos_token": bos_token,
            "eos_token": eos_token,
            "add_generation_prompt": add_generation_prompt,
            **extra,
            "range": budget.range,
            _BUDGET: budget,
        }
        pieces, total = [], 0
        for piece in compiled.generate(variables):
            total += len(piece)
            if total > MAX_TEXT:
                raise RuntimeRefusal(_TOO_LONG)
            pieces.append(piece)
        return "".join(pieces)
    except RuntimeRefusal:
        raise
    except jinja2.exceptions.SecurityError as error:
        raise RuntimeRefusal(
            f"the chat template does something that is not allowed ({error}); give another with --chat-template FILE"
        ) from None
    except jinja2.TemplateError as error:
        raise RuntimeRefusal(f"the chat template fails ({error}); give another with --chat-template FILE") from None
    except RecursionError:
        raise RuntimeRefusal("the chat template recurses without end; give another with --chat-template FILE") from None
    except MemoryError:
        raise RuntimeRefusal(_TOO_LONG) from None
    except Exception as error:  # a template can raise anything Python's operators can
        raise RuntimeRefusal(f"the chat template fails ({type(error).__name__}: {error}); give another with --chat-template FILE") from None


_TOO_LONG = f"the chat template produces more than {MAX_TEXT} characters; give another with --chat-template FILE"
_TOO_MANY = f"the chat template loops more than {MAX_ITERATIONS} times; give another with --chat-template FILE"


_BUDGET = "_ggufc_budget"


class _Budget:
    """Iterations one rendering may spend in loops, and in building ranges."""

    def __init__(self) -> None:
        self._left = MAX_ITERATIONS

    def spend(self, n: int) -> None:
        self._left -= n
        if self._left < 0:
            raise RuntimeRefusal(_TOO_MANY)

    def range(self, *args: int) -> range:
        wanted = range(*args)
        self.spend(len(wanted))
        return wanted

    def count(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(1)
            yield value


def _bounded(text: Any) -> Any:
    if isinstance(text, (str, list, tuple)) and len(text) > MAX_TEXT:
        raise RuntimeRefusal(_TOO_LONG)
    return text


def _concat(parts: Iterable[Any]) -> str:
    """Join while counting, so that doubling a text in a loop stops before the memory does."""
    out: list[str] = []
    total = 0
    for part in parts:
        text = str(part)
        total += len(text)
        if total > MAX_TEXT:
            raise RuntimeRefusal(_TOO_LONG)
        out.append(text)
    return "".join(out)


def _replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    text, old, new = str(text), str(old), str(new)
    hits = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    if len(text) + hits * max(0, len(new) - len(old)) > MAX_TEXT:
        raise RuntimeRefusal(_TOO_LONG)
    return text.replace(old, new, hits)


def _join(values: Iterable[Any], separator: Any = "") -> str:
    def parts() -> Iterator[Any]:
        for i, value in enumerate(values):
            if i and separator:
                yield separator
            yield value

    return _concat(parts())


def _binary(operator: str, left: Any, right: Any) -> None:
    """Refuse operators whose result could be out of proportion."""
    if operator == "**" and not (
        isinstance(left, (int, float)) and isinstance(right, (int, float)) and abs(left) < 1e6 and abs(right) < 64
    ):
        raise RuntimeRefusal("the chat template computes a power that is too large; give another with --chat-template FILE")
    if operator == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(text, (str, list, tuple)) and isinstance(times, int) and len(text) * max(times, 0) > MAX_TEXT:
                raise RuntimeRefusal(_TOO_LONG)
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
            raise RuntimeRefusal("the chat template computes a number that is too large; give another with --chat-template FILE")
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__") and len(left) + len(right) > MAX_TEXT:
        raise RuntimeRefusal(_TOO_LONG)
    if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
        raise RuntimeRefusal("the chat template pads text with a wide % format; give another with --chat-template FILE")


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    if len(template) > MAX_TEMPLATE:
        raise RuntimeRefusal(
            f"the chat template has {len(template)} characters, at most {MAX_TEMPLATE} are read; give another with --chat-template FILE"
        )
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> Any:
    """The sandbox, built on first use because importing jinja2 takes time that other commands need not spend."""
    import jinja2
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedCode(CodeGenerator):
        def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
            """Count the iterations of every loop."""
            for loop in node.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, _BUDGET, [], [], None, None, lineno=loop.lineno)
                loop.iter.set_environment(self.environment)
            super().visit_Template(node, frame)

        def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
            """``a ~ b`` through the counting join, which the default code would bypass."""
            self.write("environment.concat((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

    class Sandbox(ImmutableSandboxedEnvironment):
        code_generator_class = BoundedCode
        intercepted_binops = frozenset({"*", "**", "+", "%"})
        concat = staticmethod(_concat)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if isinstance(obj, (str, bytes)) and attr in _PADDING_METHODS:
                return False
            return super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value: Any) -> Any:
            """``str.format`` can pad without bound; it is refused like the other padding methods."""
            return None

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _binary(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
            if isinstance(owner, str) and name == "replace":
                return _replace(owner, *args)
            if isinstance(owner, str) and name == "join":
                return _join(args[0] if args else (), owner)
            return _bounded(super().call(__context, __obj, *args, **kwargs))

    def fail(message: Any = "") -> None:
        raise jinja2.TemplateError(str(message))

    def now(form: str) -> str:
        return datetime.datetime.now().strftime(str(form)[:256])

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        if isinstance(indent, int):
            indent = min(indent, 16)
        return str(_bounded(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)))

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    kept = {name: environment.filters[name] for name in _FILTER_WORDS.split() if name in environment.filters}
    environment.filters.clear()
    environment.filters.update(kept)
    environment.filters["tojson"] = tojson
    environment.filters["replace"] = _replace
    environment.filters["join"] = lambda values, d="", attribute=None: _join(
        values if attribute is None else [environment.getitem(v, attribute) for v in values], d
    )
    environment.filters["indent"] = _indent
    for name in ("batch", "slice", "sum"):
        environment.filters[name] = _modest(kept[name])
    environment.filters[_BUDGET] = jinja2.pass_context(lambda context, values: context[_BUDGET].count(values))
    environment.globals.pop("lipsum", None)
    environment.globals.update(raise_exception=fail, strftime_now=now)
    return environment


def _modest(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 whose numbers a template may not make large, and which may not add lists up."""

    @wraps(wrapped)  # keeps jinja2's mark that the first argument is the environment
    def checked(*args: Any, **named: Any) -> Any:
        numbers = (n for n in (*args[1:], *named.values()) if isinstance(n, (int, float)))
        if max(numbers, default=0) > MAX_ITERATIONS or any(isinstance(start, (list, tuple)) for start in (*args[3:], *named.values())):
            raise RuntimeRefusal(_TOO_MANY)
        return wrapped(*args, **named)

    return checked


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's ``indent`` with bounded width."""
    pad = width[:64] if isinstance(width, str) else " " * max(0, min(int(width), 64))
    lines = str(text).split("\n")
    out = [line if (i == 0 and not first) or (not line and not blank) else pad + line for i, line in enumerate(lines)]
    return _join(out, "\n")
